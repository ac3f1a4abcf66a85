-- What a workflow keeps of its steps: rows of the ledger. A step's row stands for a call that has returned, a timer's for a wake time;
-- neither asks a provider, so neither has a provider's key.
--
-- A step's identity is the lineage, the iteration, its name and its occurrence: a retry and a replay find what was done, and each
-- iteration of a continue-as-new chain does it once more. Every write is fenced by the job's row, locked FOR SHARE: a take-over, a
-- cancellation or an erasure waits for it or comes first.

-- name: record_steps
-- Keep what steps returned: owner $1 holds runs $2 of tenants $3 under generations $4; run keys $5, iterations $6, steps $7,
-- occurrences $8; fingerprints $9 of their arguments, versions $10 of the secret, results $11. Returned are the places of those that
-- the fence let through; `recorded`: the row is this lease's, by this statement or by one that was thought unanswered.
WITH held AS MATERIALIZED (
    SELECT h.*, j.lease_expires_at, j.cancel_requested_at
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $5::text[], $6::integer[], $7::text[], $8::integer[], $9::bytea[],
                $10::smallint[], $11::bytea[]) WITH ORDINALITY
        AS h(held_run, held_tenant, generation, run_key, iteration, step, occurrence, fingerprint, version, result, place)
    JOIN fencepost.jobs AS j ON j.run_id = h.held_run AND j.tenant_id = h.held_tenant AND j.lease_generation = h.generation
    WHERE j.lease_owner = $1
    ORDER BY j.run_id, j.tenant_id FOR SHARE OF j SKIP LOCKED
),
fenced AS MATERIALIZED (
    SELECT * FROM held AS h WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL
),
written AS (
    INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                                   fingerprint, fingerprint_version, provider_key, result, finished_at)
    SELECT f.run_key, f.held_tenant, f.iteration, f.step, f.occurrence, 'fencepost.step', 'succeeded', f.held_run, f.generation, $1,
           f.fingerprint, f.version, '', f.result, clock_timestamp()
    FROM fenced AS f
    ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO NOTHING
    RETURNING run_key, tenant_id, iteration, step, occurrence
)
SELECT f.place, w.run_key IS NOT NULL OR known.is_mine IS TRUE AS recorded
FROM fenced AS f
LEFT JOIN written AS w ON w.run_key = f.run_key AND w.tenant_id = f.held_tenant AND w.iteration = f.iteration AND w.step = f.step
    AND w.occurrence = f.occurrence
LEFT JOIN LATERAL (
    SELECT e.run_id = f.held_run AND e.run_generation = f.generation AND e.fingerprint = f.fingerprint AS is_mine
    FROM fencepost.effects AS e
    WHERE e.run_key = f.run_key AND e.tenant_id = f.held_tenant AND e.iteration = f.iteration AND e.step = f.step
      AND e.occurrence = f.occurrence AND e.operation = 'fencepost.step'
    LIMIT 1
) AS known ON w.run_key IS NULL;

-- name: read_steps
-- What is kept of the steps $4 with occurrences $5 in iterations $3 of run keys $1 of tenants $2, by their place.
SELECT g.place, e.fingerprint, e.fingerprint_version, e.result
FROM unnest($1::text[], $2::text[], $3::integer[], $4::text[], $5::integer[]) WITH ORDINALITY
    AS g(run_key, tenant_id, iteration, step, occurrence, place)
CROSS JOIN LATERAL (
    SELECT x.fingerprint, x.fingerprint_version, x.result FROM fencepost.effects AS x
    WHERE x.run_key = g.run_key AND x.tenant_id = g.tenant_id AND x.iteration = g.iteration AND x.step = g.step
      AND x.occurrence = g.occurrence AND x.operation = 'fencepost.step'
    LIMIT 1
) AS e;

-- name: begin_timer
-- Set a timer that goes off $11 from now, or find it set: run $2 of tenant $3 that owner $1 holds under generation $4; run key $5,
-- iteration $6, step $7, occurrence $8; fingerprint $9 of how long it was asked to be, version $10 of the secret. `left`: until
-- then, by this clock. No row: the run is not held.
WITH held AS MATERIALIZED (
    SELECT j.lease_expires_at, j.cancel_requested_at FROM fencepost.jobs AS j
    WHERE j.run_id = $2 AND j.tenant_id = $3 AND j.lease_owner = $1 AND j.lease_generation = $4
    FOR SHARE
),
known AS MATERIALIZED (
    SELECT e.fingerprint, e.fingerprint_version, e.deadline_at FROM fencepost.effects AS e
    WHERE e.run_key = $5 AND e.tenant_id = $3 AND e.iteration = $6 AND e.step = $7 AND e.occurrence = $8
      AND e.operation = 'fencepost.timer'
),
written AS (
    INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                                   fingerprint, fingerprint_version, provider_key, deadline_at, finished_at)
    SELECT $5, $3, $6, $7, $8, 'fencepost.timer', 'succeeded', $2, $4, $1, $9, $10, '', clock_timestamp() + $11::interval,
           clock_timestamp()
    FROM held AS h
    WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL AND NOT EXISTS (SELECT FROM known)
    ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO NOTHING
    RETURNING fingerprint, fingerprint_version, deadline_at
)
SELECT t.fingerprint, t.fingerprint_version, extract(epoch FROM t.deadline_at - clock_timestamp())::float8 AS seconds_left
FROM (SELECT * FROM known UNION ALL SELECT * FROM written) AS t, held AS h
WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL;

-- name: continue_run
-- End run $3 of tenant $2, which owner $1 holds under generation $4, as continued by $5: workflow $6, version $7, input $8,
-- max attempts $9, deadline $10. $11: how long after its claim the attempt started; $12, $13: its cost and usage.
SELECT fencepost.continue_run($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13::jsonb) AS new_run_id;
