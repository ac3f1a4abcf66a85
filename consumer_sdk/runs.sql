-- What a worker does to jobs. One transition, one statement, on arrays: a batch costs one round trip and one commit.
--
-- Every write under a lease names run, tenant, owner and generation and asks for a lease that has not run out. That the job is
-- leased is what having an owner means (0007's CHECK says so); asked for by `state` as well, the planner would read the index of all
-- leased jobs instead of the key. What comes
-- back is what was changed. Of a job that does not come back nothing was changed: it was lost, or somebody else holds its row
-- for the moment; `why_lost` tells them apart.
--
-- clock_timestamp(), not now(): now() stands still in a transaction and would accept an expired lease. The rows are locked
-- first (`held`) and the lease is judged after that. No batch waits for a row: whoever holds one (a cancellation in a
-- transaction that stays open, say) would hold up all the others' leases and completions.

-- name: claim
-- Lease up to $2 ready jobs of the workflows $4 to owner $1 for $3. $5: for each workflow the longest that an attempt may
-- take, or null. $6: for each workflow the tenant at which the last round ended.
-- Expired leases first. Then, where more jobs are ready than can be taken, round robin over their tenants, so that a flood of
-- one does not hold up the others; and whatever room is left goes to the oldest. Within a tenant oldest first.
-- The time is read once, as a parameter of the plan: a volatile function in the conditions would keep the indexes from using it.
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS at),
served AS MATERIALIZED (
    SELECT w.workflow, w.attempt_limit, w.last_tenant
    FROM unnest($4::text[], $5::interval[], $6::text[]) AS w(workflow, attempt_limit, last_tenant)
),
expired AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
    WHERE j.state = 'leased' AND j.lease_expires_at <= (SELECT at FROM clock) AND j.workflow = ANY ($4)
      AND j.attempts < j.max_attempts AND j.cancel_requested_at IS NULL AND (j.deadline_at > (SELECT at FROM clock)) IS NOT FALSE
    ORDER BY j.lease_expires_at, j.run_id LIMIT $2 FOR UPDATE SKIP LOCKED
),
wanted AS MATERIALIZED (SELECT $2 - count(*) AS jobs FROM expired),
crowd AS MATERIALIZED (
    SELECT count(*) > (SELECT jobs FROM wanted) AS crowded
    FROM (
        SELECT FROM served AS w CROSS JOIN LATERAL (
            SELECT FROM fencepost.jobs AS j
            WHERE j.state = 'queued' AND j.workflow = w.workflow AND j.available_at <= (SELECT at FROM clock)
              AND (j.deadline_at > (SELECT at FROM clock)) IS NOT FALSE AND j.attempts < j.max_attempts
            ORDER BY j.available_at, j.run_id LIMIT $2 + 1
        ) AS ready LIMIT $2 + 1
    ) AS ready
),
walk AS MATERIALIZED (
    SELECT w.workflow, r.tenant_id, r.ready, r.turn
    FROM served AS w CROSS JOIN LATERAL fencepost.ready_tenants(
        w.workflow, w.last_tenant, (SELECT at FROM clock), (SELECT jobs FROM wanted)::integer) WITH ORDINALITY AS r(tenant_id, ready, turn)
    WHERE (SELECT crowded FROM crowd)
),
tenants AS MATERIALIZED (
    SELECT t.workflow, t.tenant_id, t.turn, (SELECT jobs FROM wanted) / count(*) OVER () AS share
    FROM (SELECT * FROM walk WHERE ready ORDER BY turn, workflow LIMIT (SELECT jobs FROM wanted)) AS t
),
fair AS MATERIALIZED (
    SELECT ready.run_id, ready.tenant_id FROM tenants AS t CROSS JOIN LATERAL (
        SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
        WHERE j.state = 'queued' AND j.workflow = t.workflow AND j.tenant_id = t.tenant_id AND j.available_at <= (SELECT at FROM clock)
          AND (j.deadline_at > (SELECT at FROM clock)) IS NOT FALSE AND j.attempts < j.max_attempts
        ORDER BY j.available_at, j.run_id LIMIT t.share FOR UPDATE SKIP LOCKED
    ) AS ready
    LIMIT (SELECT jobs FROM wanted)
),
room AS MATERIALIZED (SELECT (SELECT jobs FROM wanted) - count(*) AS jobs, array_agg(run_id) AS taken FROM fair),
oldest AS MATERIALIZED (
    SELECT ready.run_id, ready.tenant_id FROM served AS w CROSS JOIN LATERAL (
        SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
        WHERE j.state = 'queued' AND j.workflow = w.workflow AND j.available_at <= (SELECT at FROM clock)
          AND (j.deadline_at > (SELECT at FROM clock)) IS NOT FALSE AND j.attempts < j.max_attempts
          AND (j.run_id = ANY ((SELECT taken FROM room)::uuid[])) IS NOT TRUE
        ORDER BY j.available_at, j.run_id LIMIT (SELECT jobs FROM room) FOR UPDATE SKIP LOCKED
    ) AS ready
    LIMIT (SELECT jobs FROM room)
),
-- Where each workflow's round ended: at the last tenant looked at, or, if not all that were ready got a share, at the last that did.
places AS MATERIALIZED (
    SELECT w.workflow,
           CASE WHEN count(t.turn) = count(*) FILTER (WHERE w.ready) THEN (array_agg(w.tenant_id ORDER BY w.turn DESC))[1]
                ELSE (array_agg(t.tenant_id ORDER BY t.turn DESC NULLS LAST))[1] END AS tenant_id
    FROM walk AS w LEFT JOIN tenants AS t ON t.workflow = w.workflow AND t.turn = w.turn
    GROUP BY w.workflow
),
chosen AS (SELECT * FROM expired UNION ALL SELECT * FROM fair UNION ALL SELECT * FROM oldest),
lost AS (
    UPDATE fencepost.job_attempts AS a
    SET finished_at = (SELECT at FROM clock), renewed_at = j.lease_renewed_at, outcome = 'lost', error_code = 'lease_expired', decision = 'retry'
    FROM expired AS e JOIN fencepost.jobs AS j ON j.run_id = e.run_id AND j.tenant_id = e.tenant_id
    WHERE a.run_id = e.run_id AND a.tenant_id = e.tenant_id AND a.finished_at IS NULL
),
leased AS (
    UPDATE fencepost.jobs AS j
    SET state = 'leased', lease_owner = $1, lease_expires_at = clock_timestamp() + $3, lease_renewed_at = NULL,
        lease_generation = j.lease_generation + 1, attempts = j.attempts + 1,
        attempt_deadline_at = least(j.deadline_at, clock_timestamp() + w.attempt_limit)
    FROM chosen AS c, served AS w
    WHERE j.run_id = c.run_id AND j.tenant_id = c.tenant_id AND w.workflow = j.workflow
    RETURNING j.run_id, j.tenant_id, j.lease_generation, j.attempts, j.max_attempts, j.available_at, j.retry_delay, j.checkpoint,
              j.attempt_deadline_at - clock_timestamp() AS attempt_remaining
),
told AS MATERIALIZED (
    SELECT l.*, r.workflow, r.workflow_version, r.input, r.root_run_id, r.iteration, r.replay_of IS NOT NULL AS is_replay,
           r.traceparent, r.created_at, (
               SELECT k.wrapped FROM fencepost.data_keys AS k
               WHERE k.root_run_id = r.root_run_id AND k.tenant_id = r.tenant_id) AS data_key
    FROM leased AS l JOIN fencepost.runs AS r ON r.run_id = l.run_id AND r.tenant_id = l.tenant_id
),
attempt AS (
    INSERT INTO fencepost.job_attempts (run_id, tenant_id, generation, number, worker, claimed_at, traceparent)
    SELECT t.run_id, t.tenant_id, t.lease_generation, t.attempts, $1, clock_timestamp(), t.traceparent FROM told AS t
),
running AS (
    UPDATE fencepost.runs AS r SET state = 'running', version = r.version + 1, started_at = clock_timestamp()
    FROM leased AS l WHERE r.run_id = l.run_id AND r.tenant_id = l.tenant_id AND r.state = 'queued'
)
SELECT t.run_id, t.tenant_id, t.lease_generation, t.attempts, t.max_attempts, t.retry_delay, t.checkpoint, t.attempt_remaining,
       t.workflow, t.workflow_version, t.input, t.root_run_id, t.iteration, t.is_replay, t.traceparent, t.created_at,
       t.data_key, p.tenant_id AS round_ended_at
