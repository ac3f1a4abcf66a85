-- What the operator's commands read of runs. Inputs, outputs, keys and event details are never among it.
-- A range of run ids bounds every look at many runs: they are UUIDv7, so a range of ids is a range of time.

-- name: clock
SELECT clock_timestamp() AS at;

-- name: scope
-- How many runs with ids from $1 to $2 tenant $3 (null: any) has, counted up to $4.
SELECT count(*) AS runs FROM (
    SELECT FROM fencepost.runs AS r
    WHERE r.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR r.tenant_id = $3) LIMIT $4) AS r;

-- name: list_runs
-- The newest $6 runs of tenant $1, workflow $2 and state $3 (null: any) with ids from $4 to $5.
SELECT r.run_id, r.tenant_id, r.workflow, r.state, j.state AS job_state, j.attempts, j.max_attempts, j.dead_reason, r.error_code,
       CASE WHEN j.state = 'queued' AND j.available_at >= timestamptz '9999-01-01' THEN j.last_error_code END AS parked_as,
       r.created_at, r.finished_at, clock_timestamp() AS now
FROM fencepost.runs AS r JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
WHERE r.run_id BETWEEN $4 AND $5
  AND ($1::text IS NULL OR r.tenant_id = $1) AND ($2::text IS NULL OR r.workflow = $2) AND ($3::text IS NULL OR r.state = $3)
ORDER BY r.run_id DESC LIMIT $6;

-- name: list_parked
-- At most $3 runs of tenant $1 and workflow $2 (null: any) that wait for a person, those of a workflow by their ids. A loose index scan
-- over the workflows: parked jobs are the last of each.
WITH RECURSIVE waiting AS (
    (SELECT j.workflow FROM fencepost.jobs AS j WHERE j.state = 'queued' ORDER BY j.workflow LIMIT 1)
    UNION ALL
    SELECT (SELECT j.workflow FROM fencepost.jobs AS j WHERE j.state = 'queued' AND j.workflow > w.workflow ORDER BY j.workflow LIMIT 1)
    FROM waiting AS w WHERE w.workflow IS NOT NULL
)
SELECT r.run_id, r.tenant_id, r.workflow, r.state, p.state AS job_state, p.attempts, p.max_attempts, p.dead_reason, r.error_code,
       p.last_error_code AS parked_as, r.created_at, r.finished_at, clock_timestamp() AS now
FROM waiting AS w CROSS JOIN LATERAL (
    SELECT j.* FROM fencepost.jobs AS j
    WHERE j.state = 'queued' AND j.workflow = w.workflow AND j.available_at >= timestamptz '9999-01-01'
      AND ($1::text IS NULL OR j.tenant_id = $1)
    ORDER BY j.available_at, j.run_id LIMIT $3
) AS p JOIN fencepost.runs AS r ON r.run_id = p.run_id AND r.tenant_id = p.tenant_id
WHERE w.workflow IS NOT NULL AND ($2::text IS NULL OR w.workflow = $2)
LIMIT $3;

-- name: resume
-- Let parked run $2 of tenant $1 go on, for actor $3 and reason $4.
SELECT p.outcome FROM fencepost.resume_run($1, $2, $3, $4) AS p;

-- name: erase
-- Erase the lineage of tenant $1 that $2 names, a run or a monitor's id, for actor $3 and reason $4.
SELECT n.run_id, e.outcome, e.runs
FROM (SELECT coalesce(
    (SELECT r.root_run_id FROM fencepost.runs AS r WHERE r.run_id = $2 AND r.tenant_id = $1),
    (SELECT l.root_run_id FROM fencepost.lineages AS l WHERE l.monitor_id = $2 AND l.tenant_id = $1),
    $2) AS run_id) AS n
CROSS JOIN LATERAL fencepost.erase_lineage($1, n.run_id, $3, $4) AS e;

-- name: tenants_of
-- Who has a run with id $1.
SELECT r.tenant_id FROM fencepost.runs AS r WHERE r.run_id = $1 ORDER BY r.tenant_id LIMIT 3;

-- name: run
-- Run $1 of tenant $2 and its job as they stand.
SELECT r.run_id, r.tenant_id, r.workflow, r.workflow_version, r.topic, r.state, r.version, r.error_code, r.iteration, r.traceparent,
       r.root_run_id, r.replay_of, x.new_run_id AS replayed_as, r.created_at, r.started_at, r.cancel_requested_at, r.finished_at,
       octet_length(r.input) AS input_bytes, octet_length(r.output) AS output_bytes,
       j.state AS job_state, j.attempts, j.max_attempts, j.lease_generation, j.lease_owner, j.lease_expires_at, j.lease_renewed_at,
       j.attempt_deadline_at, j.deadline_at, j.available_at, j.dead_reason, j.last_error_code, j.cost_used, j.cost_limit,
       octet_length(j.checkpoint) AS checkpoint_bytes,
       (SELECT max(k.expires_at) FROM fencepost.idempotency_keys AS k WHERE k.run_id = r.run_id AND k.tenant_id = r.tenant_id)
           AS key_expires_at,
       clock_timestamp() AS now
FROM fencepost.runs AS r
JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
LEFT JOIN fencepost.job_replays AS x ON x.run_id = r.run_id AND x.tenant_id = r.tenant_id
WHERE r.run_id = $1 AND r.tenant_id = $2;

-- name: run_attempts
-- The newest $3 attempts of run $1 of tenant $2.
SELECT a.generation, a.number, a.worker, a.claimed_at, a.started_at, a.renewed_at, a.finished_at, a.outcome, a.error_class,
       a.error_code, a.decision, a.retry_delay, a.cost
