-- Durable routes: the lineage that a key stands for, what its client is told of it, and the chunks that it streams.
--
-- Lock order as in 0007: a job's row, then run rows, then what hangs below. A lineage's root row is locked FOR SHARE by whoever
-- adds a run to the lineage, so that an erasure, which locks it FOR UPDATE, misses none.

ALTER TABLE fencepost.runs
    ADD COLUMN failure bytea,
    ADD COLUMN erased_at timestamptz,
    DROP CONSTRAINT runs_state_check,
    ADD CONSTRAINT runs_state_check CHECK (
        state IN ('queued', 'running', 'completed', 'failed', 'cancelled', 'continued')
        AND (finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled', 'continued'))
        AND (error_code IS NOT NULL) = (state = 'failed')
        AND (output IS NULL OR state = 'completed') AND (failure IS NULL OR state = 'failed')
        AND (started_at IS NOT NULL OR state IN ('queued', 'failed', 'cancelled'))
        AND (erased_at IS NULL OR finished_at IS NOT NULL AND output IS NULL AND failure IS NULL AND octet_length(input) = 0));
COMMENT ON COLUMN fencepost.runs.failure IS 'What a client may know of a failure: JSON of type, details and status';
COMMENT ON COLUMN fencepost.runs.erased_at IS 'Since when nothing of the payloads is left; set on every run of the lineage at once';

ALTER TABLE fencepost.run_events
    DROP CONSTRAINT run_events_type_check,
    ADD CONSTRAINT run_events_type_check CHECK (
        sequence > 0
        AND (type IN ('run_queued', 'run_completed', 'run_failed', 'run_cancelled', 'run_continued', 'run_cancel_requested')
             OR type ~ '^workflow\.[a-z0-9_.]{1,100}$'));
DROP INDEX fencepost.run_events_terminal_key;
CREATE UNIQUE INDEX run_events_terminal_key ON fencepost.run_events (run_id, tenant_id)
    WHERE type IN ('run_completed', 'run_failed', 'run_cancelled', 'run_continued');

-- Where an erasure finds the copies that were published of what an author told in an event, and of dead letters: the outbox has no
-- index by run, and these rows are few.
ALTER TABLE fencepost.run_events ADD COLUMN outbox_id bigint;
COMMENT ON COLUMN fencepost.run_events.outbox_id IS 'The outbox row of an event whose detail is its author''s';
ALTER TABLE fencepost.dead_letters ADD COLUMN outbox_id bigint;
COMMENT ON COLUMN fencepost.dead_letters.outbox_id IS 'The outbox row that publishes it; null if none does';
-- The run that a message belongs to, by its headers; null where they name none.
CREATE FUNCTION fencepost.run_of_headers(header_names bytea[], header_values bytea[]) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    named text := encode(header_values[array_position(header_names, 'ce_runid'::bytea)], 'escape');
BEGIN
    RETURN CASE WHEN named ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$' THEN named::uuid END;
END
$$;
REVOKE ALL ON FUNCTION fencepost.run_of_headers FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.run_of_headers TO fencepost_consumer;
CREATE INDEX dead_letters_run_idx ON fencepost.dead_letters (fencepost.run_of_headers(header_names, header_values))
    WHERE fencepost.run_of_headers(header_names, header_values) IS NOT NULL;
ALTER TABLE fencepost.idempotency_keys ADD COLUMN erased boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN fencepost.idempotency_keys.erased IS 'Of a tombstone: the run was erased, and not only past its retention';

-- As in 0007, and an event of the author's learns where its outbox row is. Such events are appended one at a time.
CREATE OR REPLACE FUNCTION fencepost.publish_run_events() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    written_lanes smallint[];
    rung smallint;
    told bigint;
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
        RETURNING o.lane, o.id, o.event_type
    )
    SELECT array_agg(DISTINCT lane), max(id) FILTER (WHERE event_type LIKE 'fencepost.workflow.%')
    INTO written_lanes, told FROM written;
    IF told IS NOT NULL THEN
        UPDATE fencepost.run_events AS e SET outbox_id = told FROM added AS a
        WHERE e.run_id = a.run_id AND e.tenant_id = a.tenant_id AND e.sequence = a.sequence;
    END IF;
    FOREACH rung IN ARRAY coalesce(written_lanes, '{}') LOOP
        PERFORM fencepost.ring(rung);
    END LOOP;
    RETURN NULL;
END
$$;