FROM told AS t LEFT JOIN places AS p ON p.workflow = t.workflow
ORDER BY t.available_at, t.run_id;

-- name: claim_run
-- Lease one job to owner $1 for $2, because a message says that its run is to go on: workflow $3, run $4, tenant $5; $6: the longest
-- that the attempt may take, or null. Where the run failed and was replayed, the replay is what the message now belongs to.
-- No row: `read_claimable` says why.
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS at),
meant AS MATERIALIZED (
    SELECT coalesce((
        SELECT n.run_id FROM fencepost.runs AS r JOIN fencepost.runs AS n
            ON n.root_run_id = r.root_run_id AND n.root_run_id <> n.run_id AND n.tenant_id = r.tenant_id
        WHERE r.run_id = $4 AND r.tenant_id = $5 AND r.state = 'failed' AND n.iteration = r.iteration AND n.finished_at IS NULL
        ORDER BY n.run_id DESC LIMIT 1), $4::uuid) AS run_id
),
chosen AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
    WHERE j.run_id = (SELECT run_id FROM meant) AND j.tenant_id = $5 AND j.workflow = $3
      AND (j.state = 'queued' AND j.available_at <= (SELECT at FROM clock)
           OR j.state = 'leased' AND j.lease_expires_at <= (SELECT at FROM clock))
      AND j.attempts < j.max_attempts AND j.cancel_requested_at IS NULL AND (j.deadline_at > (SELECT at FROM clock)) IS NOT FALSE
    FOR UPDATE SKIP LOCKED
),
lost AS (
    UPDATE fencepost.job_attempts AS a
    SET finished_at = (SELECT at FROM clock), renewed_at = j.lease_renewed_at, outcome = 'lost', error_code = 'lease_expired', decision = 'retry'
    FROM chosen AS c JOIN fencepost.jobs AS j ON j.run_id = c.run_id AND j.tenant_id = c.tenant_id
    WHERE a.run_id = c.run_id AND a.tenant_id = c.tenant_id AND a.finished_at IS NULL
),
leased AS (
    UPDATE fencepost.jobs AS j
    SET state = 'leased', lease_owner = $1, lease_expires_at = clock_timestamp() + $2, lease_renewed_at = NULL,
        lease_generation = j.lease_generation + 1, attempts = j.attempts + 1,
        attempt_deadline_at = least(j.deadline_at, clock_timestamp() + $6::interval)
    FROM chosen AS c
    WHERE j.run_id = c.run_id AND j.tenant_id = c.tenant_id
    RETURNING j.run_id, j.tenant_id, j.lease_generation, j.attempts, j.max_attempts, j.retry_delay, j.checkpoint,
              j.attempt_deadline_at - clock_timestamp() AS attempt_remaining
),
told AS MATERIALIZED (
    SELECT l.*, r.workflow, r.workflow_version, r.input, r.root_run_id, r.iteration, r.replay_of IS NOT NULL AS is_replay,
           r.traceparent, r.created_at, (
               SELECT k.wrapped FROM fencepost.data_keys AS k
               WHERE k.root_run_id = r.root_run_id AND k.tenant_id = r.tenant_id) AS data_key
    FROM leased AS l JOIN fencepost.runs AS r ON r.run_id = l.run_id AND r.tenant_id = l.tenant_id
),
attempt AS (
    INSERT INTO fencepost.job_attempts (run_id, tenant_id, generation, number, worker, claimed_at, traceparent)
    SELECT t.run_id, t.tenant_id, t.lease_generation, t.attempts, $1, clock_timestamp(), t.traceparent FROM told AS t
),
running AS (
    UPDATE fencepost.runs AS r SET state = 'running', version = r.version + 1, started_at = clock_timestamp()
    FROM leased AS l WHERE r.run_id = l.run_id AND r.tenant_id = l.tenant_id AND r.state = 'queued'
)
SELECT t.*, NULL::text AS round_ended_at FROM told AS t;