FROM fencepost.job_attempts AS a WHERE a.run_id = $1 AND a.tenant_id = $2
ORDER BY a.generation DESC LIMIT $3;

-- name: run_events
-- The newest $3 events of run $1 of tenant $2, without what they say but who decided and why.
SELECT e.sequence, e.type, e.fencing_token, e.created_at, e.detail ->> 'decided_by' AS decided_by, e.detail ->> 'reason' AS reason,
       e.detail ->> 'error_code' AS error_code, e.detail ->> 'continued_as' AS continued_as
FROM fencepost.run_events AS e WHERE e.run_id = $1 AND e.tenant_id = $2
ORDER BY e.sequence DESC LIMIT $3;

-- name: run_audit
-- What operators did to run $1 of tenant $2 since it was accepted at $3.
SELECT a.created_at, a.actor, a.command, a.reason, a.detail ->> 'outcome' AS outcome, a.detail ->> 'new_run_id' AS new_run_id
FROM fencepost.audit AS a
WHERE a.detail ? 'run_id' AND a.detail ->> 'run_id' = $1::uuid::text AND a.detail ->> 'tenant_id' = $2 AND a.created_at >= $3
ORDER BY a.id DESC LIMIT 100;

-- name: cancel
-- Cancel run $2 of tenant $1 for actor $3 and reason $4, if its version is $5 (null: any).
SELECT c.outcome, c.run_state, c.run_version FROM fencepost.cancel_run($1, $2, $3, $4, $5) AS c;

-- name: replay
-- Run dead run $2 of tenant $1 anew as $3 for actor $4 and reason $5; at most $6 replays a lineage, ledger retention $7.
SELECT p.outcome, p.new_run_id, p.replays FROM fencepost.replay_run($1, $2, $3, $4, $5, $6, $7) AS p;

-- name: dead_reason
-- Why run $2 of tenant $1 died.
SELECT j.dead_reason FROM fencepost.jobs AS j WHERE j.run_id = $2 AND j.tenant_id = $1;

-- Effects -------------------------------------------------------------------------------------------------------------

-- name: open_effects
-- At most $2 effects of tenant $1 (null: any) whose answer is not known, the oldest call first: unknown, or sent and past its time.
SELECT e.run_key, e.tenant_id, e.iteration, e.step, e.occurrence, e.operation, e.state, e.generation, e.sends, e.sent_at,
       e.deadline_at, e.created_at, clock_timestamp() AS now
FROM fencepost.effects AS e
WHERE e.state IN ('sent', 'unknown') AND e.deadline_at <= (SELECT clock_timestamp()) AND ($1::text IS NULL OR e.tenant_id = $1)
ORDER BY e.deadline_at LIMIT $2;

-- name: list_effects
-- At most $3 effects of tenant $1 (null: any) in state $2, the newest first.
SELECT e.run_key, e.tenant_id, e.iteration, e.step, e.occurrence, e.operation, e.state, e.generation, e.sends, e.sent_at,
       e.deadline_at, e.created_at, clock_timestamp() AS now
FROM fencepost.effects AS e
WHERE e.state = $2 AND e.operation NOT IN ('fencepost.message', 'fencepost.step', 'fencepost.timer') AND ($1::text IS NULL OR e.tenant_id = $1)
ORDER BY e.created_at DESC LIMIT $3;

-- name: effects_of
-- At most $4 effects of tenant $1 under the run keys $2, and under the root of run $3 (or null), without their results.
SELECT e.run_key, e.tenant_id, e.iteration, e.step, e.occurrence, e.operation, e.state, e.generation, e.run_id, e.run_generation,
       e.holder, e.held_until, e.provider_key, e.provider_reference, octet_length(e.result) AS result_bytes, e.error_class,
       e.error_code, e.sends, e.created_at, e.first_sent_at, e.sent_at, e.deadline_at, e.finished_at, clock_timestamp() AS now
FROM fencepost.effects AS e
WHERE e.tenant_id = $1
  AND e.run_key = ANY ($2::text[] || (SELECT r.root_run_id::text FROM fencepost.runs AS r WHERE r.run_id = $3 AND r.tenant_id = $1))
ORDER BY e.created_at, e.run_key, e.iteration, e.step, e.occurrence, e.operation LIMIT $4;

-- name: run_effects
-- At most $4 effects of tenant $2 under run key $1 that run $3 took last.
SELECT e.operation, e.step, e.occurrence, e.state, e.generation, e.sends, e.created_at, e.sent_at, e.finished_at
FROM fencepost.effects AS e
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.run_id = $3 ORDER BY e.created_at DESC LIMIT $4;

-- name: resolve_effect
-- Close effect $1..$6 (tenant, run key, iteration, step, occurrence, operation) of generation $7 as $8, with result $9 and
-- reference $10, for actor $11 and reason $12.
SELECT x.outcome, x.effect_state, x.effect_generation
FROM fencepost.resolve_effect($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) AS x;

-- Duplicates ---------------------------------------------------------------------------------------------------------

