-- The relay's statements. Every write names the lease generation it was made under; clock_timestamp(), not now():
-- now() stands still in a transaction and would accept a lease that expired meanwhile.

-- name: poll
-- $1 lanes, $2 positions, $3 snapshots, $4 targets, $5 late positions, $6 rows a lane, $7 bytes a lane.
-- A function because only its settings fix the plan, without a session setting that would leak through a pooler.
SELECT * FROM fencepost.poll($1::smallint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::integer, $7::bigint);

-- name: mark
-- Insert the receipts of $1 relay_id: $2 lanes, $3 generations, $4 sequences, $5 positions, $6 snapshots, $7 targets,
-- $8 late positions, $9 first ids, $10 last ids, $11 row counts, $12 late counts, $13 partitions. Returns the lanes that
-- the owner still holds; a lane that is missing was lost, and nothing was written for it.
-- The fence locks the lane row in place, so a claim waits for this insert and reads it afterwards. Locked in lane order:
-- two statements on the same lanes cannot deadlock. asynchronous commit: a mark lost with the server's last moments
-- costs a repeat, and no flush competes with the writers' own.
WITH setting AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
), given AS (
    SELECT * FROM unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], $8::bigint[],
                         $9::bigint[], $10::bigint[], $11::integer[], $12::integer[], $13::text[])
        AS g(lane, generation, sequence, position, snapshot, target, late_position, first_id, last_id, row_count, late_count, partitions)
), fence AS MATERIALIZED (
    SELECT l.lane, l.lease_generation AS generation FROM fencepost.lanes AS l
    WHERE l.lane = ANY ($2::smallint[]) AND l.lease_owner = $1 AND l.lease_expires_at > clock_timestamp()
      AND EXISTS (SELECT FROM given AS g WHERE g.lane = l.lane AND g.generation = l.lease_generation)
    ORDER BY l.lane
    FOR NO KEY UPDATE OF l
)
INSERT INTO fencepost.receipts (
    lane, sequence, generation, relay_id, position, snapshot, target, late_position, first_id, last_id, row_count, late_count, partitions)
SELECT g.lane, g.sequence, g.generation, $1, g.position, g.snapshot::pg_snapshot, g.target::pg_snapshot, g.late_position,
       g.first_id, g.last_id, g.row_count, g.late_count, g.partitions::jsonb
FROM given AS g JOIN fence USING (lane, generation) CROSS JOIN setting
RETURNING lane;

-- name: marked_already
-- After a mark without an answer: which of $2 lanes have the receipt of $3 sequences, made by $1 under $4 generations.
SELECT r.lane, r.sequence
FROM unnest($2::smallint[], $3::bigint[], $4::bigint[]) AS g(lane, sequence, generation)
JOIN fencepost.receipts AS r USING (lane, sequence, generation)
WHERE r.relay_id = $1;

-- name: cursors
-- The cursors of $1 lanes: read in a statement of its own after the claim has committed. Within the claim's statement
-- the snapshot could predate a mark that the claim had to wait for.
SELECT lane, sequence, position, snapshot::text AS snapshot, target::text AS target, late_position
FROM fencepost.cursors WHERE lane = ANY ($1::smallint[]);

-- name: claim
-- Take up to $3 free lanes for $1 for $2 seconds, besides those it holds ($4). Free: never owned, released, expired, or
-- left over from this very process when it stopped trusting its lease.
WITH free AS MATERIALIZED (
    SELECT lane FROM fencepost.lanes
    WHERE (lease_owner IS NULL OR lease_expires_at <= clock_timestamp() OR lease_owner = $1) AND lane <> ALL ($4::smallint[])
    ORDER BY lane LIMIT $3
    FOR UPDATE SKIP LOCKED
)
UPDATE fencepost.lanes AS l
SET lease_owner = $1, lease_generation = l.lease_generation + 1, lease_expires_at = clock_timestamp() + make_interval(secs => $2)
FROM free WHERE l.lane = free.lane
RETURNING l.lane, l.lease_generation;

-- name: renew
-- Extend the leases of $1 on $2 lanes held under $3 generations by $4 seconds from now. A missing lane was lost. The
-- newest receipt's sequence tells whether a crash of the server took back marks, which commit asynchronously.
WITH held AS MATERIALIZED (
    SELECT l.lane FROM fencepost.lanes AS l
    JOIN unnest($2::smallint[], $3::bigint[]) AS g(lane, generation) ON g.lane = l.lane AND g.generation = l.lease_generation
    WHERE l.lease_owner = $1 AND l.lease_expires_at > clock_timestamp()
    ORDER BY l.lane
    FOR NO KEY UPDATE OF l
)
UPDATE fencepost.lanes AS l SET lease_expires_at = clock_timestamp() + make_interval(secs => $4)
FROM held WHERE l.lane = held.lane
RETURNING l.lane, (SELECT coalesce(max(r.sequence), 0) FROM fencepost.receipts AS r WHERE r.lane = l.lane) AS newest;

