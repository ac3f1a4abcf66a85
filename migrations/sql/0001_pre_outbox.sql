-- The outbox and what guards its door: written once in the caller's transaction, read by the relay, never updated.

CREATE SCHEMA IF NOT EXISTS fencepost;
COMMENT ON SCHEMA fencepost IS 'Fencepost: outbox, lanes, receipts. Services write only through fencepost.enqueue and fencepost.enqueue_many.';

-- CACHE 1: a session that kept ids in hand would commit low ids long after high ones were published, and make every
-- one of its rows late. Late rows are published all the same; they are just dearer.
CREATE SEQUENCE fencepost.outbox_id_seq AS bigint CACHE 1;

-- The lane of a key: the first two bytes of its SHA-256, modulo the number of lanes. SHA-256 is the same in every
-- version, encoding and platform of PostgreSQL (its own hash functions are not), and works under FIPS (md5 does not).
-- The number of lanes is a literal, so the planner folds it and an enqueue reads no configuration table.
CREATE FUNCTION fencepost.lane_count() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$ SELECT 8 $$;

CREATE FUNCTION fencepost.lane_of(key bytea) RETURNS smallint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$ SELECT ((get_byte(sha256(key), 0) * 256 + get_byte(sha256(key), 1)) % fencepost.lane_count())::smallint $$;

-- UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then the version, then random bits.
CREATE FUNCTION fencepost.uuid_v7() RETURNS uuid
LANGUAGE plpgsql VOLATILE PARALLEL SAFE AS $$
DECLARE
    bits bytea := substring(uuid_send(gen_random_uuid()) FROM 7);
BEGIN
    bits := set_byte(bits, 0, (get_byte(bits, 0) & 15) | 112);
    RETURN encode(substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) || bits, 'hex')::uuid;
END
$$;

-- The functions on headers are called only for rows that have some: a row without headers pays for none of them.
CREATE FUNCTION fencepost.headers_bytes(header_names text[], header_values bytea[]) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN coalesce((SELECT sum(octet_length(h.name) + octet_length(h.value))
                     FROM unnest(header_names, header_values) AS h(name, value)), 0);
END
$$;