-- name: read_claimable
-- Why `claim_run` leased nothing for run $1 of tenant $2: the newest live run of its lineage, or itself.
SELECT j.state, j.workflow, j.cancel_requested_at IS NOT NULL AS cancel_requested,
       greatest(extract(epoch FROM coalesce(j.lease_expires_at, j.available_at) - clock_timestamp()), 0)::float8 AS wait_seconds
FROM fencepost.runs AS r JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
WHERE r.run_id = $1 AND r.tenant_id = $2
   OR r.tenant_id = $2 AND r.root_run_id <> r.run_id AND r.finished_at IS NULL AND (r.root_run_id, r.iteration) = (
       SELECT m.root_run_id, m.iteration FROM fencepost.runs AS m WHERE m.run_id = $1 AND m.tenant_id = $2)
ORDER BY r.finished_at IS NOT NULL, r.run_id DESC LIMIT 1;

-- name: renew
-- Renew for $5 the leases of owner $1 on runs $2 of tenants $3 under generations $4, with checkpoints $6 (null: none new).
-- Not past the attempt's own deadline: a hang must not renew for ever.
WITH held AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id, h.generation, h.checkpoint
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $6::bytea[]) AS h(run_id, tenant_id, generation, checkpoint)
    JOIN fencepost.jobs AS j ON j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
    WHERE j.lease_owner = $1
    ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j SKIP LOCKED
)
UPDATE fencepost.jobs AS j
SET lease_expires_at = clock_timestamp() + $5, lease_renewed_at = clock_timestamp(), checkpoint = coalesce(h.checkpoint, j.checkpoint)
FROM held AS h
WHERE j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
  AND j.lease_owner = $1 AND j.lease_expires_at > clock_timestamp()
  AND (j.attempt_deadline_at > clock_timestamp()) IS NOT FALSE
