-- The ledger's statements. One transition, one statement; every write names the effect's generation, and zero rows is an answer.
--
-- $1..$6 are the effect's identity: run key, tenant, iteration, step, occurrence, operation. Where a run stands behind it, its lease
-- is asked for as well: run id, owner and generation of the lease, all null for a message without a run.

-- name: reserve_effect
-- Reserve an effect that nobody has, or take over one that may be called: a reservation left behind (its time is over, or a later
-- lease of the run asks), or one proven absent that the provider's key still covers ($15: for how long after the first reservation).
-- $10 holder, $11 for how long, $12 fingerprint, $13 version of its secret, $14 the provider's key. No row: read it.
INSERT INTO fencepost.effects AS e (run_key, tenant_id, iteration, step, occurrence, operation, state, run_generation, holder,
                                    held_until, fingerprint, fingerprint_version, provider_key)
SELECT $1, $2, $3, $4, $5, $6, 'reserved', $9::bigint, $10, clock_timestamp() + $11::interval, $12, $13, $14
WHERE $7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp() AND j.cancel_requested_at IS NULL)
ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO UPDATE
SET state = 'reserved', generation = e.generation + 1, run_generation = excluded.run_generation, holder = excluded.holder,
    held_until = excluded.held_until
WHERE e.fingerprint = excluded.fingerprint AND e.fingerprint_version = excluded.fingerprint_version
  AND (e.run_generation <= excluded.run_generation) IS NOT FALSE
  AND (e.state = 'absent' AND (e.created_at + $15::interval > clock_timestamp()) IS NOT FALSE
       OR e.state = 'reserved' AND (e.held_until <= clock_timestamp() OR e.run_generation < excluded.run_generation
                                    OR e.holder = excluded.holder))
RETURNING e.generation, e.provider_key, e.sends;

-- name: read_effect
-- What is known of an effect. `lapsed`: the call that was sent must have ended longer than $7 ago, and nobody has said how.
SELECT e.state, e.generation, e.holder, e.fingerprint, e.fingerprint_version, e.provider_key, e.provider_reference, e.result,
       e.error_class, e.error_code, e.sends, e.sent_at, e.deadline_at, e.created_at,
       e.state = 'sent' AND e.deadline_at + $7::interval <= clock_timestamp() AS lapsed,
       greatest(extract(epoch FROM coalesce(e.held_until, e.deadline_at + $7::interval) - clock_timestamp()), 0)::float8 AS wait_seconds
FROM fencepost.effects AS e
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6;

-- name: send_effect
-- Right before the call goes out: from here on nobody repeats it. $10 the effect's generation, $11 how long the call may take.
UPDATE fencepost.effects AS e
SET state = 'sent', sends = e.sends + 1, sent_at = clock_timestamp(), deadline_at = clock_timestamp() + $11::interval, held_until = NULL
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND e.state = 'reserved'
  AND ($7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp() AND j.cancel_requested_at IS NULL))
RETURNING e.generation;

-- name: finish_effect
-- How the call ended: $11 state (succeeded, failed, unknown, or absent where the provider surely did nothing), $12 result,
-- $13 provider's reference, $14 error class, $15 error code; made under generation $10.
UPDATE fencepost.effects AS e
SET state = $11, result = $12, provider_reference = $13, error_class = $14, error_code = $15,
    finished_at = CASE WHEN $11 IN ('succeeded', 'failed') THEN clock_timestamp() END
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND e.state = 'sent' AND $11 IN ('succeeded', 'failed', 'unknown', 'absent')
  AND ($7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp()))
RETURNING e.generation;

-- name: question_effect
-- Take an effect over to ask the provider about it: one whose answer is unknown, or whose call must have ended longer than $8 ago.
-- $7 the generation that was read: of two who ask at once, one goes on.
UPDATE fencepost.effects AS e SET state = 'unknown', generation = e.generation + 1, holder = $9
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $7 AND (e.state = 'unknown' OR e.state = 'sent' AND e.deadline_at + $8::interval <= clock_timestamp())
RETURNING e.generation, clock_timestamp() AS asked_at;

-- name: reconcile_effect
-- What the provider said, asked under generation $7: $8 applied or absent, $9 result, $10 reference. Absent counts only if it was seen at
-- $11, later than the call's deadline plus $12: a call on its way when it was asked may have arrived afterwards.
UPDATE fencepost.effects AS e
SET state = $8, result = $9, provider_reference = coalesce($10, e.provider_reference),
    finished_at = CASE WHEN $8 = 'applied' THEN clock_timestamp() END
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $7 AND e.state = 'unknown'
  AND ($8 = 'applied' OR $8 = 'absent' AND e.deadline_at + $12::interval <= $11)
RETURNING e.generation;

-- name: record_effect
-- An effect inside this database, recorded with it in one transaction: no call, so no reservation. No row: it is recorded already.
INSERT INTO fencepost.effects AS e (run_key, tenant_id, iteration, step, occurrence, operation, state, run_generation, holder,
                                    fingerprint, fingerprint_version, provider_key, result, finished_at)
VALUES ($1, $2, $3, $4, $5, $6, 'succeeded', $7, $8, $9, $10, $11, $12, clock_timestamp())
ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO NOTHING
RETURNING e.generation;
