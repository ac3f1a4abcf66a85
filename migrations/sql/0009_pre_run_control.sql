-- What changes a run from outside its worker (cancel, replay), what a producer may read of it, and who may do what.

-- Appends an event to a run: the caller's transaction holds the run's row from here to its end, so sequences have no gap and
-- follow the order of commits.
CREATE FUNCTION fencepost.append_run_event(tenant_id text, run_id uuid, type text, detail jsonb, fencing_token bigint DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    drawn bigint;
BEGIN
    UPDATE fencepost.runs AS r SET event_sequence = r.event_sequence + 1
    WHERE r.run_id = run_id AND r.tenant_id = tenant_id
    RETURNING r.event_sequence INTO drawn;
    IF drawn IS NOT NULL THEN
        INSERT INTO fencepost.run_events (run_id, tenant_id, sequence, type, detail, fencing_token)
        VALUES (run_id, tenant_id, drawn, type, detail, fencing_token);
    END IF;
    RETURN drawn;
END
$$;
REVOKE ALL ON FUNCTION fencepost.append_run_event FROM PUBLIC;

-- Who acts and why, checked once for every operator's change.
CREATE FUNCTION fencepost.check_actor(actor text, reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF actor IS NULL OR octet_length(actor) NOT BETWEEN 1 AND 256 OR actor !~ '\S' THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: actor: must have 1 to 256 bytes; say who acts';
    ELSIF reason IS NULL OR octet_length(reason) NOT BETWEEN 1 AND 2000 OR reason !~ '\S' THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: reason: must have 1 to 2000 bytes; say why';
    END IF;
END
$$;
REVOKE ALL ON FUNCTION fencepost.check_actor FROM PUBLIC;

-- What operators did to a run, for its story.
CREATE INDEX audit_run_idx ON fencepost.audit ((detail ->> 'run_id')) WHERE detail ? 'run_id';

-- Cancels a run. The job's row is the referee: whoever holds it first, a completion or this, decides.
--   cancelled  queued, or leased by nobody alive: ended here, never claimed again
--   requested  a worker holds it: it is told, its completion is refused from now on, and the run ends as cancelled
--   ended      the run was in a terminal state already, which run_state names
--   changed    expected_version is not the run's version
--   not_found  no such run in this tenant
CREATE FUNCTION fencepost.cancel_run(
    tenant_id text, run_id uuid, actor text, reason text, expected_version bigint DEFAULT NULL,
    OUT outcome text, OUT run_state text, OUT run_version bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    job fencepost.jobs;
    run fencepost.runs;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    SELECT * INTO job FROM fencepost.jobs AS j WHERE j.run_id = run_id AND j.tenant_id = tenant_id FOR UPDATE;
    SELECT * INTO run FROM fencepost.runs AS r WHERE r.run_id = run_id AND r.tenant_id = tenant_id FOR UPDATE;
    run_state := run.state;
    run_version := run.version;
    outcome := CASE
        WHEN run.run_id IS NULL OR job.run_id IS NULL THEN 'not_found'
        WHEN run.finished_at IS NOT NULL THEN 'ended'
        WHEN expected_version <> run.version THEN 'changed'
        WHEN job.state = 'leased' AND job.lease_expires_at > clock_timestamp() THEN 'requested'
        ELSE 'cancelled'
    END;
    IF outcome = 'cancelled' THEN
        UPDATE fencepost.jobs AS j
        SET state = 'cancelled', finished_at = clock_timestamp(), cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
            lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL
        WHERE j.run_id = run_id AND j.tenant_id = tenant_id;
        UPDATE fencepost.job_attempts AS a
        SET finished_at = clock_timestamp(), renewed_at = job.lease_renewed_at, outcome = 'lost', error_code = 'lease_expired'
        WHERE a.run_id = run_id AND a.tenant_id = tenant_id AND a.finished_at IS NULL;
        UPDATE fencepost.runs AS r
        SET state = 'cancelled', version = r.version + 1, finished_at = clock_timestamp(),
            cancel_requested_at = coalesce(r.cancel_requested_at, clock_timestamp())
        WHERE r.run_id = run_id AND r.tenant_id = tenant_id
        RETURNING r.state, r.version INTO run_state, run_version;
        PERFORM fencepost.append_run_event(tenant_id, run_id, 'run_cancelled', '{"decided_by": "cancellation"}');
    ELSIF outcome = 'requested' AND job.cancel_requested_at IS NULL THEN
        UPDATE fencepost.jobs AS j SET cancel_requested_at = clock_timestamp() WHERE j.run_id = run_id AND j.tenant_id = tenant_id;
        UPDATE fencepost.runs AS r SET version = r.version + 1, cancel_requested_at = clock_timestamp()
        WHERE r.run_id = run_id AND r.tenant_id = tenant_id
        RETURNING r.version INTO run_version;
        PERFORM fencepost.append_run_event(tenant_id, run_id, 'run_cancel_requested', '{}');
        PERFORM pg_notify('fencepost_cancelled', run_id::text);
    END IF;
    IF run.version <> run_version THEN
        INSERT INTO fencepost.audit (actor, command, reason, detail)
        VALUES (actor, 'runs cancel', reason, jsonb_build_object('tenant_id', tenant_id, 'run_id', run_id, 'outcome', outcome,
                                                                'version_before', run.version, 'version_after', run_version));
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.cancel_run IS 'Cancels a run, or asks its worker to; audited';

-- Runs dead work anew, as another run of the lineage. The dead run, its attempts and its events stay as they are.
--   replayed        new_run_id is queued
--   not_found · not_dead (it did not fail) · already_replayed (new_run_id says by which run) ·
--   budget_spent (the lineage has been replayed replay_limit times) · too_old (it ended before ledger_retention ago, so the
--   ledger may no longer know what it did)
CREATE FUNCTION fencepost.replay_run(
    tenant_id text, run_id uuid, new_id uuid, actor text, reason text, replay_limit integer, ledger_retention interval,
    OUT outcome text, OUT new_run_id uuid, OUT replays integer
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    dead_job fencepost.jobs;
    dead_run fencepost.runs;
    lineage_at timestamptz;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    IF new_id IS NULL OR replay_limit IS NULL OR replay_limit NOT BETWEEN 1 AND 1000
        OR ledger_retention IS NULL OR ledger_retention NOT BETWEEN interval '1 second' AND interval '3660 days' THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation',
            MESSAGE = 'fencepost: replay_limit: must be from 1 to 1000, and ledger_retention from one second to ten years';
    END IF;
    SELECT * INTO dead_job FROM fencepost.jobs AS j WHERE j.run_id = run_id AND j.tenant_id = tenant_id FOR UPDATE;
    SELECT * INTO dead_run FROM fencepost.runs AS r WHERE r.run_id = run_id AND r.tenant_id = tenant_id FOR UPDATE;
    SELECT x.new_run_id INTO new_run_id FROM fencepost.job_replays AS x WHERE x.run_id = run_id AND x.tenant_id = tenant_id;
    SELECT count(*) INTO replays FROM fencepost.runs AS r
    WHERE r.root_run_id = dead_run.root_run_id AND r.tenant_id = tenant_id AND r.root_run_id <> r.run_id AND r.replay_of IS NOT NULL;
    -- The ledger's rows hang on the lineage, and its first run wrote the oldest of them.
    SELECT r.created_at INTO lineage_at FROM fencepost.runs AS r WHERE r.run_id = dead_run.root_run_id AND r.tenant_id = tenant_id;
    outcome := CASE
        WHEN dead_run.run_id IS NULL OR dead_job.run_id IS NULL THEN 'not_found'
        WHEN new_run_id IS NOT NULL THEN 'already_replayed'
        WHEN dead_run.state <> 'failed' OR dead_job.state <> 'dead' THEN 'not_dead'
        WHEN replays >= replay_limit THEN 'budget_spent'
        WHEN lineage_at IS NULL OR lineage_at <= clock_timestamp() - ledger_retention THEN 'too_old'
        ELSE 'replayed'
    END;
    IF outcome <> 'replayed' THEN
        RETURN;
    END IF;
    PERFORM fencepost.start_run(tenant_id, new_id, dead_run.workflow, dead_run.workflow_version, dead_run.topic, dead_run.input,
                                interval '0', dead_job.max_attempts, dead_job.deadline_at - dead_run.created_at, dead_job.cost_limit,
                                dead_run.traceparent, dead_run.root_run_id, run_id);
    INSERT INTO fencepost.job_replays (run_id, tenant_id, new_run_id, actor, reason)
    VALUES (run_id, tenant_id, new_id, actor, reason);
    INSERT INTO fencepost.audit (actor, command, reason, detail)
    VALUES (actor, 'runs replay', reason, jsonb_build_object('tenant_id', tenant_id, 'run_id', run_id, 'new_run_id', new_id,
                                                            'replays_before', replays, 'replays_after', replays + 1));
    new_run_id := new_id;
    replays := replays + 1;
END
$$;
COMMENT ON FUNCTION fencepost.replay_run IS 'Runs dead work anew as another run of its lineage; audited, bounded';

-- What a producer may read of a run: its state and its answer.
CREATE FUNCTION fencepost.read_run(
    tenant_id text, run_id uuid,
    OUT workflow text, OUT state text, OUT version bigint, OUT attempts integer, OUT output bytea, OUT error_code text,
    OUT created_at timestamptz, OUT started_at timestamptz, OUT finished_at timestamptz, OUT cancel_requested_at timestamptz
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    SELECT r.workflow, r.state, r.version, j.attempts, r.output, r.error_code, r.created_at, r.started_at, r.finished_at, r.cancel_requested_at
    INTO workflow, state, version, attempts, output, error_code, created_at, started_at, finished_at, cancel_requested_at
    FROM fencepost.runs AS r JOIN fencepost.jobs AS j ON j.run_id = r.run_id AND j.tenant_id = r.tenant_id
    WHERE r.run_id = read_run.run_id AND r.tenant_id = read_run.tenant_id;
END
$$;

-- The tenants of a workflow that have ready jobs, round robin after the place where the last look ended; at most `most` of them, and
-- at most 200 looked at, one index probe each. The last row is where this look ended, whether that tenant has ready jobs or not.
CREATE FUNCTION fencepost.ready_tenants(workflow text, place text, ready_at timestamptz, most integer)
RETURNS TABLE (tenant_id text, ready boolean)
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    started text := place;
    wrapped boolean := false;
    found_ready integer := 0;
BEGIN
    FOR look IN 1 .. 200 LOOP
        SELECT j.tenant_id, j.available_at <= ready_at INTO tenant_id, ready FROM fencepost.jobs AS j
        WHERE j.state = 'queued' AND j.workflow = workflow AND j.tenant_id > place
          AND (j.deadline_at > ready_at) IS NOT FALSE AND j.attempts < j.max_attempts
        ORDER BY j.tenant_id, j.available_at, j.run_id LIMIT 1;
        IF NOT FOUND OR (wrapped AND tenant_id > started) THEN
            EXIT WHEN wrapped;
            wrapped := true;
            place := '';
            CONTINUE;
        END IF;
        place := tenant_id;
        found_ready := found_ready + ready::integer;
        IF ready OR look = 200 THEN
            RETURN NEXT;
        END IF;
        EXIT WHEN found_ready >= most;
    END LOOP;
END
$$;

-- The role of services that execute runs. It reads and moves jobs; input and identity of a run it cannot change.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'fencepost_consumer') THEN
        CREATE ROLE fencepost_consumer NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'fencepost: may not create the role fencepost_consumer',
            HINT = 'Run the migration as a role with CREATEROLE, or create fencepost_consumer (NOLOGIN) first.';
END
$$;
REVOKE ALL ON FUNCTION fencepost.cancel_run, fencepost.replay_run, fencepost.read_run, fencepost.ready_tenants FROM PUBLIC;
GRANT USAGE ON SCHEMA fencepost TO fencepost_consumer;
GRANT EXECUTE ON FUNCTION fencepost.cancel_run, fencepost.read_run TO fencepost_producer;
GRANT SELECT (run_id, topic) ON fencepost.runs TO fencepost_relay;  -- `fencepost check` looks whether their topics exist
GRANT EXECUTE ON FUNCTION fencepost.cancel_run, fencepost.replay_run, fencepost.read_run TO fencepost_operator;
GRANT SELECT ON fencepost.runs, fencepost.jobs, fencepost.run_events, fencepost.job_attempts TO fencepost_consumer;
GRANT INSERT ON fencepost.run_events, fencepost.job_attempts TO fencepost_consumer;
GRANT UPDATE (state, version, event_sequence, started_at, finished_at, error_code, output) ON fencepost.runs TO fencepost_consumer;
GRANT UPDATE (state, available_at, lease_owner, lease_expires_at, lease_renewed_at, lease_generation, attempt_deadline_at, attempts,
              retry_delay, cost_used, cancel_requested_at, finished_at, dead_reason, last_error_code, checkpoint)
    ON fencepost.jobs TO fencepost_consumer;
GRANT UPDATE (started_at, renewed_at, finished_at, outcome, error_class, error_code, decision, retry_delay, cost, usage)
    ON fencepost.job_attempts TO fencepost_consumer;
GRANT SELECT ON fencepost.idempotency_keys TO fencepost_consumer;
GRANT UPDATE (run_id, fingerprint, fingerprint_profile, schema_version) ON fencepost.idempotency_keys TO fencepost_consumer;
GRANT DELETE ON fencepost.idempotency_keys TO fencepost_consumer;
GRANT EXECUTE ON FUNCTION fencepost.ready_tenants, fencepost.append_run_event, fencepost.ring_workers TO fencepost_consumer;
GRANT SELECT, UPDATE ON SEQUENCE fencepost.doorbell_jobs TO fencepost_consumer;
GRANT SELECT ON fencepost.runs, fencepost.run_events, fencepost.jobs, fencepost.job_attempts, fencepost.idempotency_keys,
    fencepost.job_replays TO fencepost_operator;
DO $$
BEGIN
    IF to_regclass('fencepost.migrations') IS NOT NULL THEN
        GRANT SELECT ON fencepost.migrations TO fencepost_consumer;
    END IF;
END
$$;
