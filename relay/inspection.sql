-- What the operator's commands read, and the one change they make. Every read is bounded.

-- name: lanes
-- Every lane with its owner, the rest of its lease, its cursor, and what waits: counted up to $1.
SELECT l.lane, l.lease_owner, l.lease_generation,
       extract(epoch FROM l.lease_expires_at - clock_timestamp())::float8 AS lease_seconds_left,
       c.position, c.sequence, c.target IS NOT NULL AS draining_late_rows,
       extract(epoch FROM clock_timestamp() - c.marked_at)::float8 AS marked_seconds_ago,
       (SELECT count(*) FROM (SELECT FROM fencepost.outbox AS o WHERE o.lane = l.lane AND o.id > c.position
                              ORDER BY o.lane, o.id LIMIT $1) AS w) AS waiting,
       (SELECT extract(epoch FROM clock_timestamp() - o.created_at)::float8 FROM fencepost.outbox AS o
        WHERE o.lane = l.lane AND o.id > c.position ORDER BY o.lane, o.id LIMIT 1) AS oldest_age_seconds,
       (SELECT r.stopped -> l.lane::text FROM fencepost.relays AS r WHERE r.relay_id = l.lease_owner)::text AS stopped
FROM fencepost.lanes AS l JOIN fencepost.cursors AS c USING (lane)
ORDER BY l.lane;

-- name: relays
SELECT relay_id, name, version, extract(epoch FROM clock_timestamp() - started_at)::float8 AS up_seconds,
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS expires_in_seconds,
       (SELECT count(*) FROM fencepost.lanes AS l WHERE l.lease_owner = r.relay_id AND l.lease_expires_at > clock_timestamp()) AS lanes
FROM fencepost.relays AS r
WHERE expires_at > clock_timestamp()
ORDER BY started_at;

-- name: event
-- A row of the outbox by event id, without its payload, key or headers' values.
SELECT o.lane, o.id, o.xid::text AS xid, o.event_id::text AS event_id, o.topic, o.event_type, o.key, o.record_bytes, o.tenant_id,
       o.run_id, o.step, o.operation, to_char(o.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
       d.delivered
FROM fencepost.outbox AS o JOIN fencepost.delivery AS d USING (lane, id)
WHERE o.event_id = $1::uuid;

-- name: receipt_of
-- The receipt that delivered row $2 of lane $1, whose transaction is $3: the first whose cursor covers it. Receipts are
-- read from the first whose position reached the id; a late row's lies behind that one, at most $4 receipts further.
SELECT r.sequence, r.generation, r.relay_id, r.first_id, r.last_id, r.row_count, r.late_count, r.partitions::text AS partitions,
       to_char(r.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at
FROM (
    SELECT * FROM fencepost.receipts AS s
    WHERE s.lane = $1 AND s.position >= $2
    ORDER BY s.lane, s.position, s.sequence LIMIT $4
) AS r
WHERE pg_visible_in_snapshot($3::text::xid8, r.snapshot)
   OR (r.target IS NOT NULL AND $2 <= r.late_position AND pg_visible_in_snapshot($3::text::xid8, r.target))
ORDER BY r.sequence LIMIT 1;

-- name: server
SELECT current_setting('server_version_num')::int AS version, current_setting('server_version') AS version_text,
       pg_is_in_recovery() AS in_recovery, pg_backend_pid() AS backend_pid, current_user AS role,
       current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('max_connections')::int AS max_connections,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS connection_limit,
       extract(epoch FROM clock_timestamp())::float8 AS clock,
       to_regnamespace('fencepost') IS NOT NULL AS has_schema;

-- name: asynchronous_roles
-- Roles and databases whose default is synchronous_commit = off: their commits can be published and then lost in a crash.
SELECT coalesce(r.rolname, '(every role)') AS role, coalesce(d.datname, '(every database)') AS database
FROM pg_db_role_setting AS s LEFT JOIN pg_roles AS r ON r.oid = s.setrole LEFT JOIN pg_database AS d ON d.oid = s.setdatabase
WHERE 'synchronous_commit=off' = ANY (s.setconfig) AND (s.setdatabase = 0 OR d.datname = current_database());

-- name: missing_privileges
-- What the current role lacks of what a relay needs.
SELECT p.what FROM (
    SELECT 'EXECUTE on fencepost.poll' AS what, has_function_privilege('fencepost.poll(smallint[],bigint[],text[],text[],bigint[],integer,bigint)', 'EXECUTE') AS granted
    UNION ALL SELECT 'SELECT on fencepost.outbox', has_table_privilege('fencepost.outbox', 'SELECT')
    UNION ALL SELECT 'UPDATE on fencepost.lanes', has_table_privilege('fencepost.lanes', 'UPDATE')
    UNION ALL SELECT 'INSERT on fencepost.receipts', has_table_privilege('fencepost.receipts', 'INSERT')
    UNION ALL SELECT 'INSERT on fencepost.relays', has_table_privilege('fencepost.relays', 'INSERT')
    UNION ALL SELECT 'UPDATE on sequence fencepost.doorbell_0', has_sequence_privilege('fencepost.doorbell_0', 'UPDATE')
) AS p WHERE NOT p.granted;

-- name: sequence_cache
SELECT seqcache FROM pg_sequence WHERE seqrelid = 'fencepost.outbox_id_seq'::regclass;

-- name: orphan_lanes
-- Lanes that rows name and no lane row has: nobody would publish them. A loose index scan, one probe a lane in use.
WITH RECURSIVE used AS (
    (SELECT lane FROM fencepost.outbox ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT o.lane FROM fencepost.outbox AS o WHERE o.lane > used.lane ORDER BY o.lane LIMIT 1) FROM used WHERE used.lane IS NOT NULL
)
SELECT lane FROM used WHERE lane IS NOT NULL AND lane NOT IN (SELECT lane FROM fencepost.lanes);

-- name: recent_topics
-- Topics of the newest $1 rows of each lane.
SELECT DISTINCT o.topic FROM fencepost.lanes AS l
CROSS JOIN LATERAL (SELECT topic FROM fencepost.outbox AS n WHERE n.lane = l.lane ORDER BY n.lane DESC, n.id DESC LIMIT $1) AS o
ORDER BY o.topic;

-- name: may_read_runs
-- Null before there are runs. A relay's own role reads the outbox only, where it meets the topics of recent events.
SELECT has_column_privilege(r.name, 'run_id', 'SELECT') AND has_column_privilege(r.name, 'topic', 'SELECT') AS granted
FROM (SELECT to_regclass('fencepost.runs')::oid AS name) AS r;

-- name: run_topics
-- Topics of the newest $1 runs: ids rise with time.
SELECT DISTINCT n.topic FROM (SELECT topic FROM fencepost.runs ORDER BY run_id DESC LIMIT $1) AS n ORDER BY n.topic;

-- name: rebase
-- Make this cluster's own what was restored into it. $1 actor, $2 reason. The one statement here that writes.
SELECT undelivered_restated, delivered_restated, lanes FROM fencepost.rebase($1, $2);

-- name: rebase_preview
SELECT i.system_identifier <> (SELECT system_identifier FROM pg_control_system()) AS needed,
       (SELECT count(*) FROM fencepost.lanes WHERE lease_expires_at > clock_timestamp()) AS held
FROM fencepost.installation AS i;