RETURNING j.run_id, j.tenant_id, j.lease_generation, j.cancel_requested_at IS NOT NULL AS cancel_requested;

-- name: complete
-- Complete runs $2 of tenants $3 under generations $4 with outputs $5: job, run, terminal event (and so the outbox row) and
-- attempt together. $6: how long after its claim each attempt started; $7, $8: its cost and usage.
-- A run whose cancellation was requested is not completed. In a transaction of the caller's, `guard` comes first and waits for
-- the row.
WITH held AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id, h.generation, h.output, h.started_after, h.cost, h.usage
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $5::bytea[], $6::interval[], $7::numeric[], $8::text[])
        AS h(run_id, tenant_id, generation, output, started_after, cost, usage)
    JOIN fencepost.jobs AS j ON j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
    WHERE j.lease_owner = $1
    ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j SKIP LOCKED
),
finished AS (
    UPDATE fencepost.jobs AS j
    SET state = 'completed', finished_at = clock_timestamp(), lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL,
        cost_used = j.cost_used + coalesce(h.cost, 0)
    FROM held AS h
    WHERE j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
      AND j.lease_owner = $1 AND j.lease_expires_at > clock_timestamp() AND j.cancel_requested_at IS NULL
    RETURNING j.run_id, j.tenant_id, j.lease_generation, j.attempts, j.finished_at, j.lease_renewed_at, h.output, h.started_after, h.cost, h.usage
),
ended AS (
    UPDATE fencepost.runs AS r
    SET state = 'completed', version = r.version + 1, event_sequence = r.event_sequence + 1, output = f.output, finished_at = f.finished_at
    FROM finished AS f WHERE r.run_id = f.run_id AND r.tenant_id = f.tenant_id
    RETURNING r.run_id, r.tenant_id, r.event_sequence, f.lease_generation, f.attempts
),
event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, fencing_token)
    SELECT e.run_id, e.tenant_id, e.event_sequence, 'run_completed',
           jsonb_build_object('decided_by', 'completion', 'attempts', e.attempts), e.lease_generation
    FROM ended AS e
),
attempt AS (
    UPDATE fencepost.job_attempts AS a
    SET started_at = least(a.claimed_at + f.started_after, f.finished_at), renewed_at = f.lease_renewed_at, finished_at = f.finished_at,
        outcome = 'completed', cost = f.cost, usage = f.usage::jsonb
    FROM finished AS f WHERE a.run_id = f.run_id AND a.tenant_id = f.tenant_id AND a.generation = f.lease_generation
)
SELECT f.run_id, f.tenant_id, f.lease_generation FROM finished AS f;

