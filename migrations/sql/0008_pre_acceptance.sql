-- Acceptance: run, first event (and with it the outbox row), job and idempotency record, in the caller's transaction, all or none.

-- The one way to write a first set of facts: a new command's, and a replay's.
CREATE FUNCTION fencepost.start_run(
    tenant_id text, run_id uuid, workflow text, workflow_version integer, topic text, input bytea,
    delay interval, max_attempts integer, deadline interval, cost_limit numeric, traceparent text,
    root_run_id uuid, replay_of uuid
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    accepted_at timestamptz := clock_timestamp();
    first_at timestamptz := accepted_at + delay;
BEGIN
    INSERT INTO fencepost.runs (run_id, tenant_id, root_run_id, replay_of, workflow, workflow_version, topic, input,
                                event_sequence, created_at, traceparent)
    VALUES (run_id, tenant_id, root_run_id, replay_of, workflow, workflow_version, topic, input, 1, accepted_at, traceparent);
    INSERT INTO fencepost.jobs (run_id, tenant_id, workflow, available_at, max_attempts, deadline_at, cost_limit)
    VALUES (run_id, tenant_id, workflow, first_at, max_attempts, first_at + deadline, cost_limit);
    INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, created_at)
    VALUES (run_id, tenant_id, 1, 'run_queued',
            CASE WHEN replay_of IS NULL THEN '{}' ELSE jsonb_build_object('replay_of', replay_of) END, accepted_at);
    PERFORM fencepost.ring_workers();
END
$$;
REVOKE ALL ON FUNCTION fencepost.start_run FROM PUBLIC;

-- Why a command may not be accepted, or NULL when it may. It never quotes a value.
CREATE FUNCTION fencepost.command_refusal(
    tenant_id text, run_id uuid, workflow text, workflow_version integer, topic text, input bytea,
    delay interval, max_attempts integer, deadline interval, cost_limit numeric, traceparent text
) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN CASE
        WHEN tenant_id IS NULL OR octet_length(tenant_id) NOT BETWEEN 1 AND 256 THEN 'tenant_id: must have 1 to 256 bytes'
        WHEN run_id IS NULL THEN 'run_id: must not be null; pass a UUIDv7'
        WHEN workflow IS NULL OR workflow !~ '^[A-Za-z0-9_.:-]{1,200}$'
            THEN 'workflow: must be 1 to 200 characters of a-z A-Z 0-9 _ . : -; use the name that its handler is registered under'
        WHEN workflow_version IS NULL OR workflow_version < 1 THEN 'version: must be 1 or more'
        WHEN topic IS NULL OR topic !~ '^[a-zA-Z0-9._-]{1,249}$' OR topic IN ('.', '..')
            THEN 'topic: must be 1 to 249 characters of a-z A-Z 0-9 . _ - and not "." or ".."'
        WHEN input IS NULL OR octet_length(input) > 1000000
            THEN 'input: must have at most 1000000 bytes; store it elsewhere and pass a reference'
        WHEN delay IS NULL OR delay NOT BETWEEN interval '0' AND interval '366 days'
            THEN 'delay_seconds: must be from 0 to 31622400 (366 days)'
        WHEN max_attempts IS NULL OR max_attempts NOT BETWEEN 1 AND 1000 THEN 'max_attempts: must be from 1 to 1000'
        WHEN deadline NOT BETWEEN interval '1 millisecond' AND interval '366 days'
            THEN 'deadline_seconds: must be from 0.001 to 31622400 (366 days), or be null'
        WHEN cost_limit <= 0 OR cost_limit = 'NaN' OR cost_limit > 1e15
            THEN 'cost_limit: must be more than 0 and at most 1e15, or be null'
        WHEN octet_length(traceparent) NOT BETWEEN 1 AND 256 THEN 'traceparent: must have 1 to 256 bytes, or be null'
    END;
END
$$;
REVOKE ALL ON FUNCTION fencepost.command_refusal FROM PUBLIC;