-- name: twins
-- Runs of tenant $1 with ids from $2 to $3 whose workflow and input are those of a run of another lineage: at most $5 groups and
-- $6 runs, out of the newest $4 runs. $7: only the group of this run, or null. A replay has its original's input and is no twin.
WITH looked AS MATERIALIZED (
    SELECT r.run_id, r.root_run_id, r.workflow, sha256(r.input) AS digest FROM fencepost.runs AS r
    WHERE r.run_id BETWEEN $2 AND $3 AND r.tenant_id = $1 ORDER BY r.run_id DESC LIMIT $4
),
alike AS (
    SELECT l.workflow, l.digest, min(l.run_id::text)::uuid AS first_run FROM looked AS l
    GROUP BY l.workflow, l.digest
    HAVING count(DISTINCT l.root_run_id) > 1 AND ($7::uuid IS NULL OR bool_or(l.run_id = $7))
    ORDER BY first_run DESC LIMIT $5
)
SELECT substring(encode(a.digest, 'hex') FOR 8) AS input, r.workflow, r.run_id, r.root_run_id, r.replay_of, r.created_at,
       r.state, k.key_version, k.fingerprint_profile AS profile, k.schema_version, substring(encode(k.fingerprint, 'hex') FOR 8) AS fingerprint,
       k.expires_at AS key_expires_at
FROM alike AS a JOIN looked AS l ON l.workflow = a.workflow AND l.digest = a.digest
JOIN fencepost.runs AS r ON r.run_id = l.run_id AND r.tenant_id = $1
LEFT JOIN LATERAL (
    SELECT * FROM fencepost.idempotency_keys AS i
    WHERE i.run_id = r.run_id AND i.tenant_id = r.tenant_id ORDER BY i.key_version LIMIT 1
) AS k ON true
ORDER BY a.first_run DESC, r.run_id LIMIT $6;

-- name: acceptances
-- Runs of tenant $1 with ids from $2 to $3 whose facts were not written together, at most $4. Event 1 and the key are never
-- updated while the run lives, so their transaction ids compare for good; those of run and job until the first claim.
SELECT r.run_id, f.fault FROM fencepost.runs AS r
LEFT JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
LEFT JOIN fencepost.run_events AS e ON e.run_id = r.run_id AND e.tenant_id = r.tenant_id AND e.sequence = 1
LEFT JOIN LATERAL (
    SELECT count(*) AS keys, bool_or(k.xmin <> e.xmin) AS apart FROM fencepost.idempotency_keys AS k
    WHERE k.run_id = r.run_id AND k.tenant_id = r.tenant_id
) AS k ON true
CROSS JOIN LATERAL (SELECT CASE
    WHEN j.run_id IS NULL THEN 'no job'
    WHEN e.run_id IS NULL THEN 'no first event'
    WHEN e.type <> 'run_queued' THEN 'first event is not run_queued'
    WHEN e.created_at <> r.created_at THEN 'event written at another time than the run'
    WHEN k.apart THEN 'key written or changed by another transaction than the event'
    WHEN r.event_sequence = 1 AND r.version = 1 AND j.lease_generation = 0 AND r.xmin <> e.xmin
        THEN 'run written by another transaction than the event'
END AS fault) AS f
WHERE r.run_id BETWEEN $2 AND $3 AND r.tenant_id = $1 AND f.fault IS NOT NULL
ORDER BY r.run_id LIMIT $4;

-- name: key_policies
-- Under which versions tenant $1's runs with ids from $2 to $3 are keyed, and for how long.
SELECT k.key_version, k.fingerprint_profile AS profile, k.schema_version, count(*) AS keys,
       extract(epoch FROM min(k.expires_at - k.created_at))::float8 AS shortest_retention_seconds,
       extract(epoch FROM max(k.expires_at - k.created_at))::float8 AS longest_retention_seconds,
       count(*) FILTER (WHERE k.expires_at <= clock_timestamp()) AS expired
FROM fencepost.idempotency_keys AS k
WHERE k.run_id BETWEEN $2 AND $3 AND k.tenant_id = $1
GROUP BY k.key_version, k.fingerprint_profile, k.schema_version ORDER BY 1, 2, 3 LIMIT 50;

-- name: tombstones
-- Keys of tenant $1 made at $2 or later that let go of their runs; counted up to $3.
SELECT count(*) AS tombstones FROM (
    SELECT FROM fencepost.idempotency_keys AS k
    WHERE k.tenant_id = $1 AND k.run_id IS NULL AND k.created_at >= $2 LIMIT $3) AS t;

-- name: lineages
-- The runs of tenant $1 that are of one lineage with one of the runs $2: at most $3.
WITH roots AS MATERIALIZED (
    SELECT DISTINCT r.root_run_id FROM fencepost.runs AS r WHERE r.run_id = ANY ($2::uuid[]) AND r.tenant_id = $1
)
SELECT r.run_id, r.root_run_id FROM roots AS t JOIN fencepost.runs AS r ON r.run_id = t.root_run_id AND r.tenant_id = $1
UNION ALL
SELECT r.run_id, r.root_run_id
FROM roots AS t JOIN fencepost.runs AS r ON r.root_run_id = t.root_run_id AND r.tenant_id = $1 AND r.root_run_id <> r.run_id
LIMIT $3;

-- Both: of tenant $1's runs with ids from $2 to $3, the newest $5. $4: only these runs, or null.

-- name: executed_again
-- Those that more than one lease generation held.
SELECT r.run_id, r.root_run_id, j.attempts, j.lease_generation AS generations,
       (SELECT count(*) FROM fencepost.job_attempts AS t
        WHERE t.run_id = r.run_id AND t.tenant_id = r.tenant_id AND t.outcome = 'lost') AS lost
FROM fencepost.runs AS r JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
WHERE r.run_id BETWEEN $2 AND $3 AND r.tenant_id = $1 AND j.lease_generation > 1
  AND ($4::uuid[] IS NULL OR r.run_id = ANY ($4))
