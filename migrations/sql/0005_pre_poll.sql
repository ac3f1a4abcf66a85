-- The snapshot cursor's poll: for each lane given, what its cursor has not delivered and this snapshot can see.
--
-- A cursor is (position, snapshot) and, while a late set larger than one batch is drained, (target, late_position).
-- Undelivered rows of a lane are, in this order:
--   late   rows at or below position whose transaction was in progress in snapshot (xip), or lies at or beyond its
--          xmax. xmax is the latest *completed* transaction + 1: one that had drawn its id and its xid may lie beyond
--          it, so without that branch its rows would be lost. While a target is set, only rows visible in it, above
--          late_position: the latest snapshot instead of the fixed target would lose rows.
--   fresh  rows above position. None while a target is set.
-- The first row returned is the head: lane -1, and this statement's own snapshot in topic.
-- The xip branch reads at most row_limit + 1 rows a transaction. The xmax branch reads the ids of all that is left of its
-- set, since id order over several transactions is in no index: such a set needs a bulk transaction that was the newest
-- of all when a snapshot was taken.
-- row_limit + 1 late rows tell the caller that the late set does not fit; byte_limit cuts each part after the row
-- that reaches it, so a single row of any size still passes.
--
-- The settings leave the planner one plan whatever the statistics say: with statistics of an empty table it would
-- scan the table, or read a lane's whole history from the primary key for the late branches. ORDER BY xid, id and
-- xid >= x AND xid <= x (not xid = x, which would make xid redundant in the order) admit outbox_lane_xid_id_idx only.
-- jit: disabled plan nodes carry a cost that would start the compiler at each poll.
CREATE FUNCTION fencepost.poll(
    lanes smallint[], positions bigint[], snapshots text[], targets text[], late_positions bigint[],
    row_limit integer, byte_limit bigint
) RETURNS TABLE (
    lane smallint, id bigint, late boolean, record_bytes integer, created_at timestamptz, event_id text, topic text,
    event_type text, key bytea, payload bytea, source text, content_type text, tenant_id text, run_id text, step text,
    operation text, fencing_token bigint, traceparent text, tracestate text, header_names text[], header_values bytea[]
)
LANGUAGE plpgsql STABLE ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET max_parallel_workers_per_gather = 0 SET jit = off SET plan_cache_mode = force_generic_plan SET work_mem = '64MB'
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT -1::smallint, 0::bigint, false, 0, clock_timestamp(), NULL::text, pg_current_snapshot()::text,
           NULL::text, NULL::bytea, NULL::bytea, NULL::text, NULL::text, NULL::text, NULL::text, NULL::text,
           NULL::text, NULL::bigint, NULL::text, NULL::text, NULL::text[], NULL::bytea[]
    UNION ALL
    SELECT r.lane, r.id, r.late, r.record_bytes, r.created_at, r.event_id::text, r.topic,
           r.event_type, r.key, r.payload, r.source, r.content_type, r.tenant_id, r.run_id, r.step,
           r.operation, r.fencing_token, r.traceparent, r.tracestate, r.header_names, r.header_values
    FROM unnest(lanes, positions, snapshots::pg_snapshot[], targets::pg_snapshot[], late_positions)
        AS c(lane, position, snapshot, target, late_position)
    CROSS JOIN LATERAL (
        SELECT true AS late, l.xid, l.id, l.created_at, l.event_id, l.fencing_token, l.record_bytes, l.lane, l.topic,
               l.event_type, l.key, l.source, l.content_type, l.tenant_id, l.run_id, l.step, l.operation, l.traceparent,
               l.tracestate, l.header_names, l.header_values, l.payload
        FROM (
            SELECT u.*, sum(u.record_bytes) OVER (ORDER BY u.id ROWS UNBOUNDED PRECEDING) - u.record_bytes AS before
            FROM (
                SELECT v.* FROM (
                    SELECT p.* FROM pg_snapshot_xip(c.snapshot) AS x(xid)
                    CROSS JOIN LATERAL (
                        SELECT o.* FROM fencepost.outbox AS o
                        WHERE o.lane = c.lane AND o.xid >= x.xid AND o.xid <= x.xid
                          AND o.id <= c.position AND o.id > c.late_position
                        ORDER BY o.xid, o.id LIMIT row_limit + 1
                    ) AS p
                    WHERE c.target IS NULL OR pg_visible_in_snapshot(x.xid, c.target)
                    UNION ALL
                    SELECT b.* FROM (
                        SELECT o.* FROM fencepost.outbox AS o
                        WHERE o.lane = c.lane AND o.xid >= pg_snapshot_xmax(c.snapshot)
                          AND o.id <= c.position AND o.id > c.late_position
                          AND (c.target IS NULL OR pg_visible_in_snapshot(o.xid, c.target))
                        ORDER BY o.xid, o.id
                    ) AS b
                ) AS v ORDER BY v.id LIMIT row_limit + 1
            ) AS u
        ) AS l
        WHERE l.before < byte_limit
        UNION ALL
        -- What the rows weigh is added up on one narrow column first; where they fit, as they nearly always do, there is no
        -- cut to find. A window over whole rows would copy each of them once more.
        SELECT false, o.*
        FROM (
            SELECT CASE WHEN sum(n.record_bytes) >= byte_limit THEN (
                SELECT min(w.id)
                FROM (
                    SELECT m.id, sum(m.record_bytes) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) AS running
                    FROM (
                        SELECT o.id, o.record_bytes FROM fencepost.outbox AS o
                        WHERE o.lane = c.lane AND o.id > c.position AND c.target IS NULL
                        ORDER BY o.id LIMIT row_limit
                    ) AS m
                ) AS w
                WHERE w.running >= byte_limit
            ) END AS last_id
            FROM (
                SELECT o.record_bytes FROM fencepost.outbox AS o
                WHERE o.lane = c.lane AND o.id > c.position AND c.target IS NULL
                ORDER BY o.id LIMIT row_limit
            ) AS n
        ) AS cut
        CROSS JOIN LATERAL (
            SELECT o.* FROM fencepost.outbox AS o
            WHERE o.lane = c.lane AND o.id > c.position AND c.target IS NULL
              AND o.id <= coalesce(cut.last_id, 9223372036854775807)
            ORDER BY o.id LIMIT row_limit
        ) AS o
    ) AS r;
END
$$;
COMMENT ON FUNCTION fencepost.poll IS 'What each given lane''s cursor has not delivered, bounded in rows and bytes; the head row carries the snapshot';

REVOKE ALL ON FUNCTION fencepost.poll FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.poll TO fencepost_relay;
