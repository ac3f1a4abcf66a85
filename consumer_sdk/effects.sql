-- The ledger's statements. One transition, one statement; every write names the effect's generation, and zero rows is an answer.
--
-- $1..$6 are the effect's identity: run key, tenant, iteration, step, occurrence, operation. $7..$9 are the lease of the run behind
-- it, which must hold: run id, owner and generation; all null for a message without a run.

-- name: read_data_key
-- The data key of the lineage of run $2 of tenant $1, wrapped; null for a run that has none, or is not there. `outcome` is erased if
-- the lineage is. The one statement that is about no effect.
SELECT d.outcome, d.wrapped FROM fencepost.read_data_key($1, $2::uuid) AS d;

-- name: reserve_effect
-- Reserve an effect that nobody has, or take over one that may be called: a reservation left behind (its time is over, or a later
-- lease asks, of this run or of a replay), or one proven absent. One that was sent before must not be older than $15, or the provider
-- may have forgotten its key. $10 holder, $11 for how long, $12 fingerprint, $13 version of its secret, $14 the provider's key.
-- No row: read it. A message may be about a run whose lineage was erased, and nothing new is kept of that.
INSERT INTO fencepost.effects AS e (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation, holder,
                                    held_until, fingerprint, fingerprint_version, provider_key)
SELECT $1, $2, $3, $4, $5, $6, 'reserved', $7::uuid, $9::bigint, $10, clock_timestamp() + $11::interval, $12, $13, $14
WHERE CASE WHEN $7::uuid IS NULL THEN NOT fencepost.is_erased($1, $2) ELSE EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp() AND j.cancel_requested_at IS NULL) END
ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO UPDATE
SET state = 'reserved', generation = e.generation + 1, run_id = excluded.run_id, run_generation = excluded.run_generation,
    holder = excluded.holder, held_until = excluded.held_until
WHERE e.fingerprint = excluded.fingerprint AND e.fingerprint_version = excluded.fingerprint_version
  -- Asked of the row itself: what was seen of the job may be older than what another has written here since.
  AND (e.run_id IS DISTINCT FROM excluded.run_id OR e.run_generation <= excluded.run_generation) IS NOT FALSE
  AND (e.first_sent_at + $15::interval > clock_timestamp()) IS NOT FALSE
  AND (e.state = 'absent'
       OR e.state = 'reserved' AND (e.held_until <= clock_timestamp() OR e.run_id IS DISTINCT FROM excluded.run_id
                                    OR e.run_generation < excluded.run_generation))
RETURNING e.generation, e.provider_key, e.sends;

-- name: read_effect
-- What is known of an effect. `held`: the run is, or was not erased, so somebody who may call asks. `lapsed`: the call that was sent must have ended
-- longer than $10 ago, and nobody has said how. `forgotten`: to be sent again, but first sent longer than $12 ago. `wait_seconds`:
-- until whoever has it must have let go; `proof_seconds`: until $11 after the call's end, when absence counts.
SELECT e.state, e.generation, e.fingerprint, e.fingerprint_version, e.provider_key, e.provider_reference, e.result, e.result_is_plain,
       e.error_code, e.sends, e.sent_at,
       CASE WHEN $7::uuid IS NULL THEN NOT EXISTS (
           SELECT FROM fencepost.runs AS r
           WHERE r.run_id = fencepost.run_of_key($1) AND r.tenant_id = $2 AND r.erased_at IS NOT NULL)
       ELSE EXISTS (
           SELECT FROM fencepost.jobs AS j
           WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
             AND j.lease_expires_at > t.now AND j.cancel_requested_at IS NULL) END AS held,
       e.state = 'sent' AND e.deadline_at + $10::interval <= t.now AS lapsed,
       (e.state = 'absent' OR e.state = 'reserved' AND e.held_until <= t.now)
           AND (e.first_sent_at + $12::interval <= t.now) IS TRUE AS forgotten,
       greatest(extract(epoch FROM coalesce(e.held_until, e.deadline_at + $10::interval) - t.now), 0)::float8 AS wait_seconds,
       greatest(extract(epoch FROM e.deadline_at + $11::interval - t.now), 0)::float8 AS proof_seconds
FROM fencepost.effects AS e CROSS JOIN (SELECT clock_timestamp() AS now) AS t
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6;

-- name: send_effect
-- Right before the call goes out: from here on nobody repeats it. $10 the effect's generation, $11 how long the call may take.
UPDATE fencepost.effects AS e
SET state = 'sent', sends = e.sends + 1, first_sent_at = coalesce(e.first_sent_at, clock_timestamp()), sent_at = clock_timestamp(),
    deadline_at = clock_timestamp() + $11::interval, held_until = NULL
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND e.state = 'reserved' AND e.held_until > clock_timestamp()
  AND ($7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp() AND j.cancel_requested_at IS NULL))
RETURNING e.generation;

-- name: finish_effect
-- How the call ended: $11 state (succeeded, failed, unknown, or absent where the provider surely did nothing), $12 result,
-- $13 provider's reference, $14 error class, $15 error code; made under generation $10. A cancellation that was asked for meanwhile
-- does not take the answer away. The job's row is locked, here and in reconcile_effect, which alone write what was said: an erasure that
-- is under way has not seen an effect that was reserved since, and would leave its result.
UPDATE fencepost.effects AS e
SET state = $11, result = $12, provider_reference = coalesce($13, e.provider_reference), error_class = $14, error_code = $15,
    finished_at = CASE WHEN $11 IN ('succeeded', 'failed') THEN clock_timestamp() END
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND e.state = 'sent' AND $11 IN ('succeeded', 'failed', 'unknown', 'absent')
  AND ($7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp()
    FOR KEY SHARE))
RETURNING e.generation;

-- name: question_effect
-- Take an effect over to ask the provider about it: one whose answer is unknown, or whose call must have ended longer than $11 ago.
-- $10 the generation that was read: of two who ask at once, one goes on. $12 holder.
UPDATE fencepost.effects AS e
SET state = 'unknown', generation = e.generation + 1, run_id = $7::uuid, run_generation = $9, holder = $12
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND (e.state = 'unknown' OR e.state = 'sent' AND e.deadline_at + $11::interval <= clock_timestamp())
  AND CASE WHEN $7::uuid IS NULL THEN NOT fencepost.is_erased($1, $2) ELSE EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp()) END
RETURNING e.generation, clock_timestamp() AS asked_at;

-- name: reconcile_effect
-- What the provider said, asked under generation $10: $11 applied or absent, $12 result, $13 reference. Absent counts only if it was
-- seen at $14, later than the call's deadline plus $15: a call on its way when it was asked may have arrived afterwards.
UPDATE fencepost.effects AS e
SET state = $11, result = $12, provider_reference = coalesce($13, e.provider_reference),
    finished_at = CASE WHEN $11 = 'applied' THEN clock_timestamp() END
WHERE e.run_key = $1 AND e.tenant_id = $2 AND e.iteration = $3 AND e.step = $4 AND e.occurrence = $5 AND e.operation = $6
  AND e.generation = $10 AND e.state = 'unknown'
  AND ($11 = 'applied' OR $11 = 'absent' AND e.deadline_at + $15::interval <= $14)
  AND ($7::uuid IS NULL OR EXISTS (
    SELECT FROM fencepost.jobs AS j
    WHERE j.run_id = $7 AND j.tenant_id = $2 AND j.state = 'leased' AND j.lease_owner = $8 AND j.lease_generation = $9
      AND j.lease_expires_at > clock_timestamp()
    FOR KEY SHARE))
RETURNING e.generation;