ORDER BY r.run_id DESC LIMIT $5;

-- name: replays
-- Those that run another one anew, by whom and why.
SELECT r.run_id, r.root_run_id, x.actor, x.reason, r.replay_of
FROM fencepost.runs AS r LEFT JOIN fencepost.job_replays AS x ON x.run_id = r.replay_of AND x.tenant_id = r.tenant_id
WHERE r.run_id BETWEEN $2 AND $3 AND r.tenant_id = $1 AND r.replay_of IS NOT NULL
  AND ($4::uuid[] IS NULL OR r.run_id = ANY ($4))
ORDER BY r.run_id DESC LIMIT $5;

-- Double completion ----------------------------------------------------------------------------------------------------
-- Each: runs with ids from $1 to $2 of tenant $3 (null: all) that break a rule, at most $4. None is what is promised.

-- name: terminal_events
SELECT r.run_id, r.tenant_id, r.state, count(e.type) AS terminal_events, string_agg(e.type, ', ' ORDER BY e.sequence) AS types
FROM fencepost.runs AS r
LEFT JOIN fencepost.run_events AS e ON e.run_id = r.run_id AND e.tenant_id = r.tenant_id
    AND e.type IN ('run_completed', 'run_failed', 'run_cancelled', 'run_continued')
WHERE r.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR r.tenant_id = $3)
GROUP BY r.run_id, r.tenant_id
HAVING count(e.type) <> (r.finished_at IS NOT NULL)::int OR bool_or(e.type <> 'run_' || r.state)
ORDER BY r.run_id LIMIT $4;

-- name: event_gaps
SELECT r.run_id, r.tenant_id, r.event_sequence AS last_drawn, count(e.sequence) AS events, max(e.sequence) AS highest
FROM fencepost.runs AS r LEFT JOIN fencepost.run_events AS e ON e.run_id = r.run_id AND e.tenant_id = r.tenant_id
WHERE r.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR r.tenant_id = $3)
GROUP BY r.run_id, r.tenant_id
HAVING count(e.sequence) <> r.event_sequence OR max(e.sequence) <> r.event_sequence
ORDER BY r.run_id LIMIT $4;

-- name: completions
SELECT j.run_id, j.tenant_id, j.state AS job, j.lease_generation AS generation, count(a.generation) AS completed_attempts,
       string_agg(a.generation || ' by ' || a.worker, ', ' ORDER BY a.generation) AS under
FROM fencepost.jobs AS j
LEFT JOIN fencepost.job_attempts AS a ON a.run_id = j.run_id AND a.tenant_id = j.tenant_id AND a.outcome = 'completed'
WHERE j.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR j.tenant_id = $3)
GROUP BY j.run_id, j.tenant_id
HAVING count(a.generation) <> (j.state = 'completed')::int OR bool_or(a.generation <> j.lease_generation)
ORDER BY j.run_id LIMIT $4;

-- name: fences
-- The event that ended a run carries the generation of the lease that it was written under: the job's last one.
SELECT e.run_id, e.tenant_id, e.type, e.fencing_token AS written_under, j.lease_generation AS generation
FROM fencepost.run_events AS e JOIN fencepost.jobs AS j ON j.run_id = e.run_id AND j.tenant_id = e.tenant_id
WHERE e.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR e.tenant_id = $3)
  AND e.type IN ('run_completed', 'run_failed', 'run_cancelled', 'run_continued')
  AND (e.fencing_token <> j.lease_generation OR (e.fencing_token IS NULL AND e.type IN ('run_completed', 'run_continued')))
ORDER BY e.run_id LIMIT $4;

-- name: alignment
SELECT r.run_id, r.tenant_id, r.state AS run, j.state AS job
FROM fencepost.runs AS r LEFT JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
WHERE r.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR r.tenant_id = $3)
  AND ((r.state, j.state) IN (('queued', 'queued'), ('running', 'queued'), ('running', 'leased'), ('completed', 'completed'),
                              ('failed', 'dead'), ('cancelled', 'cancelled'), ('continued', 'completed'))) IS NOT TRUE
ORDER BY r.run_id LIMIT $4;

-- name: late_writes
-- Attempts that wrote after the next generation was claimed, or that stand open although no lease is theirs. `lost` is what the
-- next claim itself writes.
SELECT a.run_id, a.tenant_id, a.generation, a.worker, coalesce(a.outcome, 'open') AS outcome, a.finished_at,
       next.claimed_at AS next_claimed_at
FROM fencepost.job_attempts AS a
JOIN fencepost.jobs AS j ON j.run_id = a.run_id AND j.tenant_id = a.tenant_id
LEFT JOIN fencepost.job_attempts AS next ON next.run_id = a.run_id AND next.tenant_id = a.tenant_id AND next.generation = a.generation + 1
WHERE a.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR a.tenant_id = $3)
  AND ((a.outcome <> 'lost' AND a.finished_at > next.claimed_at)
       OR (a.finished_at IS NULL AND (j.state <> 'leased' OR j.lease_generation <> a.generation OR j.lease_owner <> a.worker)))
ORDER BY a.run_id, a.generation LIMIT $4;

-- name: contested
-- Not a fault: the runs that more than one generation held, those with the most first.
SELECT j.run_id, j.tenant_id, j.lease_generation AS claims,
       count(a.generation) FILTER (WHERE a.outcome = 'lost') AS lost,
       string_agg(DISTINCT a.worker, ', ') FILTER (WHERE a.outcome = 'completed') AS completed_by