-- As in 0012, and the dead letter learns where its outbox row is. Of a message of an erased run only the fact is kept.
CREATE OR REPLACE FUNCTION fencepost.store_dead_letter(
    run_key text, tenant_id text, step text, holder text, consumer text,
    topic text, "partition" integer, "offset" bigint, recorded_at timestamptz, event_type text,
    key bytea, payload bytea, header_names bytea[], header_values bytea[],
    reason text, error_class text, error_code text, attempts integer,
    published_topic text, published_key bytea, published_payload bytea, published_names text[], published_values bytea[],
    content_type text, traceparent text
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    stored uuid;
    outbox_id bigint;
    rung smallint;
    is_erased boolean;
BEGIN
    -- Locked, so that an erasure comes before this, or finds what this has stored.
    SELECT r.erased_at IS NOT NULL INTO is_erased FROM fencepost.runs AS r
    WHERE r.run_id = fencepost.run_of_headers(header_names, header_values) AND r.tenant_id = tenant_id FOR SHARE;
    IF is_erased THEN
        key := NULL;
        payload := NULL;
        header_names := '{}';
        header_values := '{}';
        published_topic := NULL;
    END IF;
    INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, error_class, error_code,
                                   finished_at)
    VALUES (run_key, tenant_id, 0, step, 0, 'fencepost.message', 'failed', holder, error_class, error_code, clock_timestamp())
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO fencepost.dead_letters (run_key, tenant_id, step, consumer, topic, "partition", "offset", recorded_at, event_type, key,
                                        payload, header_names, header_values, reason, error_class, error_code, attempts)
    VALUES (run_key, tenant_id, step, consumer, topic, "partition", "offset", recorded_at, event_type, key,
            payload, header_names, header_values, reason, error_class, error_code, attempts)
    -- A row is left where the ledger has forgotten the message since: it is given up once more. Its age begins anew, or every redrive
    -- of it would be too old. redrives counts on, as generation does: it is how often operators have asked, and the audit tells of each.
    ON CONFLICT ON CONSTRAINT dead_letters_message_key DO UPDATE
    SET topic = excluded.topic, "partition" = excluded."partition", "offset" = excluded."offset", recorded_at = excluded.recorded_at,
        event_type = excluded.event_type, key = excluded.key, payload = excluded.payload, header_names = excluded.header_names,
        header_values = excluded.header_values, reason = excluded.reason, error_class = excluded.error_class,
        error_code = excluded.error_code, attempts = excluded.attempts, state = 'dead', holder = NULL, held_until = NULL,
        created_at = clock_timestamp(), changed_at = clock_timestamp()
    RETURNING dead_letter_id INTO stored;
    IF published_topic IS NOT NULL THEN
        PERFORM pg_current_xact_id();  -- before the id, as in enqueue
        outbox_id := nextval('fencepost.outbox_id_seq');
        rung := coalesce(fencepost.lane_of(published_key), outbox_id % fencepost.lane_count());
        INSERT INTO fencepost.outbox (id, lane, topic, event_type, key, payload, header_names, header_values, content_type, tenant_id,
                                      traceparent, record_bytes)
        VALUES (outbox_id, rung, published_topic, 'fencepost.message_dead_lettered', published_key, published_payload, published_names,
                published_values, content_type, nullif(tenant_id, ''), traceparent,
                fencepost.record_bytes(published_key, published_payload, published_names, published_values));
        UPDATE fencepost.dead_letters AS d SET outbox_id = outbox_id WHERE d.dead_letter_id = stored;
        PERFORM fencepost.ring(rung);
    END IF;
    RETURN stored;
END
$$;