-- name: fail
-- End attempts in failure: runs $2 of tenants $3 under generations $4. $5: after which delay to try again, or null where trying
-- again cannot help; $6: the reason in that case. $7, $8: error class and code; $9: the newest checkpoint or null;
-- $10: how long after its claim the attempt started; $11, $12: its cost and usage; $13: what a client may know of it, or null.
-- What ends the job is decided here, on the row: cancellation asked for, no retry wanted, attempts, deadline, cost. A dead job
-- fails its run in the same statement. Returned: the job's new state and why it is dead.
WITH held AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id, h.*,
           CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE
               CASE WHEN h.delay IS NULL THEN coalesce(h.reason, 'not_retryable')
                    WHEN j.attempts >= j.max_attempts THEN 'attempts_exhausted'
                    WHEN j.deadline_at <= clock_timestamp() + h.delay THEN 'deadline_exceeded'
                    WHEN j.cost_limit <= j.cost_used + coalesce(h.cost, 0) THEN 'cost_exhausted' END
           END AS ending
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $5::interval[], $6::text[], $7::text[], $8::text[], $9::bytea[],
                $10::interval[], $11::numeric[], $12::text[], $13::bytea[])
        AS h(held_run, held_tenant, generation, delay, reason, error_class, error_code, checkpoint, started_after, cost, usage,
             failure)
    JOIN fencepost.jobs AS j ON j.run_id = h.held_run AND j.tenant_id = h.held_tenant AND j.lease_generation = h.generation
    WHERE j.lease_owner = $1
    ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j SKIP LOCKED
),
finished AS (
    UPDATE fencepost.jobs AS j
    SET state = CASE WHEN h.ending IS NULL THEN 'queued' WHEN h.ending = 'cancelled' THEN 'cancelled' ELSE 'dead' END,
        available_at = CASE WHEN h.ending IS NULL THEN clock_timestamp() + h.delay ELSE j.available_at END,
        finished_at = CASE WHEN h.ending IS NOT NULL THEN clock_timestamp() END,
        dead_reason = CASE WHEN h.ending <> 'cancelled' THEN h.ending END,
        lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL, retry_delay = h.delay,
        last_error_code = h.error_code, cost_used = j.cost_used + coalesce(h.cost, 0), checkpoint = coalesce(h.checkpoint, j.checkpoint)
    FROM held AS h
    WHERE j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
      AND j.lease_owner = $1 AND j.lease_expires_at > clock_timestamp()
    RETURNING j.run_id, j.tenant_id, j.lease_generation, j.state, j.attempts, j.lease_renewed_at, h.ending, h.delay, h.error_class,
              h.error_code, h.started_after, h.cost, h.usage, h.failure
),
ended AS (
    UPDATE fencepost.runs AS r
    SET state = CASE f.state WHEN 'dead' THEN 'failed' ELSE 'cancelled' END, version = r.version + 1,
        event_sequence = r.event_sequence + 1, finished_at = clock_timestamp(),
        error_code = CASE WHEN f.state = 'dead' THEN
            CASE WHEN f.ending IN ('deadline_exceeded', 'cost_exhausted') THEN f.ending ELSE f.error_code END END,
        failure = CASE WHEN f.state = 'dead' AND f.delay IS NULL THEN f.failure END
    FROM finished AS f WHERE r.run_id = f.run_id AND r.tenant_id = f.tenant_id AND f.ending IS NOT NULL
    RETURNING r.run_id, r.tenant_id, r.event_sequence, r.state, r.error_code, f.lease_generation, f.attempts, f.ending
),
event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, fencing_token)
    SELECT e.run_id, e.tenant_id, e.event_sequence, 'run_' || e.state,
           CASE e.state WHEN 'failed' THEN jsonb_build_object('error_code', e.error_code, 'reason', e.ending, 'attempts', e.attempts)
                        ELSE jsonb_build_object('decided_by', 'cancellation', 'attempts', e.attempts) END, e.lease_generation
    FROM ended AS e
),
attempt AS (
    UPDATE fencepost.job_attempts AS a
    SET started_at = least(a.claimed_at + f.started_after, clock_timestamp()), renewed_at = f.lease_renewed_at, finished_at = clock_timestamp(),
        outcome = CASE f.ending WHEN 'cancelled' THEN 'cancelled' ELSE 'failed' END,
        error_class = f.error_class, error_code = CASE WHEN f.ending IS DISTINCT FROM 'cancelled' THEN f.error_code END,
        decision = CASE WHEN f.ending IS NULL THEN 'retry' WHEN f.state = 'dead' THEN 'dead' END,
        retry_delay = CASE WHEN f.ending IS NULL THEN f.delay END, cost = f.cost, usage = f.usage::jsonb
    FROM finished AS f WHERE a.run_id = f.run_id AND a.tenant_id = f.tenant_id AND a.generation = f.lease_generation
)
SELECT f.run_id, f.tenant_id, f.lease_generation, f.state, f.ending AS reason FROM finished AS f;