FROM fencepost.jobs AS j JOIN fencepost.job_attempts AS a ON a.run_id = j.run_id AND a.tenant_id = j.tenant_id
WHERE j.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR j.tenant_id = $3) AND j.lease_generation > 1
GROUP BY j.run_id, j.tenant_id ORDER BY lost DESC, claims DESC, j.run_id LIMIT $4;

-- name: losing_workers
-- Not a fault: whose leases ran out. renewed: how many of the lost attempts had renewed at least once.
SELECT a.worker, count(*) AS attempts, count(*) FILTER (WHERE a.outcome = 'lost') AS lost,
       count(*) FILTER (WHERE a.outcome = 'lost' AND a.renewed_at IS NOT NULL) AS lost_after_renewal
FROM fencepost.job_attempts AS a
WHERE a.run_id BETWEEN $1 AND $2 AND ($3::text IS NULL OR a.tenant_id = $3)
GROUP BY a.worker HAVING count(*) FILTER (WHERE a.outcome = 'lost') > 0 ORDER BY lost DESC, a.worker LIMIT $4;

-- name: missing_guards
-- Constraints and indexes that make a second ending impossible, where they are missing, invalid or switched off.
WITH wanted(kind, name) AS (
    VALUES ('index', 'run_events_terminal_key'), ('index', 'run_events_pkey'), ('index', 'job_attempts_pkey'), ('index', 'runs_pkey'),
           ('index', 'jobs_pkey'), ('constraint', 'runs_state_check'), ('constraint', 'jobs_state_check'),
           ('constraint', 'job_attempts_outcome_check'), ('constraint', 'run_events_type_check'), ('trigger', 'publish')
)
SELECT w.kind, w.name FROM wanted AS w
WHERE NOT CASE w.kind
    WHEN 'index' THEN EXISTS (
        SELECT FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
        WHERE c.relname = w.name AND c.relnamespace = 'fencepost'::regnamespace AND i.indisunique AND i.indisvalid AND i.indisready)
    WHEN 'constraint' THEN EXISTS (
        SELECT FROM pg_constraint AS c
        WHERE c.conname = w.name AND c.connamespace = 'fencepost'::regnamespace AND c.convalidated)
    ELSE EXISTS (
        SELECT FROM pg_trigger AS t
        WHERE t.tgname = w.name AND t.tgrelid = 'fencepost.run_events'::regclass AND t.tgenabled IN ('O', 'A'))
END
ORDER BY w.kind, w.name;

-- Stuck leases -----------------------------------------------------------------------------------------------------------

-- name: lease_expiry
-- How long ago the leases ran out, and how far ahead the furthest lies; counted up to $1.
SELECT count(*) AS leased,
       count(*) FILTER (WHERE l.left_seconds <= -60) AS expired_1_min,
       count(*) FILTER (WHERE l.left_seconds <= -600) AS expired_10_min,
       count(*) FILTER (WHERE l.left_seconds <= -3600) AS expired_1_h,
       min(l.left_seconds)::float8 AS soonest_seconds, max(l.left_seconds)::float8 AS furthest_seconds
FROM (
    SELECT extract(epoch FROM j.lease_expires_at - clock_timestamp()) AS left_seconds FROM fencepost.jobs AS j
    WHERE j.state = 'leased' ORDER BY j.lease_expires_at LIMIT $1
) AS l;

-- name: expired_leases
-- The $1 leases that ran out first, and what they wait for: any claim, or the reaper because of what.
SELECT j.run_id, j.tenant_id, j.workflow, j.lease_owner AS owner,
       extract(epoch FROM clock_timestamp() - j.lease_expires_at)::float8 AS ago_seconds,
       CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'reaper: cancelled'
            WHEN j.deadline_at <= clock_timestamp() THEN 'reaper: deadline'
            WHEN j.attempts >= j.max_attempts THEN 'reaper: attempts'
            ELSE 'claim' END AS left_to
FROM fencepost.jobs AS j
WHERE j.state = 'leased' AND j.lease_expires_at <= (SELECT clock_timestamp() - interval '1 minute')
ORDER BY j.lease_expires_at, j.run_id LIMIT $1;

-- name: far_leases
-- Leases that reach further ahead than anybody means: a wrong unit or time zone wrote them. At most $1.
SELECT j.run_id, j.tenant_id, j.workflow, j.lease_owner AS owner,
       extract(epoch FROM j.lease_expires_at - clock_timestamp())::float8 AS left_seconds
FROM fencepost.jobs AS j
WHERE j.state = 'leased' AND j.lease_expires_at > (SELECT clock_timestamp() + interval '1 day')
ORDER BY j.lease_expires_at DESC LIMIT $1;

-- name: reapable
-- What the reaper would take now, by what would become of it; counted up to $1 of each kind. $2: with leases that reach too far.
SELECT count(*) FILTER (WHERE f.fate = 'queued') AS queued, count(*) FILTER (WHERE f.fate = 'dead') AS dead,
       count(*) FILTER (WHERE f.fate = 'cancelled') AS cancelled
FROM (
    (SELECT CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                 WHEN j.deadline_at <= clock_timestamp() OR j.attempts >= j.max_attempts THEN 'dead' ELSE 'queued' END AS fate
     FROM fencepost.jobs AS j
     WHERE j.state = 'leased' AND (j.lease_expires_at <= (SELECT clock_timestamp())
                                   OR ($2 AND j.lease_expires_at > (SELECT clock_timestamp() + interval '1 day')))
     ORDER BY j.lease_expires_at LIMIT $1)
    UNION ALL
    (SELECT 'dead' FROM fencepost.jobs AS j
     WHERE j.state = 'queued' AND j.deadline_at <= (SELECT clock_timestamp()) ORDER BY j.deadline_at LIMIT $1)
) AS f;

