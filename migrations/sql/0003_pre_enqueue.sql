-- The one way to write an event, from any language. Both functions run inside the caller's transaction and neither
-- begins nor ends one. A SQL function cannot see autocommit: call it inside BEGIN ... COMMIT with the domain rows,
-- or the event stands alone.
--
-- SECURITY DEFINER with a pinned search_path: a producer may call these and may touch no table of the schema.

CREATE FUNCTION fencepost.enqueue(
    topic text, type text, key bytea, payload bytea,
    event_id uuid DEFAULT NULL, header_names text[] DEFAULT NULL, header_values bytea[] DEFAULT NULL,
    source text DEFAULT NULL, content_type text DEFAULT NULL, tenant_id text DEFAULT NULL, run_id text DEFAULT NULL,
    step text DEFAULT NULL, operation text DEFAULT NULL, fencing_token bigint DEFAULT NULL,
    traceparent text DEFAULT NULL, tracestate text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    -- Before the id, so that a transaction which holds an id is one that snapshots know.
    writer xid8 := pg_current_xact_id();
    event uuid := coalesce(event_id, fencepost.uuid_v7());
    lane smallint := fencepost.lane_of(key);
    row_id bigint := nextval('fencepost.outbox_id_seq');
BEGIN
    lane := coalesce(lane, row_id % fencepost.lane_count());
    INSERT INTO fencepost.outbox (
        xid, id, lane, event_id, topic, event_type, key, payload, header_names, header_values, source, content_type,
        tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate, record_bytes
    ) VALUES (
        writer, row_id, lane, event, topic, type, key, payload, header_names, header_values, source, content_type,
        tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate,
        fencepost.record_bytes(key, payload, header_names, header_values)
    );
    PERFORM fencepost.ring(lane);
    RETURN event;
END
$$;
COMMENT ON FUNCTION fencepost.enqueue IS 'Writes one event in the caller''s transaction and returns its event id. Call it after taking the lock that serialises the key.';

-- Many events in one call and one round trip, in array order. Every array has one element an event; the headers of
-- event i are header_names[header_ends[i-1]+1 : header_ends[i]] and the values of the same places.
CREATE FUNCTION fencepost.enqueue_many(
    topics text[], types text[], keys bytea[], payloads bytea[], event_ids uuid[],
    header_ends integer[] DEFAULT NULL, header_names text[] DEFAULT NULL, header_values bytea[] DEFAULT NULL,
    sources text[] DEFAULT NULL, content_types text[] DEFAULT NULL, tenant_ids text[] DEFAULT NULL,
    run_ids text[] DEFAULT NULL, steps text[] DEFAULT NULL, operations text[] DEFAULT NULL,
    fencing_tokens bigint[] DEFAULT NULL, traceparents text[] DEFAULT NULL, tracestates text[] DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    wanted integer := coalesce(cardinality(topics), 0);
    written_lanes smallint[];
    rung smallint;
BEGIN
    IF wanted > 10000 THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'fencepost: events: more than 10000 in one call', HINT = 'Nothing was written. Call it once for each 10000.';
    END IF;
    IF cardinality(types) IS DISTINCT FROM wanted OR cardinality(keys) IS DISTINCT FROM wanted
        OR cardinality(payloads) IS DISTINCT FROM wanted OR cardinality(event_ids) IS DISTINCT FROM wanted
        OR coalesce(cardinality(header_ends), wanted) <> wanted OR coalesce(cardinality(sources), wanted) <> wanted
        OR coalesce(cardinality(content_types), wanted) <> wanted OR coalesce(cardinality(tenant_ids), wanted) <> wanted
        OR coalesce(cardinality(run_ids), wanted) <> wanted OR coalesce(cardinality(steps), wanted) <> wanted
        OR coalesce(cardinality(operations), wanted) <> wanted OR coalesce(cardinality(fencing_tokens), wanted) <> wanted
        OR coalesce(cardinality(traceparents), wanted) <> wanted OR coalesce(cardinality(tracestates), wanted) <> wanted
    THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'fencepost: events: every array must have one element an event; use null elements',
            HINT = 'Nothing was written. Roll back to a savepoint taken before the statement to keep the rest of the transaction.';
    END IF;
    IF (header_ends IS NULL) <> (header_names IS NULL) OR (header_ends IS NULL) <> (header_values IS NULL)
        OR array_ndims(header_names) > 1 OR array_ndims(header_values) > 1
        OR coalesce(header_ends[wanted], 0) <> coalesce(cardinality(header_names), 0)
        OR coalesce(header_ends[wanted], 0) <> coalesce(cardinality(header_values), 0)
        OR EXISTS (SELECT FROM unnest(header_ends) WITH ORDINALITY AS e(last, n) WHERE e.last IS NULL OR e.last < coalesce(header_ends[e.n - 1], 0))
    THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'fencepost: headers: header_ends must rise to the number of header_names and of header_values',
            HINT = 'Nothing was written. header_ends[i] is how many headers the events up to i have together.';
    END IF;
    PERFORM pg_current_xact_id();  -- before the ids, so that a transaction which holds an id is one that snapshots know
    WITH written AS (
        INSERT INTO fencepost.outbox AS o (
            id, lane, event_id, topic, event_type, key, payload, header_names, header_values, source, content_type,
            tenant_id, run_id, step, operation, fencing_token, traceparent, tracestate, record_bytes
        )
        SELECT e.id, coalesce(fencepost.lane_of(e.key), e.id % fencepost.lane_count()), coalesce(e.event_id, fencepost.uuid_v7()),
               e.topic, e.type, e.key, e.payload, e.names, e.values, e.source, e.content_type,
               e.tenant_id, e.run_id, e.step, e.operation, e.fencing_token, e.traceparent, e.tracestate,
               fencepost.record_bytes(e.key, e.payload, e.names, e.values)
        FROM (
            SELECT nextval('fencepost.outbox_id_seq') AS id, u.*,
                   CASE WHEN header_ends[u.n] > coalesce(header_ends[u.n - 1], 0)
                        THEN header_names[coalesce(header_ends[u.n - 1], 0) + 1 : header_ends[u.n]] END AS names,
                   CASE WHEN header_ends[u.n] > coalesce(header_ends[u.n - 1], 0)
                        THEN header_values[coalesce(header_ends[u.n - 1], 0) + 1 : header_ends[u.n]] END AS values
            FROM unnest(topics, types, keys, payloads, event_ids, sources, content_types, tenant_ids, run_ids,
                        steps, operations, fencing_tokens, traceparents, tracestates) WITH ORDINALITY
                AS u(topic, type, key, payload, event_id, source, content_type, tenant_id, run_id,
                     step, operation, fencing_token, traceparent, tracestate, n)
            ORDER BY u.n
        ) AS e
        RETURNING o.lane
    )
    SELECT array_agg(DISTINCT lane) INTO written_lanes FROM written;
    FOREACH rung IN ARRAY coalesce(written_lanes, '{}') LOOP
        PERFORM fencepost.ring(rung);
    END LOOP;
    RETURN wanted;
END
$$;
COMMENT ON FUNCTION fencepost.enqueue_many IS 'Writes events in array order in the caller''s transaction; returns how many. One round trip.';