-- name: release
-- Give back attempts that were not at fault (a graceful stop, a workflow that sleeps): runs $2 of tenants $3 under generations $4,
-- checkpoints $5, started $6 after their claims. The attempt does not count, nothing failed; a run whose cancellation was requested
-- ends as cancelled. $7: after which delay to go on, null for at once. $8: why the run is parked until a person resumes it, or null.
WITH held AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id, h.generation, h.checkpoint, h.started_after, h.delay, h.parked_as
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $5::bytea[], $6::interval[], $7::interval[], $8::text[])
        AS h(run_id, tenant_id, generation, checkpoint, started_after, delay, parked_as)
    JOIN fencepost.jobs AS j ON j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
    WHERE j.lease_owner = $1
    ORDER BY j.run_id, j.tenant_id FOR UPDATE OF j SKIP LOCKED
),
released AS (
    UPDATE fencepost.jobs AS j
    SET state = CASE WHEN j.cancel_requested_at IS NULL THEN 'queued' ELSE 'cancelled' END,
        finished_at = CASE WHEN j.cancel_requested_at IS NOT NULL THEN clock_timestamp() END,
        available_at = CASE WHEN h.parked_as IS NOT NULL THEN timestamptz '9999-12-31 00:00:00+00'
                            ELSE clock_timestamp() + coalesce(h.delay, interval '0') END,
        attempts = j.attempts - 1, checkpoint = coalesce(h.checkpoint, j.checkpoint),
        last_error_code = coalesce(h.parked_as, j.last_error_code), lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL
    FROM held AS h
    WHERE j.run_id = h.run_id AND j.tenant_id = h.tenant_id AND j.lease_generation = h.generation
      AND j.lease_owner = $1 AND j.lease_expires_at > clock_timestamp()
    RETURNING j.run_id, j.tenant_id, j.lease_generation, j.state, j.attempts, j.lease_renewed_at, h.started_after,
              j.available_at <= clock_timestamp() AS is_ready
),
ended AS (
    UPDATE fencepost.runs AS r
    SET state = 'cancelled', version = r.version + 1, event_sequence = r.event_sequence + 1, finished_at = clock_timestamp()
    FROM released AS f WHERE r.run_id = f.run_id AND r.tenant_id = f.tenant_id AND f.state = 'cancelled'
    RETURNING r.run_id, r.tenant_id, r.event_sequence, f.lease_generation, f.attempts
),
event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, fencing_token)
    SELECT e.run_id, e.tenant_id, e.event_sequence, 'run_cancelled',
           jsonb_build_object('decided_by', 'cancellation', 'attempts', e.attempts), e.lease_generation
    FROM ended AS e
),
attempt AS (
    UPDATE fencepost.job_attempts AS a
    SET started_at = least(a.claimed_at + f.started_after, clock_timestamp()), renewed_at = f.lease_renewed_at, finished_at = clock_timestamp(),
        outcome = CASE f.state WHEN 'cancelled' THEN 'cancelled' ELSE 'released' END
    FROM released AS f WHERE a.run_id = f.run_id AND a.tenant_id = f.tenant_id AND a.generation = f.lease_generation
)
SELECT f.run_id, f.tenant_id, f.lease_generation, f.state, CASE WHEN f.is_ready THEN fencepost.ring_workers() END FROM released AS f;