-- name: backlog
-- For each of at most $1 workflows with queued jobs: how many are ready (counted up to $2), how long the oldest has waited, and
-- how many leases run. A loose index scan over the workflows.
WITH RECURSIVE waiting AS (
    (SELECT j.workflow FROM fencepost.jobs AS j WHERE j.state = 'queued' ORDER BY j.workflow LIMIT 1)
    UNION ALL
    SELECT (SELECT j.workflow FROM fencepost.jobs AS j WHERE j.state = 'queued' AND j.workflow > w.workflow ORDER BY j.workflow LIMIT 1)
    FROM waiting AS w WHERE w.workflow IS NOT NULL
),
leased AS MATERIALIZED (
    SELECT j.workflow, count(*) AS jobs FROM fencepost.jobs AS j
    WHERE j.state = 'leased' AND j.lease_expires_at > (SELECT clock_timestamp()) GROUP BY j.workflow
)
SELECT w.workflow, r.ready, r.oldest_seconds, coalesce(l.jobs, 0) AS leased
FROM (SELECT * FROM waiting WHERE workflow IS NOT NULL LIMIT $1) AS w
CROSS JOIN LATERAL (
    SELECT count(*) AS ready, extract(epoch FROM clock_timestamp() - min(n.available_at))::float8 AS oldest_seconds
    FROM (SELECT j.available_at FROM fencepost.jobs AS j
          WHERE j.state = 'queued' AND j.workflow = w.workflow AND j.available_at <= (SELECT clock_timestamp())
          ORDER BY j.available_at, j.run_id LIMIT $2) AS n
) AS r
LEFT JOIN leased AS l ON l.workflow = w.workflow
WHERE r.ready > 0 ORDER BY r.oldest_seconds DESC;

-- name: served
-- Which of the workflows $1 were claimed from in the last $2 seconds, a number for each. Reads the attempts once: for suspects only.
SELECT DISTINCT j.workflow FROM fencepost.job_attempts AS a
JOIN fencepost.jobs AS j ON j.run_id = a.run_id AND j.tenant_id = a.tenant_id
JOIN unnest($1::text[], $2::float8[]) AS s(workflow, seconds) ON s.workflow = j.workflow
WHERE a.claimed_at > clock_timestamp() - make_interval(secs => s.seconds);

-- name: overdue
-- Jobs past their deadline that have not ended, at most $1.
(SELECT j.run_id, j.tenant_id, j.workflow, j.state, extract(epoch FROM clock_timestamp() - j.deadline_at)::float8 AS overdue_seconds
 FROM fencepost.jobs AS j
 WHERE j.state = 'queued' AND j.deadline_at <= (SELECT clock_timestamp() - interval '1 minute') ORDER BY j.deadline_at LIMIT $1)
UNION ALL
(SELECT j.run_id, j.tenant_id, j.workflow, j.state, extract(epoch FROM clock_timestamp() - j.attempt_deadline_at)::float8
 FROM fencepost.jobs AS j
 WHERE j.state = 'leased' AND j.attempt_deadline_at <= (SELECT clock_timestamp() - interval '1 minute')
 ORDER BY j.attempt_deadline_at LIMIT $1);

-- name: long_transactions
-- Transactions of this database that are older than a minute, at most $1. Their SQL is theirs and not shown.
SELECT a.pid, a.usename AS "user", a.application_name AS application, a.state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS open_seconds,
       EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.relation = 'fencepost.jobs'::regclass) AS touches_jobs
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.xact_start < clock_timestamp() - interval '1 minute' AND a.pid <> pg_backend_pid()
ORDER BY a.xact_start LIMIT $1;

-- name: lock_waiters
-- Who waits for a lock while at the jobs table, and for whom; at most $1.
SELECT a.pid, a.application_name AS application, extract(epoch FROM clock_timestamp() - a.query_start)::float8 AS waits_seconds,
       array_to_string(pg_blocking_pids(a.pid), ', ') AS blocked_by
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'
  AND EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.relation = 'fencepost.jobs'::regclass)
ORDER BY a.query_start LIMIT $1;

-- name: broken_indexes
-- The claim's and the reaper's indexes that are missing or invalid.
SELECT w.name FROM unnest(ARRAY['jobs_queued_idx', 'jobs_tenant_idx', 'jobs_leased_idx', 'jobs_deadline_idx', 'jobs_pkey']) AS w(name)
WHERE NOT EXISTS (
    SELECT FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    WHERE c.relname = w.name AND c.relnamespace = 'fencepost'::regnamespace AND i.indisvalid AND i.indisready)
ORDER BY w.name;

-- name: claim_plan
-- The part of the claim that finds expired leases, as the planner would run it.
EXPLAIN (FORMAT JSON)
SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
WHERE j.state = 'leased' AND j.lease_expires_at <= (SELECT clock_timestamp())
ORDER BY j.lease_expires_at, j.run_id LIMIT 100;