-- One row a key of a durable route. newest_run_id: replays and continue-as-new move it, in the transaction that adds the run.
CREATE TABLE fencepost.lineages (
    root_run_id       uuid        NOT NULL,
    tenant_id         text        COLLATE "C" NOT NULL,
    monitor_id        uuid        NOT NULL,
    route             text        NOT NULL,
    principal_hash    bytea       NOT NULL,
    principal_version smallint    NOT NULL,
    newest_run_id     uuid        NOT NULL,
    answer            bytea,
    answer_run_id     uuid,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT lineages_pkey PRIMARY KEY (root_run_id, tenant_id),
    CONSTRAINT lineages_monitor_key UNIQUE (monitor_id),
    CONSTRAINT lineages_run_fkey FOREIGN KEY (root_run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT lineages_check CHECK (
        octet_length(principal_hash) = 32 AND principal_version > 0 AND octet_length(route) BETWEEN 1 AND 300
        AND (answer IS NULL OR answer_run_id IS NOT NULL) AND coalesce(octet_length(answer), 0) <= 4000000)
) WITH (fillfactor = 80);
COMMENT ON COLUMN fencepost.lineages.monitor_id IS 'What a client names the operation by: random, and no permission by itself';
COMMENT ON COLUMN fencepost.lineages.principal_hash IS 'HMAC of tenant and principal: who may read it';
COMMENT ON COLUMN fencepost.lineages.answer IS 'The answer as a route shaped it once, of run answer_run_id';

-- Which stream attempt a lineage is at: what a reader has to clear, not the job's attempt. A row from the first chunk on.
CREATE TABLE fencepost.streams (
    root_run_id   uuid        NOT NULL,
    tenant_id     text        COLLATE "C" NOT NULL,
    attempt       integer     NOT NULL DEFAULT 0,
    first_attempt integer     NOT NULL DEFAULT 0,
    iteration     integer     NOT NULL,
    kept_since    timestamptz DEFAULT clock_timestamp(),
    CONSTRAINT streams_pkey PRIMARY KEY (root_run_id, tenant_id),
    CONSTRAINT streams_run_fkey FOREIGN KEY (root_run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT streams_check CHECK (first_attempt >= 0 AND attempt >= first_attempt AND iteration >= 0)
) WITH (fillfactor = 50);
COMMENT ON COLUMN fencepost.streams.first_attempt IS 'The first attempt of the iteration: no earlier one has chunks that may be carried over';
COMMENT ON COLUMN fencepost.streams.kept_since IS 'No chunk is older, or when it was looked at last by forget_chunks; null: all were deleted';
CREATE INDEX streams_kept_idx ON fencepost.streams (kept_since) WHERE kept_since IS NOT NULL;

-- "offset" has no gaps within an attempt: one holder of the run's lease gives it, and a repeated write changes nothing. Data is null
-- at the greatest offset: the stream was cut there. step is '' for what is never carried over to a later attempt: what the workflow
-- published outside of its steps, and what was left behind of a step that had not ended. No foreign key: checking it took a third of
-- the time of storing a chunk. They are stored by who holds a job of the lineage, and the trigger below deletes them with their stream.
CREATE TABLE fencepost.chunks (
    root_run_id uuid        NOT NULL,
    tenant_id   text        COLLATE "C" NOT NULL,
    attempt     integer     NOT NULL,
    "offset"    bigint      NOT NULL,
    iteration   integer     NOT NULL,
    step        text        COLLATE "C" NOT NULL,
    occurrence  integer     NOT NULL,
    data        bytea,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT chunks_pkey PRIMARY KEY (root_run_id, tenant_id, attempt, "offset"),
    CONSTRAINT chunks_check CHECK (
        attempt >= 0 AND "offset" >= 0 AND occurrence >= 0 AND (data IS NULL) = ("offset" = 9223372036854775807)
        AND coalesce(octet_length(data), 0) <= 100000)
) WITH (autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000);
CREATE FUNCTION fencepost.delete_chunks() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM fencepost.chunks AS c USING deleted AS d WHERE c.root_run_id = d.root_run_id AND c.tenant_id = d.tenant_id;
    RETURN NULL;
END
$$;
CREATE TRIGGER delete_chunks AFTER DELETE ON fencepost.streams REFERENCING OLD TABLE AS deleted
FOR EACH STATEMENT EXECUTE FUNCTION fencepost.delete_chunks();
REVOKE ALL ON FUNCTION fencepost.delete_chunks FROM PUBLIC;

-- The bell of whoever waits for lineages, as the workers': rung after the commit, in a statement of its own, for many at once. A
-- NOTIFY within a transaction takes a lock of the whole database at its commit.
CREATE SEQUENCE fencepost.doorbell_lineages AS bigint MINVALUE 1 CACHE 1;
SELECT setval('fencepost.doorbell_lineages', 1);

CREATE FUNCTION fencepost.ring_lineages(root_run_ids uuid[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    armed_until bigint := pg_sequence_last_value('fencepost.doorbell_lineages'::regclass);
    place integer;
BEGIN
    IF armed_until > 1 AND armed_until > extract(epoch FROM clock_timestamp()) * 1000 THEN
        FOR place IN 1 .. cardinality(root_run_ids) BY 200 LOOP  -- a payload has room for 7,999 bytes
            PERFORM pg_notify('fencepost_lineages', array_to_string(root_run_ids[place : place + 199], ','));
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.ring_lineages IS 'Tells whoever waits that these lineages have news; call it after the commit';

CREATE FUNCTION fencepost.arm_lineages(milliseconds integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM setval('fencepost.doorbell_lineages', greatest(
        coalesce(pg_sequence_last_value('fencepost.doorbell_lineages'::regclass), 1),
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint + least(greatest(milliseconds, 0), 600000)));
END
$$;
COMMENT ON FUNCTION fencepost.arm_lineages IS 'From now until so many milliseconds ahead, whoever changes a lineage rings';

-- Chunks that are shown and not stored. Sent only while somebody listens, who says so by its own bell.
CREATE SEQUENCE fencepost.doorbell_live AS bigint MINVALUE 1 CACHE 1;
SELECT setval('fencepost.doorbell_live', 1);

-- Sends each payload; false: nobody listens, and nothing was sent.
CREATE FUNCTION fencepost.send_live(payloads text[]) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    armed_until bigint := pg_sequence_last_value('fencepost.doorbell_live'::regclass);
    payload text;
BEGIN
    IF armed_until <= 1 OR armed_until <= extract(epoch FROM clock_timestamp()) * 1000 THEN
        RETURN false;
    END IF;
    FOREACH payload IN ARRAY payloads LOOP
        PERFORM pg_notify('fencepost_live', payload);
    END LOOP;
    RETURN true;
END
$$;
COMMENT ON FUNCTION fencepost.send_live IS 'Sends live chunks to whoever listens; call it outside of transactions';

CREATE FUNCTION fencepost.arm_live(milliseconds integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM setval('fencepost.doorbell_live', greatest(
        coalesce(pg_sequence_last_value('fencepost.doorbell_live'::regclass), 1),
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint + least(greatest(milliseconds, 0), 600000)));
END
$$;
COMMENT ON FUNCTION fencepost.arm_live IS 'From now until so many milliseconds ahead, live chunks are sent';

-- How lineages stand, by their place in the arrays; none for one that is not there. Output and failure come with the end only.
CREATE FUNCTION fencepost.read_lineages(root_run_ids uuid[], tenant_ids text[])
RETURNS TABLE (place integer, monitor_id uuid, run_id uuid, iteration integer, state text, parked boolean, dead_reason text,
               error_code text, output bytea, failure bytea, erased boolean, answer bytea, stream_attempt integer, last_offset bigint,
               data_key bytea)
LANGUAGE plpgsql STABLE ROWS 100 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT g.n::integer, l.monitor_id, r.run_id, r.iteration, r.state, j.state = 'queued' AND j.available_at >= timestamptz '9999-01-01',
           j.dead_reason, r.error_code, r.output, r.failure, r.erased_at IS NOT NULL,
           CASE WHEN l.answer_run_id = r.run_id THEN l.answer END, s.attempt, c."offset",
           (SELECT x.wrapped FROM fencepost.data_keys AS x WHERE x.root_run_id = g.root_run_id AND x.tenant_id = g.tenant_id)
    FROM unnest(read_lineages.root_run_ids, read_lineages.tenant_ids) WITH ORDINALITY AS g(root_run_id, tenant_id, n)
    CROSS JOIN LATERAL (
        SELECT x.* FROM fencepost.lineages AS x WHERE x.root_run_id = g.root_run_id AND x.tenant_id = g.tenant_id LIMIT 1) AS l
    CROSS JOIN LATERAL (
        SELECT x.* FROM fencepost.runs AS x WHERE x.run_id = l.newest_run_id AND x.tenant_id = g.tenant_id LIMIT 1) AS r
    CROSS JOIN LATERAL (
        SELECT x.* FROM fencepost.jobs AS x WHERE x.run_id = l.newest_run_id AND x.tenant_id = g.tenant_id LIMIT 1) AS j
    LEFT JOIN LATERAL (
        SELECT x.attempt FROM fencepost.streams AS x WHERE x.root_run_id = g.root_run_id AND x.tenant_id = g.tenant_id LIMIT 1) AS s ON true
    LEFT JOIN LATERAL (
        SELECT x."offset" FROM fencepost.chunks AS x
        WHERE x.root_run_id = g.root_run_id AND x.tenant_id = g.tenant_id AND x.attempt = s.attempt
        ORDER BY x."offset" DESC LIMIT 1) AS c ON true;
END
$$;
COMMENT ON FUNCTION fencepost.read_lineages IS 'How lineages of durable routes stand, many in one statement';

-- What a key of a durable route stands for.
--   new          nobody has used it. With `reserve` it is this transaction's until its end: nobody else starts anything under it.
--   in_progress  with `reserve`: another transaction has it. Nothing is held, the transaction stays usable.
--   expired      it was used and is past its retention.
--   erased       it was used, and what it had started was erased.
--   found        root_run_id and the stored fingerprint say for what; monitor_id is null if no durable route has started it.
CREATE FUNCTION fencepost.find_key(
    tenant_id text, key_versions smallint[], key_hashes bytea[], written integer, reserve boolean,
    OUT outcome text, OUT root_run_id uuid, OUT monitor_id uuid,
    OUT stored_key_version smallint, OUT stored_profile smallint, OUT stored_schema_version integer, OUT stored_fingerprint bytea
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    look integer;
    place integer;
    key record;
BEGIN
    FOR look IN 1 .. CASE WHEN reserve THEN 2 ELSE 1 END LOOP
        FOR place IN 1 .. cardinality(key_versions) LOOP
            SELECT k.*, k.run_id IS NULL OR k.expires_at <= clock_timestamp() AS expired INTO key
            FROM fencepost.idempotency_keys AS k
            WHERE k.key_hash = key_hashes[place] AND k.key_version = key_versions[place] AND k.tenant_id = tenant_id;
            IF FOUND THEN
                outcome := CASE WHEN key.erased THEN 'erased' WHEN key.expired THEN 'expired' ELSE 'found' END;
                IF NOT key.expired THEN
                    root_run_id := key.run_id;
                    stored_key_version := key.key_version;
                    stored_profile := key.fingerprint_profile;
                    stored_schema_version := key.schema_version;
                    stored_fingerprint := key.fingerprint;
                    SELECT l.monitor_id INTO monitor_id FROM fencepost.lineages AS l
                    WHERE l.root_run_id = root_run_id AND l.tenant_id = tenant_id;
                END IF;
                RETURN;
            END IF;
        END LOOP;
        IF look = 1 AND reserve THEN
            BEGIN  -- the same locks as accept's; a block of its own gives back those got before another one failed
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
    outcome := 'new';
END
$$;
COMMENT ON FUNCTION fencepost.find_key IS 'What a key of a durable route stands for; with reserve, keeps it for this transaction';

-- Gives a run that this transaction has accepted to a client: what it may name it by, and who may ask.
CREATE FUNCTION fencepost.start_lineage(
    tenant_id text, root_run_id uuid, monitor_id uuid, route text, principal_hash bytea, principal_version smallint
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO fencepost.lineages (root_run_id, tenant_id, monitor_id, route, principal_hash, principal_version, newest_run_id)
    VALUES ($2, $1, $3, $4, $5, $6, $2)
$$;
COMMENT ON FUNCTION fencepost.start_lineage IS 'Makes an accepted run the lineage of a durable route''s key';

-- Whose a monitor's id is. Nothing for an unknown one, and for another tenant's.
CREATE FUNCTION fencepost.find_monitor(
    tenant_id text, monitor_id uuid, OUT root_run_id uuid, OUT newest_run_id uuid, OUT route text, OUT principal_hash bytea,
    OUT principal_version smallint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
BEGIN
    SELECT l.root_run_id, l.newest_run_id, l.route, l.principal_hash, l.principal_version
    INTO root_run_id, newest_run_id, route, principal_hash, principal_version
    FROM fencepost.lineages AS l WHERE l.monitor_id = monitor_id AND l.tenant_id = tenant_id;
END
$$;
COMMENT ON FUNCTION fencepost.find_monitor IS 'The lineage behind a monitor''s id, and who may ask for it';

-- Keeps the answer that a route has shaped of run run_id's result, once: the first stands. What is kept comes back.
CREATE FUNCTION fencepost.keep_answer(tenant_id text, root_run_id uuid, run_id uuid, answer bytea) RETURNS bytea
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    kept bytea;
BEGIN
    UPDATE fencepost.lineages AS l SET answer = answer, answer_run_id = run_id
    WHERE l.root_run_id = root_run_id AND l.tenant_id = tenant_id AND l.newest_run_id = run_id
      AND l.answer_run_id IS DISTINCT FROM run_id
      AND NOT EXISTS (SELECT FROM fencepost.runs AS r
                      WHERE r.run_id = run_id AND r.tenant_id = tenant_id AND r.erased_at IS NOT NULL);
    SELECT l.answer INTO kept FROM fencepost.lineages AS l
    WHERE l.root_run_id = root_run_id AND l.tenant_id = tenant_id AND l.answer_run_id = run_id;
    RETURN kept;
END
$$;
COMMENT ON FUNCTION fencepost.keep_answer IS 'Keeps the answer that a route shaped of a result; the first stands';

-- Chunks behind a place each: lineage, attempt and offset that a reader has seen last (attempt 0, offset -1: none). `most` of them,
-- or fewer: the one that brings their data to `most_bytes` is the last.
CREATE FUNCTION fencepost.read_chunks(
    root_run_ids uuid[], tenant_ids text[], attempts integer[], offsets bigint[], most integer, most_bytes bigint
)
RETURNS TABLE (place integer, attempt integer, "offset" bigint, step text, occurrence integer, data bytea)
LANGUAGE plpgsql STABLE ROWS 1000 SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT g.n::integer, c.attempt, c."offset", c.step, c.occurrence, c.data
    FROM unnest(read_chunks.root_run_ids, read_chunks.tenant_ids, read_chunks.attempts, read_chunks.offsets)
        WITH ORDINALITY AS g(root_run_id, tenant_id, attempt, "offset", n)
    CROSS JOIN LATERAL (
        SELECT y.*, coalesce(sum(octet_length(y.data)) OVER (
            ORDER BY y.attempt, y."offset" ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS bytes_before
        FROM (
            SELECT x.attempt, x."offset", x.step, x.occurrence, x.data FROM fencepost.chunks AS x
            WHERE x.root_run_id = g.root_run_id AND x.tenant_id = g.tenant_id AND (x.attempt, x."offset") > (g.attempt, g."offset")
            ORDER BY x.attempt, x."offset" LIMIT read_chunks.most
        ) AS y
    ) AS c
    WHERE c.bytes_before < read_chunks.most_bytes
    ORDER BY g.n, c.attempt, c."offset";
END
$$;
COMMENT ON FUNCTION fencepost.read_chunks IS 'Chunks of streams behind a place each, many streams in one statement';

-- Deletes up to `most` chunks of lineages that ended longer ago than `age`, and of living ones what is as old and belongs to an earlier
-- iteration. In order, so that a reader whose next chunk is gone sees that it is. How many; 0: there is nothing more to do now.
-- A stream that must stay is looked at again an hour later, so those that live long are not in the way of the others.
CREATE FUNCTION fencepost.forget_chunks(age interval, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
    look_again_after CONSTANT interval := '1 hour';
    old_before CONSTANT timestamptz := clock_timestamp() - age;
    stream fencepost.streams;
    is_over boolean;
    deleted integer;
    forgotten integer := 0;
BEGIN
    FOR stream IN
        SELECT s.* FROM fencepost.streams AS s WHERE s.kept_since < old_before
        ORDER BY s.kept_since LIMIT most FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        SELECT count(*) = 0 INTO is_over FROM (
            SELECT FROM fencepost.runs AS r
            WHERE r.run_id = stream.root_run_id AND r.tenant_id = stream.tenant_id AND (r.finished_at < old_before) IS NOT TRUE
            UNION ALL
            SELECT FROM fencepost.runs AS r
            WHERE r.root_run_id = stream.root_run_id AND r.tenant_id = stream.tenant_id AND r.root_run_id <> r.run_id
              AND (r.finished_at < old_before) IS NOT TRUE
            LIMIT 1
        ) AS young;
        DELETE FROM fencepost.chunks AS d WHERE d.ctid = ANY (ARRAY(
            SELECT c.ctid FROM fencepost.chunks AS c
            WHERE c.root_run_id = stream.root_run_id AND c.tenant_id = stream.tenant_id
              AND c.attempt < CASE WHEN is_over THEN stream.attempt + 1 ELSE stream.first_attempt END
              AND (is_over OR c.created_at < old_before)
            ORDER BY c.attempt, c."offset" LIMIT most - forgotten));
        GET DIAGNOSTICS deleted = ROW_COUNT;
        forgotten := forgotten + deleted;
        EXIT WHEN forgotten >= most;  -- this stream may have more
        UPDATE fencepost.streams AS s SET kept_since = CASE WHEN NOT is_over THEN old_before + look_again_after END
        WHERE s.root_run_id = stream.root_run_id AND s.tenant_id = stream.tenant_id;
    END LOOP;
    RETURN forgotten;
END
$$;
COMMENT ON FUNCTION fencepost.forget_chunks IS 'Deletes chunks of streams whose lineage ended longer ago than an age';

-- Ends a held run by starting the next one of its lineage (continue-as-new): the job's row is the fence. The new run's id, or null
-- where the lease is lost, the run is to be cancelled, or the lineage was erased.
CREATE FUNCTION fencepost.continue_run(
    owner text, tenant_id text, run_id uuid, generation bigint, new_run_id uuid, workflow text, workflow_version integer, input bytea,
    max_attempts integer, deadline interval, started_after interval, cost numeric, usage jsonb
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    job fencepost.jobs;
    run fencepost.runs;
    refused text;
BEGIN
    SELECT * INTO job FROM fencepost.jobs AS j
    WHERE j.run_id = run_id AND j.tenant_id = tenant_id AND j.lease_owner = owner AND j.lease_generation = generation FOR UPDATE;
    IF job.run_id IS NULL OR job.lease_expires_at <= clock_timestamp() OR job.cancel_requested_at IS NOT NULL THEN
        RETURN NULL;
    END IF;
    SELECT * INTO run FROM fencepost.runs AS r WHERE r.run_id = run_id AND r.tenant_id = tenant_id FOR UPDATE;
    PERFORM FROM fencepost.runs AS r
    WHERE r.run_id = run.root_run_id AND r.tenant_id = tenant_id AND r.erased_at IS NULL FOR SHARE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    refused := fencepost.command_refusal(tenant_id, new_run_id, workflow, workflow_version, run.topic, input, interval '0',
                                         max_attempts, deadline, job.cost_limit, run.traceparent);
    IF refused IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = 'fencepost: ' || refused;
    END IF;
    UPDATE fencepost.jobs AS j
    SET state = 'completed', finished_at = clock_timestamp(), lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL,
        cost_used = j.cost_used + coalesce(cost, 0)
    WHERE j.run_id = run_id AND j.tenant_id = tenant_id;
    UPDATE fencepost.job_attempts AS a
    SET started_at = least(a.claimed_at + started_after, clock_timestamp()), renewed_at = job.lease_renewed_at,
        finished_at = clock_timestamp(), outcome = 'completed', cost = cost, usage = usage
    WHERE a.run_id = run_id AND a.tenant_id = tenant_id AND a.generation = generation;
    UPDATE fencepost.runs AS r SET state = 'continued', version = r.version + 1, finished_at = clock_timestamp()
    WHERE r.run_id = run_id AND r.tenant_id = tenant_id;
    PERFORM fencepost.append_run_event(tenant_id, run_id, 'run_continued', jsonb_build_object('continued_as', new_run_id), generation);
    PERFORM fencepost.start_run(tenant_id, new_run_id, workflow, workflow_version, run.topic, input, interval '0', max_attempts,
                                deadline, job.cost_limit, run.traceparent, run.root_run_id, NULL);
    UPDATE fencepost.runs AS r SET iteration = run.iteration + 1 WHERE r.run_id = new_run_id AND r.tenant_id = tenant_id;
    UPDATE fencepost.lineages AS l SET newest_run_id = new_run_id
    WHERE l.root_run_id = run.root_run_id AND l.tenant_id = tenant_id;
    RETURN new_run_id;
END
$$;
COMMENT ON FUNCTION fencepost.continue_run IS 'Ends a held run by starting the next one of its lineage';

-- As in 0009, and what is new is the lineage: it points to the newest run, and an erased one is not run anew (outcome `erased`).
CREATE OR REPLACE FUNCTION fencepost.replay_run(
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
    SELECT r.created_at INTO lineage_at FROM fencepost.runs AS r
    WHERE r.run_id = dead_run.root_run_id AND r.tenant_id = tenant_id AND r.erased_at IS NULL FOR SHARE;
    outcome := CASE
        WHEN dead_run.run_id IS NULL OR dead_job.run_id IS NULL THEN 'not_found'
        WHEN new_run_id IS NOT NULL THEN 'already_replayed'
        WHEN dead_run.erased_at IS NOT NULL THEN 'erased'
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
    UPDATE fencepost.runs AS r SET iteration = dead_run.iteration
    WHERE r.run_id = new_id AND r.tenant_id = tenant_id AND dead_run.iteration > 0;
    UPDATE fencepost.lineages AS l SET newest_run_id = new_id
    WHERE l.root_run_id = dead_run.root_run_id AND l.tenant_id = tenant_id AND l.newest_run_id = run_id;
    INSERT INTO fencepost.job_replays (run_id, tenant_id, new_run_id, actor, reason)
    VALUES (run_id, tenant_id, new_id, actor, reason);
    INSERT INTO fencepost.audit (actor, command, reason, detail)
    VALUES (actor, 'runs replay', reason, jsonb_build_object('tenant_id', tenant_id, 'run_id', run_id, 'new_run_id', new_id,
                                                            'replays_before', replays, 'replays_after', replays + 1));
    new_run_id := new_id;
    replays := replays + 1;
END
$$;

-- Lets a parked run go on: one whose workflow had changed under it. A person has looked.
--   resumed · not_parked · not_found
CREATE FUNCTION fencepost.resume_run(tenant_id text, run_id uuid, actor text, reason text, OUT outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    job fencepost.jobs;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    SELECT * INTO job FROM fencepost.jobs AS j WHERE j.run_id = run_id AND j.tenant_id = tenant_id FOR UPDATE;
    outcome := CASE
        WHEN job.run_id IS NULL THEN 'not_found'
        WHEN job.state <> 'queued' OR job.available_at < timestamptz '9999-01-01' THEN 'not_parked'
        ELSE 'resumed'
    END;
    IF outcome = 'resumed' THEN
        UPDATE fencepost.jobs AS j SET available_at = clock_timestamp() WHERE j.run_id = run_id AND j.tenant_id = tenant_id;
        INSERT INTO fencepost.audit (actor, command, reason, detail)
        VALUES (actor, 'runs resume', reason, jsonb_build_object('tenant_id', tenant_id, 'run_id', run_id));
        PERFORM fencepost.ring_workers();
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.resume_run IS 'Lets a parked run go on; audited';

-- The runs of a lineage, its first run first.
CREATE FUNCTION fencepost.runs_of_lineage(tenant_id text, root_run_id uuid) RETURNS uuid[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
BEGIN
    RETURN root_run_id || ARRAY(
        SELECT r.run_id FROM fencepost.runs AS r
        WHERE r.root_run_id = root_run_id AND r.tenant_id = tenant_id AND r.root_run_id <> r.run_id ORDER BY r.run_id);
END
$$;

-- Of messages of a run that were given up only the fact is left. The published copy has no key any more, and stays in its lane.
CREATE FUNCTION fencepost.erase_dead_letters(tenant_id text, run_id uuid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    lanes CONSTANT smallint[] := ARRAY(SELECT generate_series(0, fencepost.lane_count() - 1)::smallint);
    published bigint;
    kept_names text[];
    kept_values bytea[];
BEGIN
    FOR published IN
        UPDATE fencepost.dead_letters AS d
        SET key = NULL, payload = NULL, header_names = '{}', header_values = '{}', generation = d.generation + 1,
            state = CASE WHEN d.state = 'redriven' THEN d.state ELSE 'discarded' END, holder = NULL, held_until = NULL,
            changed_at = clock_timestamp()
        WHERE fencepost.run_of_headers(d.header_names, d.header_values) = run_id AND d.tenant_id = tenant_id
        RETURNING d.outbox_id
    LOOP
        SELECT array_agg(h.name), array_agg(h.value) INTO kept_names, kept_values
        FROM fencepost.outbox AS o CROSS JOIN LATERAL unnest(o.header_names, o.header_values) AS h(name, value)
        WHERE o.lane = ANY (lanes) AND o.id = published AND h.name NOT LIKE 'original-%';
        UPDATE fencepost.outbox AS o
        SET key = NULL, payload = '', header_names = kept_names, header_values = kept_values,
            record_bytes = fencepost.record_bytes(NULL, '', kept_names, kept_values)
        WHERE o.lane = ANY (lanes) AND o.id = published;
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION fencepost.runs_of_lineage, fencepost.erase_dead_letters FROM PUBLIC;

-- Erases a lineage by any of its runs: live runs end as cancelled, and of inputs, results, failures, chunks, checkpoints, details of
-- events, effects' results, dead letters and answers nothing is left, nor of what waits to be published of them. Its data key (0014) is
-- deleted, and with it every copy of what the key has made. Keys of clients become tombstones.
-- Identities, times, codes and the story's types stay.
--   erased · already_erased · not_found
-- Whoever holds one of the lineage's rows is waited for; should the two deadlock, ask again. A write that was under way finds the
-- lease gone, or the effect's generation, or the place of the answer taken.
CREATE FUNCTION fencepost.erase_lineage(tenant_id text, run_id uuid, actor text, reason text, OUT outcome text, OUT runs integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    root uuid;
    members uuid[];
    member uuid;
    was_live boolean;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation',
            MESSAGE = 'fencepost: isolation: must be read committed, an older snapshot would miss copies; begin such a transaction';
    END IF;
    SELECT r.root_run_id INTO root FROM fencepost.runs AS r WHERE r.run_id = run_id AND r.tenant_id = tenant_id;
    runs := 0;
    outcome := 'not_found';
    IF root IS NULL THEN
        RETURN;
    END IF;
    PERFORM FROM fencepost.jobs AS j
    WHERE j.tenant_id = tenant_id AND j.run_id = ANY (fencepost.runs_of_lineage(tenant_id, root)) ORDER BY j.run_id FOR UPDATE;
    PERFORM FROM fencepost.runs AS r WHERE r.run_id = root AND r.tenant_id = tenant_id AND r.erased_at IS NULL FOR UPDATE;
    outcome := 'already_erased';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- From here on nobody adds a run to the lineage. One that was added since the first look is at work, and keeps what it says under the
    -- root's id: it must have ended before that is emptied.
    members := fencepost.runs_of_lineage(tenant_id, root);
    PERFORM FROM fencepost.jobs AS j WHERE j.tenant_id = tenant_id AND j.run_id = ANY (members) ORDER BY j.run_id FOR UPDATE;
    FOREACH member IN ARRAY members LOOP
        UPDATE fencepost.jobs AS j
        SET state = CASE WHEN j.finished_at IS NULL THEN 'cancelled' ELSE j.state END,
            cancel_requested_at = CASE WHEN j.finished_at IS NULL THEN coalesce(j.cancel_requested_at, clock_timestamp())
                                       ELSE j.cancel_requested_at END,
            finished_at = coalesce(j.finished_at, clock_timestamp()), checkpoint = NULL,
            lease_owner = NULL, lease_expires_at = NULL, attempt_deadline_at = NULL
        WHERE j.run_id = member AND j.tenant_id = tenant_id;
        UPDATE fencepost.job_attempts AS a SET finished_at = clock_timestamp(), outcome = 'lost', error_code = 'erased'
        WHERE a.run_id = member AND a.tenant_id = tenant_id AND a.finished_at IS NULL;
        SELECT r.finished_at IS NULL INTO was_live FROM fencepost.runs AS r
        WHERE r.run_id = member AND r.tenant_id = tenant_id FOR UPDATE;
        UPDATE fencepost.runs AS r
        SET erased_at = clock_timestamp(), input = '', output = NULL, failure = NULL,
            state = CASE WHEN was_live THEN 'cancelled' ELSE r.state END,
            version = r.version + was_live::integer, finished_at = coalesce(r.finished_at, clock_timestamp())
        WHERE r.run_id = member AND r.tenant_id = tenant_id;
        -- What Fencepost says of the event stays: that it was, of which run, and when.
        UPDATE fencepost.outbox AS o
        SET payload = n.payload, record_bytes = fencepost.record_bytes(o.key, n.payload, o.header_names, o.header_values)
        FROM fencepost.run_events AS e
        JOIN fencepost.outbox AS p ON p.lane = fencepost.lane_of(convert_to(member::text, 'UTF8')) AND p.id = e.outbox_id
        CROSS JOIN LATERAL (
            SELECT convert_to(jsonb_object_agg(m.name, m.value)::text, 'UTF8') AS payload
            FROM jsonb_each(convert_from(p.payload, 'UTF8')::jsonb) AS m(name, value)
            WHERE m.name IN ('run_id', 'tenant_id', 'sequence', 'type', 'workflow', 'workflow_version', 'state', 'occurred_at')) AS n
        WHERE e.run_id = member AND e.tenant_id = tenant_id AND e.outbox_id IS NOT NULL AND o.lane = p.lane AND o.id = p.id;
        UPDATE fencepost.run_events AS e SET detail = '{}'
        WHERE e.run_id = member AND e.tenant_id = tenant_id AND e.type LIKE 'workflow.%';
        IF was_live THEN
            PERFORM fencepost.append_run_event(tenant_id, member, 'run_cancelled', '{"decided_by": "erasure"}');
            PERFORM pg_notify('fencepost_cancelled', member::text);
        END IF;
        UPDATE fencepost.idempotency_keys AS k
        SET run_id = NULL, fingerprint = NULL, fingerprint_profile = NULL, schema_version = NULL, erased = true
        WHERE k.run_id = member AND k.tenant_id = tenant_id;
        UPDATE fencepost.effects AS e
        SET result = NULL, provider_reference = NULL, generation = e.generation + (e.finished_at IS NULL)::integer
        WHERE e.run_key = member::text AND e.tenant_id = tenant_id;
        PERFORM fencepost.erase_dead_letters(tenant_id, member);
        runs := runs + 1;
    END LOOP;
    DELETE FROM fencepost.chunks AS c WHERE c.root_run_id = root AND c.tenant_id = tenant_id;
    DELETE FROM fencepost.data_keys AS k WHERE k.root_run_id = root AND k.tenant_id = tenant_id;
    UPDATE fencepost.lineages AS l SET answer = NULL, answer_run_id = l.newest_run_id
    WHERE l.root_run_id = root AND l.tenant_id = tenant_id;
    INSERT INTO fencepost.audit (actor, command, reason, detail)
    VALUES (actor, 'lineages erase', reason, jsonb_build_object('tenant_id', tenant_id, 'run_id', root, 'runs', runs));
    PERFORM fencepost.ring_lineages(ARRAY[root]);
    outcome := 'erased';
END
$$;
COMMENT ON FUNCTION fencepost.erase_lineage IS 'Erases the payloads of a whole lineage; audited';

REVOKE ALL ON FUNCTION fencepost.send_live, fencepost.arm_live, fencepost.forget_chunks FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.send_live, fencepost.forget_chunks TO fencepost_consumer;
GRANT EXECUTE ON FUNCTION fencepost.arm_live TO fencepost_producer;
REVOKE ALL ON FUNCTION fencepost.ring_lineages, fencepost.arm_lineages, fencepost.read_lineages, fencepost.find_key,
    fencepost.start_lineage, fencepost.find_monitor, fencepost.keep_answer, fencepost.read_chunks, fencepost.continue_run,
    fencepost.resume_run, fencepost.erase_lineage FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.arm_lineages, fencepost.read_lineages, fencepost.find_key, fencepost.start_lineage,
    fencepost.find_monitor, fencepost.keep_answer, fencepost.read_chunks TO fencepost_producer;
GRANT EXECUTE ON FUNCTION fencepost.ring_lineages, fencepost.continue_run TO fencepost_consumer;
GRANT EXECUTE ON FUNCTION fencepost.resume_run, fencepost.erase_lineage TO fencepost_operator;
GRANT UPDATE (failure) ON fencepost.runs TO fencepost_consumer;
GRANT SELECT, INSERT ON fencepost.chunks TO fencepost_consumer;
GRANT UPDATE (step) ON fencepost.chunks TO fencepost_consumer;
GRANT SELECT, INSERT ON fencepost.streams TO fencepost_consumer;
GRANT UPDATE (attempt, first_attempt, iteration, kept_since) ON fencepost.streams TO fencepost_consumer;
GRANT SELECT ON fencepost.lineages TO fencepost_consumer;
GRANT SELECT ON fencepost.lineages, fencepost.streams TO fencepost_operator;