-- name: reap
-- End what no claim can see, at most $1 jobs: an expired lease whose attempts are spent, whose deadline has passed or whose run
-- was cancelled, and a queued job past its deadline. Any other expired lease is queued again, for workers of any kind.
WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS at),
expired AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
    WHERE j.state = 'leased' AND j.lease_expires_at <= (SELECT at FROM clock)
    ORDER BY j.lease_expires_at, j.run_id LIMIT $1 FOR UPDATE SKIP LOCKED
),
late AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id FROM fencepost.jobs AS j
    WHERE j.state = 'queued' AND j.deadline_at <= (SELECT at FROM clock)
    ORDER BY j.deadline_at LIMIT $1 FOR UPDATE SKIP LOCKED
),
chosen AS (
    SELECT j.run_id, j.tenant_id, j.lease_generation, j.lease_renewed_at, j.last_error_code,
           CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                WHEN j.deadline_at <= (SELECT at FROM clock) THEN 'deadline_exceeded'
                WHEN j.attempts >= j.max_attempts THEN 'attempts_exhausted' END AS ending
    FROM (SELECT * FROM expired UNION ALL SELECT * FROM late) AS c
    JOIN fencepost.jobs AS j ON j.run_id = c.run_id AND j.tenant_id = c.tenant_id
),
reaped AS (
    UPDATE fencepost.jobs AS j
    SET state = CASE WHEN c.ending IS NULL THEN 'queued' WHEN c.ending = 'cancelled' THEN 'cancelled' ELSE 'dead' END,
        finished_at = CASE WHEN c.ending IS NOT NULL THEN clock_timestamp() END,
        dead_reason = CASE WHEN c.ending <> 'cancelled' THEN c.ending END,
        available_at = CASE WHEN c.ending IS NULL THEN clock_timestamp() ELSE j.available_at END,
        lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL,
        last_error_code = CASE WHEN j.state = 'leased' THEN 'lease_expired' ELSE j.last_error_code END
    FROM chosen AS c WHERE j.run_id = c.run_id AND j.tenant_id = c.tenant_id AND j.lease_generation = c.lease_generation
    RETURNING j.run_id, j.tenant_id, j.workflow, j.lease_generation, j.state, j.attempts, c.lease_renewed_at, c.ending
),
ended AS (
    UPDATE fencepost.runs AS r
    SET state = CASE f.state WHEN 'dead' THEN 'failed' ELSE 'cancelled' END, version = r.version + 1,
        event_sequence = r.event_sequence + 1, finished_at = clock_timestamp(),
        error_code = CASE WHEN f.state = 'dead' THEN
            CASE f.ending WHEN 'attempts_exhausted' THEN 'lease_expired' ELSE f.ending END END
    FROM reaped AS f WHERE r.run_id = f.run_id AND r.tenant_id = f.tenant_id AND f.ending IS NOT NULL
    RETURNING r.run_id, r.tenant_id, r.root_run_id, r.event_sequence, r.state, r.error_code, f.lease_generation, f.attempts, f.ending
),
event AS (
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, fencing_token)
    SELECT e.run_id, e.tenant_id, e.event_sequence, 'run_' || e.state,
           CASE e.state WHEN 'failed' THEN jsonb_build_object('error_code', e.error_code, 'reason', e.ending, 'attempts', e.attempts)
                        ELSE jsonb_build_object('decided_by', 'cancellation', 'attempts', e.attempts) END, e.lease_generation
    FROM ended AS e
),
attempt AS (
    UPDATE fencepost.job_attempts AS a
    SET finished_at = clock_timestamp(), renewed_at = f.lease_renewed_at, outcome = 'lost', error_code = 'lease_expired',
        decision = CASE WHEN f.ending IS NULL THEN 'retry' WHEN f.state = 'dead' THEN 'dead' END
    FROM reaped AS f
    WHERE a.run_id = f.run_id AND a.tenant_id = f.tenant_id AND a.generation = f.lease_generation AND a.finished_at IS NULL
)
SELECT f.run_id, f.tenant_id, f.workflow, f.state, f.ending AS reason, e.root_run_id
FROM reaped AS f LEFT JOIN ended AS e ON e.run_id = f.run_id AND e.tenant_id = f.tenant_id;