-- name: release
-- Give up $2 lanes held under $3 generations, if still $1's, and wake whoever is entitled to them.
WITH held AS MATERIALIZED (
    SELECT l.lane FROM fencepost.lanes AS l
    JOIN unnest($2::smallint[], $3::bigint[]) AS g(lane, generation) ON g.lane = l.lane AND g.generation = l.lease_generation
    WHERE l.lease_owner = $1
    ORDER BY l.lane
    FOR NO KEY UPDATE OF l
), released AS (
    UPDATE fencepost.lanes AS l SET lease_owner = NULL, lease_expires_at = NULL
    FROM held WHERE l.lane = held.lane
    RETURNING l.lane
)
SELECT lane, pg_notify('fencepost_lanes', '') FROM released;

-- name: join
-- Register $1 (name $2, version $3) as a live relay for $4 seconds, or extend it, with the lanes that stand still under it ($5).
INSERT INTO fencepost.relays (relay_id, name, version, expires_at, stopped)
VALUES ($1, $2, $3, clock_timestamp() + make_interval(secs => $4), $5::text::jsonb)
ON CONFLICT (relay_id) DO UPDATE SET expires_at = EXCLUDED.expires_at, stopped = EXCLUDED.stopped;

-- name: leave
-- Forget $1, and every relay that has been gone for an hour; tell the others.
WITH gone AS (
    DELETE FROM fencepost.relays WHERE relay_id = $1 OR expires_at < clock_timestamp() - interval '1 hour' RETURNING relay_id
)
SELECT pg_notify('fencepost_lanes', '') FROM gone LIMIT 1;

-- name: fleet
-- Live relays, eldest first, and how many lanes are free for the taking by $1 beyond $2, which it holds.
SELECT coalesce((SELECT array_agg(relay_id ORDER BY started_at, relay_id) FROM fencepost.relays
                 WHERE expires_at > clock_timestamp()), '{}') AS members,
       count(*) AS lanes,
       count(*) FILTER (WHERE (lease_owner IS NULL OR lease_expires_at <= clock_timestamp() OR lease_owner = $1)
                          AND lane <> ALL ($2::smallint[])) AS free
FROM fencepost.lanes;

-- name: arm
-- Ask writers to ring for $1 lanes during the next $2 milliseconds.
SELECT max(setval(('fencepost.doorbell_' || lane)::regclass, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + $2::bigint))
FROM unnest($1::smallint[]) AS lane;

-- name: transaction_id
-- After arming: every writer that may not have seen the flag has an older transaction id than this one. Drawn in the
-- arming statement itself it would be older than the flag by a moment.
SELECT pg_current_xact_id()::text AS bound;

-- name: disarm
SELECT max(setval(('fencepost.doorbell_' || lane)::regclass, 1)) FROM unnest($1::smallint[]) AS lane;

-- name: installation
-- Where the cursors were made, and where we are. A replica is refused: its snapshots are not the writer's.
SELECT i.system_identifier::text AS recorded,
       (SELECT system_identifier::text FROM pg_control_system()) AS actual, pg_is_in_recovery() AS in_recovery
FROM fencepost.installation AS i;

-- name: flushed
-- The end of the log, and how far it is on disk: rows read after the first are durable once the second has passed it.
SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn AS inserted, pg_current_wal_flush_lsn() - '0/0'::pg_lsn AS flushed;

-- name: backlog
-- For $1 lanes with $2 positions: rows waiting, counted up to $3, and the age of the oldest in seconds. Both are bounded
-- reads of the primary key. Late rows below the position are not counted; they are published at the next poll.
SELECT c.lane,
       (SELECT count(*) FROM (SELECT FROM fencepost.outbox AS o WHERE o.lane = c.lane AND o.id > c.position ORDER BY o.lane, o.id LIMIT $3) AS w) AS waiting,
       coalesce(extract(epoch FROM clock_timestamp() - (
           SELECT o.created_at FROM fencepost.outbox AS o WHERE o.lane = c.lane AND o.id > c.position ORDER BY o.lane, o.id LIMIT 1)), 0)::float8
           AS oldest_age_seconds
FROM unnest($1::smallint[], $2::bigint[]) AS c(lane, position);

-- name: horizon
-- Who holds back vacuum the longest, by kind, and for how many seconds and transactions.
SELECT kind, max(seconds)::float8 AS seconds, max(transactions)::bigint AS transactions
FROM (
    SELECT 'session' AS kind, extract(epoch FROM clock_timestamp() - xact_start) AS seconds, age(backend_xmin) AS transactions
    FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND backend_type <> 'walsender'
    UNION ALL
    SELECT 'prepared', extract(epoch FROM clock_timestamp() - prepared), age(transaction) FROM pg_prepared_xacts
    UNION ALL
    SELECT 'slot', NULL, greatest(age(xmin), age(catalog_xmin)) FROM pg_replication_slots
    WHERE xmin IS NOT NULL OR catalog_xmin IS NOT NULL
) AS holders
GROUP BY kind;