-- Accepts a command, or finds what its key already stands for.
--   created      all facts are written; they commit with the caller.
--   found        the key stands for a run. The caller compares fingerprints (under key_version, profile and schema version as
--                stored, which may be older than its own): equal is a replay, else a conflict.
--   expired      the key was used and is past its retention.
--   in_progress  another transaction is accepting this key, or has just done so and this transaction's snapshot is too old
--                to see it. Nothing is written, the transaction stays usable.
-- key_hashes: one for each version that the caller knows, the first `written` of them are stored with the run.
-- No keys at all: each call is a run of its own.
--
-- Look before the lock, so that a replay takes none; try the lock instead of waiting on the index, so that a duplicate of an
-- open transaction costs nothing and holds nothing; look again under it, in a new snapshot under READ COMMITTED. Where the
-- snapshot is the transaction's, only the index knows of a winner: there a savepoint catches it.
--
-- SECURITY DEFINER with a pinned search_path: a producer may call this and may touch no table of the schema.
CREATE FUNCTION fencepost.accept(
    tenant_id text, run_id uuid, workflow text, workflow_version integer, topic text, input bytea,
    delay interval, max_attempts integer, deadline interval, cost_limit numeric, traceparent text,
    key_versions smallint[], key_hashes bytea[], fingerprints bytea[], written integer, profile smallint, retention interval,
    OUT outcome text, OUT accepted_run_id uuid, OUT run_state text,
    OUT stored_key_version smallint, OUT stored_profile smallint, OUT stored_schema_version integer, OUT stored_fingerprint bytea
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    refused text := fencepost.command_refusal(tenant_id, run_id, workflow, workflow_version, topic, input, delay, max_attempts,
                                              deadline, cost_limit, traceparent);
    known integer := coalesce(cardinality(key_versions), 0);
    look integer;
    place integer;
    key record;
    violated text;
BEGIN
    IF refused IS NULL AND (cardinality(key_hashes) IS DISTINCT FROM cardinality(key_versions)
                            OR cardinality(fingerprints) IS DISTINCT FROM cardinality(key_versions)
                            OR written NOT BETWEEN least(known, 1) AND known OR (known > 0 AND written IS NULL)) THEN
        refused := 'key: versions, hashes and fingerprints must be as many, and some of them written';
    ELSIF refused IS NULL AND known > 0
        AND (retention IS NULL OR retention NOT BETWEEN interval '1 second' AND interval '3660 days') THEN
        refused := 'key_retention_seconds: must be from 1 to 316224000 (ten years)';
    END IF;
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: ' || refused,
            HINT = 'Nothing was written. Roll back to a savepoint taken before the statement to keep the rest of the transaction.';
    END IF;

    <<looking>>
    FOR look IN 1 .. CASE WHEN known > 0 THEN 2 ELSE 0 END LOOP
        FOR place IN 1 .. known LOOP
            SELECT k.key_version, k.fingerprint, k.fingerprint_profile, k.schema_version, k.run_id, r.state,
                   k.run_id IS NULL OR k.expires_at <= clock_timestamp() AS expired
            INTO key
            FROM fencepost.idempotency_keys AS k
            LEFT JOIN fencepost.runs AS r ON r.run_id = k.run_id AND r.tenant_id = k.tenant_id
            WHERE k.key_hash = key_hashes[place] AND k.key_version = key_versions[place] AND k.tenant_id = tenant_id;
            IF FOUND AND key.expired THEN
                outcome := 'expired';
                RETURN;
            ELSIF FOUND THEN
                outcome := 'found';
                accepted_run_id := key.run_id;
                run_state := key.state;
                stored_key_version := key.key_version;
                stored_profile := key.fingerprint_profile;
                stored_schema_version := key.schema_version;
                stored_fingerprint := key.fingerprint;
                RETURN;
            END IF;
        END LOOP;
        IF look = 1 THEN
            BEGIN  -- a block of its own, so that a lock got before another one failed is given back
                FOR place IN 1 .. written LOOP
                    IF NOT pg_try_advisory_xact_lock(('x' || encode(substring(key_hashes[place] FOR 8), 'hex'))::bit(64)::bigint) THEN
                        RAISE lock_not_available;
                    END IF;
                END LOOP;
            EXCEPTION WHEN lock_not_available THEN
                outcome := 'in_progress';
                RETURN;
            END;
        END IF;
    END LOOP;

    IF known = 0 OR current_setting('transaction_isolation') = 'read committed' THEN
        PERFORM fencepost.start_run(tenant_id, run_id, workflow, workflow_version, topic, input, delay, max_attempts, deadline,
                                    cost_limit, traceparent, run_id, NULL);
        PERFORM fencepost.bind_key(tenant_id, run_id, key_versions, key_hashes, fingerprints, written, profile, workflow_version, retention);
    ELSE
        BEGIN
            PERFORM fencepost.start_run(tenant_id, run_id, workflow, workflow_version, topic, input, delay, max_attempts, deadline,
                                        cost_limit, traceparent, run_id, NULL);
            PERFORM fencepost.bind_key(tenant_id, run_id, key_versions, key_hashes, fingerprints, written, profile, workflow_version, retention);
        EXCEPTION WHEN unique_violation OR serialization_failure THEN
            GET STACKED DIAGNOSTICS violated = CONSTRAINT_NAME;
            -- A winner that this snapshot cannot see took the key, or the run id that both derived from it. Any other
            -- unique violation would stay one in a new transaction. A serialization failure names no constraint.
            IF violated NOT IN ('', 'idempotency_keys_pkey')
                AND (violated <> 'runs_pkey'
                     OR EXISTS (SELECT FROM fencepost.runs AS r WHERE r.run_id = run_id AND r.tenant_id = tenant_id)) THEN
                RAISE;
            END IF;
            outcome := 'in_progress';
            RETURN;
        END;
    END IF;
    outcome := 'created';
    accepted_run_id := run_id;
    run_state := 'queued';
END
$$;
COMMENT ON FUNCTION fencepost.accept IS 'Accepts a command in the caller''s transaction, or finds the run that its key stands for';

CREATE FUNCTION fencepost.bind_key(
    tenant_id text, run_id uuid, key_versions smallint[], key_hashes bytea[], fingerprints bytea[], written integer,
    profile smallint, schema_version integer, retention interval
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    place integer;
BEGIN
    FOR place IN 1 .. coalesce(written, 0) LOOP
        INSERT INTO fencepost.idempotency_keys (key_hash, key_version, tenant_id, run_id, fingerprint, fingerprint_profile,
                                                schema_version, expires_at)
        VALUES (key_hashes[place], key_versions[place], tenant_id, run_id, fingerprints[place], profile, schema_version,
                clock_timestamp() + retention);
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION fencepost.bind_key, fencepost.accept FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.accept TO fencepost_producer;
