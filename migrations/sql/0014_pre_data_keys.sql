-- One data key for each lineage: what its payloads are encoded with, wrapped by a key of the service. Erasing the lineage deletes the
-- row, and whatever the key had made is unreadable, in topics and in dumps without the keys as well.
--
-- A table of its own and no column of runs, so that a dump can leave it out: pg_dump --exclude-table-data=fencepost.data_keys.
CREATE TABLE fencepost.data_keys (
    root_run_id uuid        NOT NULL,
    tenant_id   text        COLLATE "C" NOT NULL,
    wrapped     bytea       NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT data_keys_pkey PRIMARY KEY (root_run_id, tenant_id),
    CONSTRAINT data_keys_run_fkey FOREIGN KEY (root_run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT data_keys_check CHECK (octet_length(wrapped) BETWEEN 1 AND 4096)
);
COMMENT ON TABLE fencepost.data_keys IS 'The data keys of lineages; without its key nothing of a lineage can be read';
COMMENT ON COLUMN fencepost.data_keys.wrapped IS 'As the service''s codec has wrapped it; the database cannot unwrap it';

-- Keeps the data key of a run that this transaction has accepted; the run's id, so that the statement that accepts can call it.
CREATE FUNCTION fencepost.keep_data_key(tenant_id text, run_id uuid, wrapped bytea) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
BEGIN
    -- Of an older run it would hide what was encoded without it.
    INSERT INTO fencepost.data_keys (root_run_id, tenant_id, wrapped)
    SELECT r.run_id, r.tenant_id, wrapped FROM fencepost.runs AS r
    WHERE r.run_id = run_id AND r.tenant_id = tenant_id AND r.root_run_id = r.run_id AND r.erased_at IS NULL AND r.created_at >= now();
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: data_key: is for a run that this transaction has accepted';
    END IF;
    RETURN run_id;
END
$$;
COMMENT ON FUNCTION fencepost.keep_data_key IS 'Keeps the data key of a run that this transaction has accepted';

-- The data key of a run's lineage, by any of its runs.
--   found      wrapped is null: it has none, the service's own codec reads it.
--   erased     nobody can read anything of it any more.
--   not_found
CREATE FUNCTION fencepost.read_data_key(tenant_id text, run_id uuid, OUT outcome text, OUT wrapped bytea)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
BEGIN
    SELECT CASE WHEN r.erased_at IS NULL THEN 'found' ELSE 'erased' END, k.wrapped INTO outcome, wrapped
    FROM fencepost.runs AS r
    LEFT JOIN fencepost.data_keys AS k ON k.root_run_id = r.root_run_id AND k.tenant_id = r.tenant_id
    WHERE r.run_id = run_id AND r.tenant_id = tenant_id;
    outcome := coalesce(outcome, 'not_found');
END
$$;
COMMENT ON FUNCTION fencepost.read_data_key IS 'The data key of a run''s lineage, and whether it was erased';

-- Operators read no keys: they erase, list and replay without them.
REVOKE ALL ON FUNCTION fencepost.keep_data_key, fencepost.read_data_key FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.keep_data_key TO fencepost_producer;
GRANT EXECUTE ON FUNCTION fencepost.read_data_key TO fencepost_producer, fencepost_consumer;
GRANT SELECT ON fencepost.data_keys TO fencepost_consumer;

-- A person's result of an effect goes through no codec: whoever gives it has none.
ALTER TABLE fencepost.effects ADD COLUMN result_is_plain boolean;
COMMENT ON COLUMN fencepost.effects.result_is_plain IS 'True: the result is as an operator gave it, and no codec reads it';

-- As in 0010, and the result is known as a person's.
CREATE OR REPLACE FUNCTION fencepost.resolve_effect(
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
        SET state = resolution, generation = e.generation + 1, result = resolve_effect.result,
            result_is_plain = CASE WHEN resolve_effect.result IS NOT NULL THEN true END, held_until = NULL,
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

-- The run that a run key names; null for a message's own key.
CREATE FUNCTION fencepost.run_of_key(run_key text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT CASE WHEN run_key ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN run_key::uuid END $$;

-- Whether a run key names a run whose lineage was erased: nothing more is kept of it. The run is locked, so that an erasure comes
-- before what is written next, or finds it.
CREATE FUNCTION fencepost.is_erased(run_key text, tenant_id text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    erased boolean;
BEGIN
    SELECT r.erased_at IS NOT NULL INTO erased FROM fencepost.runs AS r
    WHERE r.run_id = fencepost.run_of_key(run_key) AND r.tenant_id = tenant_id FOR SHARE;
    RETURN coalesce(erased, false);
END
$$;
COMMENT ON FUNCTION fencepost.is_erased IS 'Whether a run key names a run whose lineage was erased';
REVOKE ALL ON FUNCTION fencepost.run_of_key, fencepost.is_erased FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.run_of_key, fencepost.is_erased TO fencepost_consumer;