-- Why a set of headers may not be written, or NULL when it may.
CREATE FUNCTION fencepost.headers_refusal(header_names text[], header_values bytea[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN CASE
        WHEN array_ndims(header_names) > 1 OR array_ndims(header_values) > 1
            THEN 'headers: header_names and header_values must be flat arrays; give one value for each name'
        WHEN header_names IS NULL OR header_values IS NULL
            OR cardinality(header_names) <> cardinality(header_values)
            THEN 'headers: header_names and header_values must have the same length; give one value for each name'
        WHEN cardinality(header_names) > 64 THEN 'headers: more than 64; put the rest into the payload'
        WHEN EXISTS (SELECT FROM unnest(header_names, header_values) AS h(name, value) WHERE h.name IS NULL OR h.value IS NULL)
            THEN 'headers: a name or a value is null; leave the header out instead'
        WHEN EXISTS (SELECT FROM unnest(header_names) AS h(name) WHERE octet_length(h.name) NOT BETWEEN 1 AND 256)
            THEN 'headers: a name must have 1 to 256 bytes of UTF-8'
        WHEN EXISTS (SELECT FROM unnest(header_names) AS h(name)
                     WHERE lower(h.name) LIKE 'ce\_%' OR lower(h.name) LIKE 'fencepost-%'
                        OR lower(h.name) IN ('content-type', 'traceparent', 'tracestate'))
            THEN 'headers: names that begin with ce_ or fencepost-, and content-type, traceparent and tracestate, are reserved; use the parameter of that name, or another name'
        WHEN fencepost.headers_bytes(header_names, header_values) > 32768
            THEN format('headers: %s bytes of names and values exceed the limit of 32768; put the rest into the payload',
                        fencepost.headers_bytes(header_names, header_values))
    END;
END
$$;

-- Why a row may not be written, or NULL when it may. It never quotes a value.
CREATE FUNCTION fencepost.refusal(
    topic text, event_type text, key bytea, payload bytea, header_names text[], header_values bytea[],
    source text, content_type text, tenant_id text, run_id text, step text, operation text,
    fencing_token bigint, traceparent text, tracestate text
) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN CASE
        WHEN topic IS NULL OR topic !~ '^[a-zA-Z0-9._-]{1,249}$' OR topic IN ('.', '..')
            THEN 'topic: must be 1 to 249 characters of a-z A-Z 0-9 . _ - and not "." or ".."'
        WHEN event_type IS NULL OR octet_length(event_type) NOT BETWEEN 1 AND 256 THEN 'type: must have 1 to 256 bytes'
        WHEN octet_length(key) > 4096 THEN format('key: %s bytes exceed the limit of 4096; use a hash of it', octet_length(key))
        WHEN octet_length(payload) > 1000000
            THEN format('payload: %s bytes exceed the limit of 1000000; store it elsewhere and enqueue a reference', octet_length(payload))
        WHEN payload IS NULL AND key IS NULL THEN 'payload: a tombstone (null payload) needs a key'
        WHEN octet_length(source) NOT BETWEEN 1 AND 256 THEN 'source: must have 1 to 256 bytes, or be null'
        WHEN octet_length(content_type) NOT BETWEEN 1 AND 256 THEN 'content_type: must have 1 to 256 bytes, or be null'
        WHEN octet_length(tenant_id) NOT BETWEEN 1 AND 256 THEN 'tenant_id: must have 1 to 256 bytes, or be null'
        WHEN octet_length(run_id) NOT BETWEEN 1 AND 256 THEN 'run_id: must have 1 to 256 bytes, or be null'
        WHEN octet_length(step) NOT BETWEEN 1 AND 256 THEN 'step: must have 1 to 256 bytes, or be null'
        WHEN octet_length(operation) NOT BETWEEN 1 AND 256 THEN 'operation: must have 1 to 256 bytes, or be null'
        WHEN fencing_token < 0 THEN 'fencing_token: must not be negative'
        WHEN octet_length(traceparent) NOT BETWEEN 1 AND 256 THEN 'traceparent: must have 1 to 256 bytes, or be null'
        WHEN octet_length(tracestate) NOT BETWEEN 1 AND 512 THEN 'tracestate: must have 1 to 512 bytes, or be null'
        WHEN header_names IS NOT NULL OR header_values IS NOT NULL
            THEN fencepost.headers_refusal(header_names, header_values)
    END;
END
$$;

-- What a row weighs in a batch: its bytes plus an allowance for the attributes. A poll is cut by it.
CREATE FUNCTION fencepost.record_bytes(key bytea, payload bytea, header_names text[], header_values bytea[]) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    RETURN 256 + coalesce(octet_length(key), 0) + coalesce(octet_length(payload), 0)
        + CASE WHEN header_names IS NULL THEN 0 ELSE fencepost.headers_bytes(header_names, header_values) END;
END
$$;

-- The table's CHECK: true, or an error that names field, limit and remedy. A row in a lane that nobody owns would never be
-- published, and one in another lane than its key's would break the key's order, so the lane is checked as well. It raises instead of returning false because
-- PostgreSQL's own message prints the failing row, payload included, into the server's log. One call instead of a
-- constraint a rule: a constraint's expression is parsed anew by every INSERT statement, and seven cost 90 us a row.
CREATE FUNCTION fencepost.check_row(
    topic text, event_type text, key bytea, payload bytea, header_names text[], header_values bytea[],
    source text, content_type text, tenant_id text, run_id text, step text, operation text,
    fencing_token bigint, traceparent text, tracestate text, record_bytes integer, lane smallint
) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    refused text := fencepost.refusal(topic, event_type, key, payload, header_names, header_values, source, content_type,
                                      tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate);
BEGIN
    IF refused IS NULL AND record_bytes = fencepost.record_bytes(key, payload, header_names, header_values)
        AND lane BETWEEN 0 AND fencepost.lane_count() - 1 AND lane = coalesce(fencepost.lane_of(key), lane)
    THEN
        RETURN true;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'check_violation', SCHEMA = 'fencepost', TABLE = 'outbox', CONSTRAINT = 'outbox_row_check',
        MESSAGE = 'fencepost: ' || coalesce(refused, 'lane: lane and record_bytes are not what the key and the payload say; leave both out'),
        HINT = 'Nothing was written. Roll back to a savepoint taken before the statement to keep the rest of the transaction.';
END
$$;

-- Append only. No status column, no claim, no mark in a row: what is delivered is the cursor's to say.
-- xid comes first: column defaults are evaluated in order, so a row's transaction id is assigned before its id is drawn.
CREATE TABLE fencepost.outbox (
    xid           xid8        NOT NULL DEFAULT pg_current_xact_id(),
    id            bigint      NOT NULL DEFAULT nextval('fencepost.outbox_id_seq'),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    event_id      uuid        NOT NULL DEFAULT fencepost.uuid_v7(),
    fencing_token bigint,
    record_bytes  integer     NOT NULL,
    lane          smallint    NOT NULL,
    topic         text,  -- not null by the check below: PostgreSQL's own error would print the row
    event_type    text,
    key           bytea,
    source        text,
    content_type  text,
    tenant_id     text,
    run_id        text,
    step          text,
    operation     text,
    traceparent   text,
    tracestate    text,
    header_names  text[],
    header_values bytea[],
    payload       bytea,
    CONSTRAINT outbox_pkey PRIMARY KEY (lane, id),
    CONSTRAINT outbox_row_check CHECK (fencepost.check_row(
        topic, event_type, key, payload, header_names, header_values, source, content_type, tenant_id, run_id, step,
        operation, fencing_token, traceparent, tracestate, record_bytes, lane))
) WITH (
    -- Rows are only inserted, then deleted in bulk: vacuum is needed for freezing and the visibility map, and the
    -- statistics must follow a table that goes from empty to millions of rows within minutes.
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 50000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000
);
ALTER SEQUENCE fencepost.outbox_id_seq OWNED BY fencepost.outbox.id;
COMMENT ON TABLE fencepost.outbox IS 'Events at rest, written in the domain transaction. Append only.';

-- The late branches of a poll: (lane, one xid) in id order, and (lane, xid >= x) with the id checked inside the index.
CREATE INDEX outbox_lane_xid_id_idx ON fencepost.outbox (lane, xid, id);
-- Unique: two rows with one event id would be one event to every consumer, and the second would be lost there.
CREATE UNIQUE INDEX outbox_event_id_key ON fencepost.outbox (event_id);

-- A row inserted without the functions still gets its lane and its weight. The WHEN clause keeps the trigger off their path.
CREATE FUNCTION fencepost.fill_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.lane := coalesce(NEW.lane, fencepost.lane_of(NEW.key), NEW.id % fencepost.lane_count());
    NEW.record_bytes := fencepost.record_bytes(NEW.key, NEW.payload, NEW.header_names, NEW.header_values);
    RETURN NEW;
END
$$;
CREATE TRIGGER fill_row BEFORE INSERT ON fencepost.outbox
FOR EACH ROW WHEN (NEW.lane IS NULL OR NEW.record_bytes IS NULL) EXECUTE FUNCTION fencepost.fill_row();