-- name: append_event
-- Append event $5 with detail $6 to run $2 of tenant $3, if owner $1 holds generation $4. The fence is the job's row, locked.
WITH held AS MATERIALIZED (
    SELECT j.run_id, j.tenant_id, j.lease_generation, j.lease_expires_at FROM fencepost.jobs AS j
    WHERE j.run_id = $2 AND j.tenant_id = $3 AND j.lease_owner = $1 AND j.lease_generation = $4
    FOR UPDATE
)
SELECT fencepost.append_run_event(h.tenant_id, h.run_id, $5, $6::jsonb, h.lease_generation) AS sequence
FROM held AS h WHERE h.lease_expires_at > clock_timestamp();

-- name: guard
-- Whether owner $1 still holds run $2 of tenant $3 under generation $4; the job's row stays locked until the transaction ends.
WITH held AS MATERIALIZED (
    SELECT j.lease_expires_at, j.cancel_requested_at FROM fencepost.jobs AS j
    WHERE j.run_id = $2 AND j.tenant_id = $3 AND j.lease_owner = $1 AND j.lease_generation = $4
    FOR UPDATE
)
SELECT 1 FROM held AS h WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL;

-- name: why_lost
-- How the job of run $1 of tenant $2 stands: what a holder is told whose write changed nothing.
SELECT j.state, j.lease_generation, j.lease_owner, j.lease_expires_at <= clock_timestamp() AS expired,
       j.cancel_requested_at IS NOT NULL AS cancel_requested, r.state AS run_state
FROM fencepost.jobs AS j JOIN fencepost.runs AS r ON r.run_id = j.run_id AND r.tenant_id = j.tenant_id
WHERE j.run_id = $1 AND j.tenant_id = $2;

-- name: expire_keys
-- Turn up to $1 keys that are past their retention into tombstones: they answer `expired`, and let go of their runs.
WITH due AS MATERIALIZED (
    SELECT k.key_hash, k.key_version, k.tenant_id FROM fencepost.idempotency_keys AS k
    WHERE k.run_id IS NOT NULL AND k.expires_at <= (SELECT clock_timestamp())
    ORDER BY k.expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
UPDATE fencepost.idempotency_keys AS k SET run_id = NULL, fingerprint = NULL, fingerprint_profile = NULL, schema_version = NULL
FROM due AS d WHERE k.key_hash = d.key_hash AND k.key_version = d.key_version AND k.tenant_id = d.tenant_id
RETURNING 1;

-- name: forget_effects
-- Delete up to $2 rows of the ledger older than $1, and than any other service's retention; how many.
SELECT fencepost.forget_effects($1, $2) AS forgotten;

-- name: ring_lineages
-- Tell whoever waits for the lineages of the root runs $1 that they have news. After the commit, in a statement of its own.
SELECT fencepost.ring_lineages($1::uuid[]);

-- name: arm
-- From now until $1 milliseconds ahead, whoever makes a job ready rings. Never shortens what another worker asked for.
SELECT setval('fencepost.doorbell_jobs', greatest(coalesce(pg_sequence_last_value('fencepost.doorbell_jobs'::regclass), 1),
    (extract(epoch FROM clock_timestamp()) * 1000)::bigint + $1::bigint));

-- name: next_ready
-- Seconds until the next queued job of the workflows $1 is ready, 0 if one is; null if none is queued.
SELECT greatest(extract(epoch FROM min(n.available_at) - clock_timestamp()), 0)::float8 AS seconds
FROM unnest($1::text[]) AS w(workflow) CROSS JOIN LATERAL (
    SELECT j.available_at FROM fencepost.jobs AS j
    WHERE j.state = 'queued' AND j.workflow = w.workflow ORDER BY j.available_at, j.run_id LIMIT 1
) AS n;

-- name: queue_depth
-- For the gauges: by workflow of $1, how many jobs are ready (counted up to $2), how long the oldest has waited, how many are leased.
SELECT w.workflow, ready.jobs AS ready, coalesce(ready.oldest_seconds, 0)::float8 AS oldest_seconds
FROM unnest($1::text[]) AS w(workflow) CROSS JOIN LATERAL (
    SELECT count(*) AS jobs, extract(epoch FROM clock_timestamp() - min(n.available_at)) AS oldest_seconds
    FROM (SELECT j.available_at FROM fencepost.jobs AS j
          WHERE j.state = 'queued' AND j.workflow = w.workflow AND j.available_at <= (SELECT clock_timestamp())
          ORDER BY j.available_at, j.run_id LIMIT $2) AS n
) AS ready;
