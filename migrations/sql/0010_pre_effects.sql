-- The effect ledger: what is known of each outside effect of a step. A row is the permission to call, and the proof of the call.
--
--   reserved   somebody means to call, and has not yet
--   sent       the call may have gone out: nobody repeats it
--   succeeded  it happened; its result is here          failed    it was refused for good; nothing happened
--   unknown    it was sent and its answer is not known  disputed  nobody can tell; a person has closed it
--   applied    reconciled: it had happened              absent    reconciled: it had not, and may be sent again
--
-- generation is the effect's own fencing token: +1 at each take-over, never reset, for messages without a run as well. Every write
-- names it, and the run's lease where there is a run. run_id and run_generation: under which lease it was last taken; a lineage has
-- several runs, each of which counts its leases from 1.
CREATE TABLE fencepost.effects (
    run_key             text        COLLATE "C" NOT NULL,
    tenant_id           text        COLLATE "C" NOT NULL,
    iteration           integer     NOT NULL,
    step                text        COLLATE "C" NOT NULL,
    occurrence          integer     NOT NULL,
    operation           text        COLLATE "C" NOT NULL,
    state               text        NOT NULL,
    generation          bigint      NOT NULL DEFAULT 1,
    run_id              uuid,
    run_generation      bigint,
    holder              text        NOT NULL,
    held_until          timestamptz,
    fingerprint         bytea       NOT NULL,
    fingerprint_version smallint    NOT NULL,
    provider_key        text        NOT NULL,
    provider_reference  text,
    result              bytea,
    error_class         text,
    error_code          text,
    sends               integer     NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    first_sent_at       timestamptz,
    sent_at             timestamptz,
    deadline_at         timestamptz,
    finished_at         timestamptz,
    CONSTRAINT effects_pkey PRIMARY KEY (run_key, tenant_id, iteration, step, occurrence, operation),
    CONSTRAINT effects_state_check CHECK (
        state IN ('reserved', 'sent', 'succeeded', 'failed', 'unknown', 'applied', 'absent', 'disputed')
        AND (held_until IS NOT NULL) = (state = 'reserved')
        AND (finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'applied', 'disputed'))
        AND (result IS NULL OR state IN ('succeeded', 'applied'))
        AND (error_code IS NOT NULL) = (state = 'failed')
        AND (deadline_at IS NOT NULL OR state IN ('reserved', 'succeeded'))
        AND (run_id IS NULL) = (run_generation IS NULL)
        AND generation > 0 AND sends >= 0 AND octet_length(fingerprint) = 32
        AND coalesce(octet_length(result), 0) <= 1000000 AND coalesce(octet_length(provider_reference), 0) <= 1000)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000);
COMMENT ON COLUMN fencepost.effects.run_key IS 'First run of the lineage; for a message without a run its event id';
COMMENT ON COLUMN fencepost.effects.first_sent_at IS
    'Since when the provider may know the key: how long it remembers it counts from here. A person who says "absent" begins anew';
COMMENT ON COLUMN fencepost.effects.deadline_at IS 'When the call that was sent last must have ended';
-- What waits for a reconciler or a person.
CREATE INDEX effects_open_idx ON fencepost.effects (deadline_at) WHERE state IN ('sent', 'unknown');

-- An operator closes what no reconciler could: applied (with what is known of it), absent (it may be sent again) or disputed (for
-- good). Open to that are effects whose answer is not known, and those that were proven absent but may be too old to be sent again.
-- Of two at once one wins: expected_generation is the one that was looked at.
CREATE FUNCTION fencepost.resolve_effect(
    tenant_id text, run_key text, iteration integer, step text, occurrence integer, operation text, expected_generation bigint,
    resolution text, result bytea, provider_reference text, actor text, reason text,
    OUT outcome text, OUT effect_state text, OUT effect_generation bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    effect fencepost.effects;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    IF resolution IS NULL OR resolution NOT IN ('applied', 'absent', 'disputed') THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: resolution: must be applied, absent or disputed';
    ELSIF result IS NOT NULL AND resolution <> 'applied' THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: result: only an applied effect has one';
    END IF;
    SELECT * INTO effect FROM fencepost.effects AS e
    WHERE e.run_key = run_key AND e.tenant_id = tenant_id AND e.iteration = iteration AND e.step = step
      AND e.occurrence = occurrence AND e.operation = operation FOR UPDATE;
    effect_state := effect.state;
    effect_generation := effect.generation;
    outcome := CASE
        WHEN effect.run_key IS NULL THEN 'not_found'
        WHEN effect.generation IS DISTINCT FROM expected_generation THEN 'changed'
        WHEN effect.state IN ('unknown', 'absent') OR (effect.state = 'sent' AND effect.deadline_at <= clock_timestamp())
            OR (effect.state = 'reserved' AND effect.sends > 0 AND effect.held_until <= clock_timestamp()) THEN 'resolved'
        ELSE 'not_open'
    END;
    IF outcome = 'resolved' THEN
        UPDATE fencepost.effects AS e
        SET state = resolution, generation = e.generation + 1, result = resolve_effect.result, held_until = NULL,
            first_sent_at = CASE WHEN resolution <> 'absent' THEN e.first_sent_at END,
            provider_reference = coalesce(resolve_effect.provider_reference, e.provider_reference),
            finished_at = CASE WHEN resolution <> 'absent' THEN clock_timestamp() END
        WHERE e.run_key = run_key AND e.tenant_id = tenant_id AND e.iteration = iteration AND e.step = step
          AND e.occurrence = occurrence AND e.operation = operation
        RETURNING e.state, e.generation INTO effect_state, effect_generation;
        INSERT INTO fencepost.audit (actor, command, reason, detail)
        VALUES (actor, 'effects resolve', reason, jsonb_build_object(
            'tenant_id', tenant_id, 'run_key', run_key, 'iteration', iteration, 'step', step, 'occurrence', occurrence,
            'operation', operation, 'before', effect.state, 'after', effect_state, 'generation', effect_generation));
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.resolve_effect IS 'Closes an effect whose outcome no reconciler could tell; audited';
REVOKE ALL ON FUNCTION fencepost.resolve_effect FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.resolve_effect TO fencepost_operator;
GRANT SELECT ON fencepost.effects TO fencepost_operator, fencepost_consumer;
GRANT INSERT ON fencepost.effects TO fencepost_consumer;
GRANT UPDATE (state, generation, run_id, run_generation, holder, held_until, provider_reference, result, error_class, error_code,
              sends, first_sent_at, sent_at, deadline_at, finished_at) ON fencepost.effects TO fencepost_consumer;