-- name: vacuum
SELECT s.n_live_tup AS live_rows, s.n_dead_tup AS dead_rows,
       extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum))::float8 AS vacuumed_ago_seconds,
       extract(epoch FROM clock_timestamp() - greatest(s.last_autoanalyze, s.last_analyze))::float8 AS analyzed_ago_seconds,
       current_setting('autovacuum')::boolean AND coalesce(
           (SELECT option_value::boolean FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_enabled'), true) AS enabled
FROM pg_stat_user_tables AS s JOIN pg_class AS c ON c.oid = s.relid
WHERE s.relid = 'fencepost.jobs'::regclass;

-- name: end_far_leases
-- End now at most $1 leases that reach more than a day ahead: no worker's setting allows that. The reaper takes them, and a
-- holder that still lives loses its next write, as with any lease that ran out.
WITH far AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
    WHERE j.state = 'leased' AND j.lease_expires_at > (SELECT clock_timestamp() + interval '1 day')
    ORDER BY j.lease_expires_at DESC LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE fencepost.jobs AS j SET lease_expires_at = clock_timestamp() FROM far AS f
WHERE j.run_id = f.run_id AND j.tenant_id = f.tenant_id
RETURNING j.run_id;

-- name: audit_repair
-- What a batch of repair did: actor $1, reason $2, detail $3.
INSERT INTO fencepost.audit (actor, command, reason, detail) VALUES ($1, 'diagnose stuck-leases --repair', $2, $3::jsonb);

-- Dead letters --------------------------------------------------------------------------------------------------------
--
-- $1..$10 say which, null: any. $1 consumer, $2 tenant, $3 topic, $4 event type, $5 reason, $6 error class, $7 error code, $8 states,
-- and ids between $9 and $10, themselves not among them: ids are UUIDv7, so that is a range of time as well.

-- name: list_dead_letters
-- The oldest $11 of them.
SELECT d.dead_letter_id, d.consumer, d.step, d.run_key, d.tenant_id, d.topic, d."partition", d."offset", d.event_type, d.reason,
       d.error_class, d.error_code, d.attempts, d.state, d.redrives, d.created_at, d.changed_at, octet_length(d.payload) AS payload_bytes,
       clock_timestamp() AS now
FROM fencepost.dead_letters AS d
WHERE ($1::text IS NULL OR d.consumer = $1) AND ($2::text IS NULL OR d.tenant_id = $2) AND ($3::text IS NULL OR d.topic = $3)
  AND ($4::text IS NULL OR d.event_type = $4) AND ($5::text IS NULL OR d.reason = $5)
  AND ($6::text IS NULL OR d.error_class = $6) AND ($7::text IS NULL OR d.error_code = $7)
  AND ($8::text[] IS NULL OR d.state = ANY ($8)) AND d.dead_letter_id > $9 AND d.dead_letter_id < $10
ORDER BY d.dead_letter_id LIMIT $11;

-- name: list_newest_dead_letters
-- The newest $11 of them.
SELECT d.dead_letter_id, d.consumer, d.step, d.run_key, d.tenant_id, d.topic, d."partition", d."offset", d.event_type, d.reason,
       d.error_class, d.error_code, d.attempts, d.state, d.redrives, d.created_at, d.changed_at, octet_length(d.payload) AS payload_bytes,
       clock_timestamp() AS now
FROM fencepost.dead_letters AS d
WHERE ($1::text IS NULL OR d.consumer = $1) AND ($2::text IS NULL OR d.tenant_id = $2) AND ($3::text IS NULL OR d.topic = $3)
  AND ($4::text IS NULL OR d.event_type = $4) AND ($5::text IS NULL OR d.reason = $5)
  AND ($6::text IS NULL OR d.error_class = $6) AND ($7::text IS NULL OR d.error_code = $7)
  AND ($8::text[] IS NULL OR d.state = ANY ($8)) AND d.dead_letter_id > $9 AND d.dead_letter_id < $10
ORDER BY d.dead_letter_id DESC LIMIT $11;

-- name: summarise_dead_letters
-- How many they are by consumer, type and cause, the $12 largest groups first; counted up to $11. `all_letters` and `all_groups` count
-- beyond $12.
SELECT s.consumer, s.event_type, s.reason, s.error_class, s.error_code, count(*) AS letters,
       count(*) FILTER (WHERE s.state = 'redriving') AS redriving, min(s.created_at) AS oldest_at, max(s.created_at) AS newest_at,
       sum(count(*)) OVER ()::bigint AS all_letters, count(*) OVER () AS all_groups, clock_timestamp() AS now
FROM (
    SELECT d.consumer, d.event_type, d.reason, d.error_class, d.error_code, d.state, d.created_at FROM fencepost.dead_letters AS d
    WHERE ($1::text IS NULL OR d.consumer = $1) AND ($2::text IS NULL OR d.tenant_id = $2) AND ($3::text IS NULL OR d.topic = $3)
      AND ($4::text IS NULL OR d.event_type = $4) AND ($5::text IS NULL OR d.reason = $5)
      AND ($6::text IS NULL OR d.error_class = $6) AND ($7::text IS NULL OR d.error_code = $7)
      AND ($8::text[] IS NULL OR d.state = ANY ($8)) AND d.dead_letter_id > $9 AND d.dead_letter_id < $10
    LIMIT $11
) AS s
GROUP BY s.consumer, s.event_type, s.reason, s.error_class, s.error_code
ORDER BY letters DESC, s.consumer, s.event_type, s.reason, s.error_class, s.error_code LIMIT $12;

-- name: match_dead_letters
-- The oldest $11 of them, and what decides whether they may be changed.
SELECT d.dead_letter_id, d.state, d.reason, d.changed_at FROM fencepost.dead_letters AS d
WHERE ($1::text IS NULL OR d.consumer = $1) AND ($2::text IS NULL OR d.tenant_id = $2) AND ($3::text IS NULL OR d.topic = $3)
  AND ($4::text IS NULL OR d.event_type = $4) AND ($5::text IS NULL OR d.reason = $5)
  AND ($6::text IS NULL OR d.error_class = $6) AND ($7::text IS NULL OR d.error_code = $7)
  AND ($8::text[] IS NULL OR d.state = ANY ($8)) AND d.dead_letter_id > $9 AND d.dead_letter_id < $10
ORDER BY d.dead_letter_id LIMIT $11;

-- name: find_dead_letters
-- The same of dead letters $1; null where there is no such one.
SELECT i.dead_letter_id, d.state, d.reason, d.changed_at
FROM unnest($1::uuid[]) AS i(dead_letter_id) LEFT JOIN fencepost.dead_letters AS d ON d.dead_letter_id = i.dead_letter_id
ORDER BY i.dead_letter_id;

-- name: dead_letter
-- Dead letter $1: at most $2 of its headers, and of its key, their names and their values the first $3 bytes. `recorded`: the state of
-- the message's own row in the ledger.
SELECT d.dead_letter_id, d.consumer, d.step, d.run_key, d.tenant_id, d.topic, d."partition", d."offset", d.recorded_at, d.event_type,
       d.reason, d.error_class, d.error_code, d.attempts, d.state, d.redrives, d.holder, d.held_until, d.created_at, d.changed_at,
       octet_length(d.key) AS key_bytes, substring(d.key FROM 1 FOR $3) AS key, octet_length(d.payload) AS payload_bytes,
       cardinality(d.header_names) AS header_count, h.names AS header_names, h.sizes AS header_sizes, h.heads AS header_values,
       (SELECT e.state FROM fencepost.effects AS e
        WHERE e.run_key = d.run_key AND e.tenant_id = d.tenant_id AND e.iteration = 0 AND e.step = d.step AND e.occurrence = 0
          AND e.operation = 'fencepost.message') AS recorded,
       clock_timestamp() AS now
FROM fencepost.dead_letters AS d
CROSS JOIN LATERAL (
    SELECT array_agg(substring(g.name FROM 1 FOR $3) ORDER BY g.n) AS names, array_agg(octet_length(g.value) ORDER BY g.n) AS sizes,
           array_agg(substring(g.value FROM 1 FOR $3) ORDER BY g.n) AS heads
    FROM unnest(d.header_names, d.header_values) WITH ORDINALITY AS g(name, value, n) WHERE g.n <= $2
) AS h
WHERE d.dead_letter_id = $1;

-- name: dead_letter_payload
-- The payload of dead letter $1: its first $2 bytes, null: all.
SELECT CASE WHEN $2::integer IS NULL THEN d.payload ELSE substring(d.payload FROM 1 FOR $2) END AS payload
FROM fencepost.dead_letters AS d WHERE d.dead_letter_id = $1;

-- name: dead_letter_audit
-- The newest $2 things that operators did to dead letter $1.
SELECT a.created_at, a.actor, a.command, a.reason, (a.detail ->> 'effects_checked')::boolean AS effects_checked
FROM fencepost.audit AS a WHERE a.detail ? 'dead_letter_id' AND a.detail ->> 'dead_letter_id' = $1::uuid::text ORDER BY a.id DESC LIMIT $2;

-- name: redrive_dead_letters
-- Redrive dead letters $1 as they stood at $2, when each was last changed; $3 effects checked, $4 actor, $5 reason. One that is not
-- dead is not locked: a handler may hold it. In the order of the ids, so that two operators do not wait for one another crosswise.
WITH listed AS MATERIALIZED (
    SELECT i.dead_letter_id, d.state, coalesce(d.state = 'dead' AND d.changed_at = i.changed_at, false) AS unchanged
    FROM unnest($1::uuid[], $2::timestamptz[]) AS i(dead_letter_id, changed_at)
    LEFT JOIN fencepost.dead_letters AS d ON d.dead_letter_id = i.dead_letter_id
    ORDER BY i.dead_letter_id
)
SELECT l.dead_letter_id, r.outcome, r.letter_state
FROM listed AS l CROSS JOIN LATERAL fencepost.redrive_dead_letter(l.dead_letter_id, $3, $4, $5) AS r WHERE l.unchanged
UNION ALL
SELECT l.dead_letter_id, CASE WHEN l.state IS NULL THEN 'not_found' WHEN l.state = 'dead' THEN 'changed' ELSE 'not_dead' END, l.state
FROM listed AS l WHERE NOT l.unchanged;

-- name: discard_dead_letters
-- Discard dead letters $1, as above; $3 actor, $4 reason.
WITH listed AS MATERIALIZED (
    SELECT i.dead_letter_id, d.state, coalesce(d.state = 'dead' AND d.changed_at = i.changed_at, false) AS unchanged
    FROM unnest($1::uuid[], $2::timestamptz[]) AS i(dead_letter_id, changed_at)
    LEFT JOIN fencepost.dead_letters AS d ON d.dead_letter_id = i.dead_letter_id
    ORDER BY i.dead_letter_id
)
SELECT l.dead_letter_id, r.outcome, r.letter_state
FROM listed AS l CROSS JOIN LATERAL fencepost.discard_dead_letter(l.dead_letter_id, $3, $4) AS r WHERE l.unchanged
UNION ALL
SELECT l.dead_letter_id, CASE WHEN l.state IS NULL THEN 'not_found' WHEN l.state = 'dead' THEN 'changed' ELSE 'not_dead' END, l.state
FROM listed AS l WHERE NOT l.unchanged;
