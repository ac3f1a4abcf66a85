-- Runs and what stands behind them: the product's state (runs), its story (run_events), the operational side (jobs), each
-- claimed execution (job_attempts), the client's identity of an intent (idempotency_keys), and work that was run anew (job_replays).
--
-- One lock order for all of it: a job's row, then its run's row, then what hangs below the run. Several jobs are locked in the
-- order of (run_id, tenant_id), or with SKIP LOCKED. Everything that ends a run holds its job's row, so the row is the referee.
--
-- The tenant is in every key (COLLATE "C": workers take turns by its order). run_id comes first in them: it is a UUIDv7, so rows of one time lie together.
-- One CHECK a table: each constraint's expression is parsed anew by every INSERT statement, at some 13 us.

-- As before, in plpgsql: as a SQL function it is inlined, and a statement that calls it with a variable is then planned anew at every
-- call, in the hope of folding a constant. 10 % of an acceptance and of an enqueue.
CREATE OR REPLACE FUNCTION fencepost.lane_of(key bytea) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    digest bytea := sha256(key);
BEGIN
    RETURN (get_byte(digest, 0) * 256 + get_byte(digest, 1)) % fencepost.lane_count();
END
$$;

CREATE TABLE fencepost.runs (
    run_id              uuid        NOT NULL,
    tenant_id           text        COLLATE "C" NOT NULL,
    root_run_id         uuid        NOT NULL,
    replay_of           uuid,
    iteration           integer     NOT NULL DEFAULT 0,
    workflow            text        NOT NULL,
    workflow_version    integer     NOT NULL,
    topic               text        NOT NULL,
    state               text        NOT NULL DEFAULT 'queued',
    version             bigint      NOT NULL DEFAULT 1,
    event_sequence      bigint      NOT NULL DEFAULT 0,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at          timestamptz,
    cancel_requested_at timestamptz,
    finished_at         timestamptz,
    error_code          text,
    traceparent         text,
    input               bytea       NOT NULL,
    output              bytea,
    CONSTRAINT runs_pkey PRIMARY KEY (run_id, tenant_id),
    CONSTRAINT runs_state_check CHECK (
        state IN ('queued', 'running', 'completed', 'failed', 'cancelled')
        AND (finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled'))
        AND (error_code IS NOT NULL) = (state = 'failed')
        AND (output IS NULL OR state = 'completed')
        AND (started_at IS NOT NULL OR state IN ('queued', 'failed', 'cancelled')))
) WITH (
    -- No index holds a column that changes, and a page has room for its rows once more: updates stay in the page (HOT).
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000
);
COMMENT ON COLUMN fencepost.runs.version IS '+1 at every change of state: what a caller compares before it cancels';
COMMENT ON COLUMN fencepost.runs.root_run_id IS 'First run of the lineage; replays and iterations share it';
-- A lineage's runs; the roots themselves, nearly all of the rows, need no entry.
CREATE INDEX runs_lineage_idx ON fencepost.runs (root_run_id, tenant_id, run_id) WHERE root_run_id <> run_id;

-- Gapless per run: the sequence is drawn by updating the run's row, in the transaction that inserts the event.
CREATE TABLE fencepost.run_events (
    run_id        uuid        NOT NULL,
    tenant_id     text        COLLATE "C" NOT NULL,
    sequence      bigint      NOT NULL,
    type          text        NOT NULL,
    detail        jsonb       NOT NULL DEFAULT '{}',
    fencing_token bigint,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT run_events_pkey PRIMARY KEY (run_id, tenant_id, sequence),
    CONSTRAINT run_events_run_fkey FOREIGN KEY (run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT run_events_type_check CHECK (
        sequence > 0
        AND (type IN ('run_queued', 'run_completed', 'run_failed', 'run_cancelled', 'run_cancel_requested')
             OR type ~ '^workflow\.[a-z0-9_.]{1,100}$'))
) WITH (autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000);
-- A run ends once: a second terminal event fails the statement that would write it, whatever that statement believed.
CREATE UNIQUE INDEX run_events_terminal_key ON fencepost.run_events (run_id, tenant_id)
    WHERE type IN ('run_completed', 'run_failed', 'run_cancelled');

CREATE TABLE fencepost.jobs (
    run_id              uuid        NOT NULL,
    tenant_id           text        COLLATE "C" NOT NULL,
    workflow            text        NOT NULL,
    state               text        NOT NULL DEFAULT 'queued',
    available_at        timestamptz NOT NULL,
    lease_owner         text,
    lease_expires_at    timestamptz,
    lease_renewed_at    timestamptz,
    lease_generation    bigint      NOT NULL DEFAULT 0,
    attempt_deadline_at timestamptz,
    attempts            integer     NOT NULL DEFAULT 0,
    max_attempts        integer     NOT NULL,
    deadline_at         timestamptz,
    retry_delay         interval,
    cost_used           numeric     NOT NULL DEFAULT 0,
    cost_limit          numeric,
    cancel_requested_at timestamptz,
    finished_at         timestamptz,
    dead_reason         text,
    last_error_code     text,
    checkpoint          bytea,
    CONSTRAINT jobs_pkey PRIMARY KEY (run_id, tenant_id),
    CONSTRAINT jobs_run_fkey FOREIGN KEY (run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT jobs_state_check CHECK (
        state IN ('queued', 'leased', 'completed', 'dead', 'cancelled')
        AND (state = 'leased') = (lease_owner IS NOT NULL)
        AND (state = 'leased') = (lease_expires_at IS NOT NULL)
        AND (attempt_deadline_at IS NULL OR state = 'leased')
        AND (finished_at IS NOT NULL) = (state IN ('completed', 'dead', 'cancelled'))
        AND (dead_reason IS NOT NULL) = (state = 'dead')
        AND (cancel_requested_at IS NULL OR state IN ('leased', 'cancelled'))
        AND max_attempts > 0 AND attempts BETWEEN 0 AND max_attempts AND attempts <= lease_generation
        AND cost_used >= 0)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 5000);
COMMENT ON COLUMN fencepost.jobs.lease_generation IS '+1 at every claim, never reset: the fence of every write made under the lease';
COMMENT ON COLUMN fencepost.jobs.attempts IS 'Claims that count against max_attempts; a release gives one back';
COMMENT ON COLUMN fencepost.jobs.dead_reason IS 'Why no further attempt is made';
-- Oldest first, and round the tenants when there is a crowd. Finished jobs are in neither.
CREATE INDEX jobs_queued_idx ON fencepost.jobs (workflow, available_at, run_id) WHERE state = 'queued';
CREATE INDEX jobs_tenant_idx ON fencepost.jobs (workflow, tenant_id, available_at, run_id) WHERE state = 'queued';
CREATE INDEX jobs_leased_idx ON fencepost.jobs (lease_expires_at, run_id) WHERE state = 'leased';
CREATE INDEX jobs_dead_idx ON fencepost.jobs (finished_at) WHERE state = 'dead';
CREATE INDEX jobs_deadline_idx ON fencepost.jobs (deadline_at) WHERE state = 'queued' AND deadline_at IS NOT NULL;

CREATE TABLE fencepost.job_attempts (
    run_id        uuid        NOT NULL,
    tenant_id     text        COLLATE "C" NOT NULL,
    generation    bigint      NOT NULL,
    number        integer     NOT NULL,
    worker        text        NOT NULL,
    claimed_at    timestamptz NOT NULL,
    started_at    timestamptz,
    renewed_at    timestamptz,
    finished_at   timestamptz,
    outcome       text,
    error_class   text,
    error_code    text,
    decision      text,
    retry_delay   interval,
    cost          numeric,
    usage         jsonb,
    traceparent   text,
    CONSTRAINT job_attempts_pkey PRIMARY KEY (run_id, tenant_id, generation),
    CONSTRAINT job_attempts_job_fkey FOREIGN KEY (run_id, tenant_id) REFERENCES fencepost.jobs ON DELETE CASCADE,
    CONSTRAINT job_attempts_outcome_check CHECK (
        (finished_at IS NULL) = (outcome IS NULL)
        AND (outcome IS NULL OR outcome IN ('completed', 'failed', 'cancelled', 'released', 'lost'))
        AND (decision IS NULL OR decision IN ('retry', 'dead')) AND (outcome = 'failed' OR error_code IS NULL OR outcome = 'lost')
        AND number > 0 AND generation > 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000);
COMMENT ON TABLE fencepost.job_attempts IS 'Every claimed execution, none overwritten by the next';
COMMENT ON COLUMN fencepost.job_attempts.traceparent IS 'The trace that accepted the run, which a handler goes on with';

-- key_hash is an HMAC over scope and key, fingerprint one over the request: neither can be guessed from a copy of the table.
-- A tombstone (run_id null) says that the key was used, and nothing else.
CREATE TABLE fencepost.idempotency_keys (
    key_hash            bytea       NOT NULL,
    key_version         smallint    NOT NULL,
    tenant_id           text        COLLATE "C" NOT NULL,
    run_id              uuid,
    fingerprint         bytea,
    fingerprint_profile smallint,
    schema_version      integer,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at          timestamptz NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (key_hash, key_version, tenant_id),
    CONSTRAINT idempotency_keys_run_fkey FOREIGN KEY (run_id, tenant_id) REFERENCES fencepost.runs,
    CONSTRAINT idempotency_keys_check CHECK (
        octet_length(key_hash) = 32 AND key_version > 0
        AND (run_id IS NULL) = (fingerprint IS NULL) AND (run_id IS NULL) = (fingerprint_profile IS NULL)
        AND (run_id IS NULL) = (schema_version IS NULL) AND (fingerprint IS NULL OR octet_length(fingerprint) = 32))
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 20000);
CREATE INDEX idempotency_keys_run_idx ON fencepost.idempotency_keys (run_id, tenant_id) WHERE run_id IS NOT NULL;
CREATE INDEX idempotency_keys_expiry_idx ON fencepost.idempotency_keys (expires_at) WHERE run_id IS NOT NULL;

-- Keyed by the run that was replayed: a dead run is run anew once, and the next replay starts from that new run.
CREATE TABLE fencepost.job_replays (
    run_id      uuid        NOT NULL,
    tenant_id   text        COLLATE "C" NOT NULL,
    new_run_id  uuid        NOT NULL,
    actor       text        NOT NULL,
    reason      text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT job_replays_pkey PRIMARY KEY (run_id, tenant_id),
    CONSTRAINT job_replays_run_fkey FOREIGN KEY (run_id, tenant_id) REFERENCES fencepost.runs,
    CONSTRAINT job_replays_new_run_fkey FOREIGN KEY (new_run_id, tenant_id) REFERENCES fencepost.runs
);

-- Every run event is also an outbox row, by whatever statement it was written: the topic tells the life of every run.
-- A statement's events in one INSERT, in the order of their sequences; the run's row is locked by whoever drew those.
CREATE FUNCTION fencepost.publish_run_events() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    written_lanes smallint[];
    rung smallint;
BEGIN
    PERFORM pg_current_xact_id();  -- before the ids, so that a transaction which holds an id is one that snapshots know
    WITH written AS (
        INSERT INTO fencepost.outbox AS o (id, lane, topic, event_type, key, payload, content_type, tenant_id, run_id,
                                           fencing_token, traceparent, record_bytes)
        SELECT nextval('fencepost.outbox_id_seq'), fencepost.lane_of(e.key), e.topic, 'fencepost.' || e.type, e.key, e.payload,
               'application/json', e.tenant_id, e.run_id::text, e.fencing_token, e.traceparent,
               fencepost.record_bytes(e.key, e.payload, NULL, NULL)
        FROM (
            SELECT a.type, a.tenant_id, a.run_id, a.fencing_token, r.topic, r.traceparent,
                   convert_to(a.run_id::text, 'UTF8') AS key,
                   convert_to((a.detail || jsonb_build_object(
                       'run_id', a.run_id, 'tenant_id', a.tenant_id, 'sequence', a.sequence, 'type', a.type,
                       'workflow', r.workflow, 'workflow_version', r.workflow_version, 'state', r.state,
                       'occurred_at', a.created_at))::text, 'UTF8') AS payload
            FROM added AS a JOIN fencepost.runs AS r ON r.run_id = a.run_id AND r.tenant_id = a.tenant_id
            ORDER BY a.run_id, a.sequence
        ) AS e
        RETURNING o.lane
    )
    SELECT array_agg(DISTINCT lane) INTO written_lanes FROM written;
    FOREACH rung IN ARRAY coalesce(written_lanes, '{}') LOOP
        PERFORM fencepost.ring(rung);
    END LOOP;
    RETURN NULL;
END
$$;
CREATE TRIGGER publish AFTER INSERT ON fencepost.run_events REFERENCING NEW TABLE AS added
FOR EACH STATEMENT EXECUTE FUNCTION fencepost.publish_run_events();
REVOKE ALL ON FUNCTION fencepost.publish_run_events FROM PUBLIC;

-- The bell of idle workers, as the relay's: the value is the Unix millisecond until which someone sleeps and wants to be rung.
CREATE SEQUENCE fencepost.doorbell_jobs AS bigint MINVALUE 1 CACHE 1;
SELECT setval('fencepost.doorbell_jobs', 1);

CREATE FUNCTION fencepost.ring_workers() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    armed_until bigint := pg_sequence_last_value('fencepost.doorbell_jobs'::regclass);
BEGIN
    IF armed_until > 1 AND armed_until > extract(epoch FROM clock_timestamp()) * 1000 THEN
        PERFORM pg_notify('fencepost_jobs', '');
    END IF;
END
$$;
REVOKE ALL ON FUNCTION fencepost.ring_workers FROM PUBLIC;
