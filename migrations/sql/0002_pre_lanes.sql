-- Ownership and progress: lanes are leased, marks are receipts, and a lane's cursor is its newest receipt.

-- Which cluster this copy lives in. Cursors hold transaction ids, and those mean nothing in another cluster.
CREATE TABLE fencepost.installation (
    one               boolean     PRIMARY KEY DEFAULT true CHECK (one),
    installation_id   uuid        NOT NULL DEFAULT gen_random_uuid(),
    system_identifier bigint      NOT NULL DEFAULT (pg_control_system()).system_identifier,
    created_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO fencepost.installation DEFAULT VALUES;

CREATE TABLE fencepost.lanes (
    lane             smallint    PRIMARY KEY CHECK (lane >= 0),
    lease_owner      text,
    lease_generation bigint      NOT NULL DEFAULT 0 CHECK (lease_generation >= 0),
    lease_expires_at timestamptz,
    CONSTRAINT lanes_lease_check CHECK ((lease_owner IS NULL) = (lease_expires_at IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
INSERT INTO fencepost.lanes (lane) SELECT generate_series(0, fencepost.lane_count() - 1);
COMMENT ON COLUMN fencepost.lanes.lease_generation IS '+1 at every claim, never reset: the fence of every write made under the lease';

-- Live relays. relay_id has a nonce of its start, so a restarted pod with the same name is another member.
CREATE TABLE fencepost.relays (
    relay_id   text        PRIMARY KEY,
    name       text        NOT NULL,
    version    text        NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    stopped    jsonb       NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
COMMENT ON COLUMN fencepost.relays.stopped IS 'Lanes that stand still under this relay, by number: reason, event_id, topic, error';

-- One row a marked batch. Inserting it is the mark; nothing is updated, so a pinned xmin horizon costs marks nothing.
CREATE TABLE fencepost.receipts (
    lane          smallint    NOT NULL,
    sequence      bigint      NOT NULL CHECK (sequence > 0),
    generation    bigint      NOT NULL,
    relay_id      text        NOT NULL,
    position      bigint      NOT NULL CHECK (position >= 0),
    snapshot      pg_snapshot NOT NULL,
    target        pg_snapshot,
    late_position bigint      NOT NULL DEFAULT 0,
    first_id      bigint,
    last_id       bigint,
    row_count     integer     NOT NULL CHECK (row_count >= 0),
    late_count    integer     NOT NULL CHECK (late_count BETWEEN 0 AND row_count),
    partitions    jsonb       NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT receipts_pkey PRIMARY KEY (lane, sequence),
    CONSTRAINT receipts_late_check CHECK (target IS NOT NULL OR late_position = 0),
    CONSTRAINT receipts_rows_check CHECK ((row_count = 0) = (first_id IS NULL) AND (first_id IS NULL) = (last_id IS NULL))
) WITH (
    autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 50000,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000
);
-- trace: the first receipt whose position reached an id.
CREATE INDEX receipts_lane_position_idx ON fencepost.receipts (lane, position, sequence);
COMMENT ON COLUMN fencepost.receipts.partitions IS '{topic: {"count": partitions of the topic, "offsets": {partition: [first, last]}}}';

CREATE VIEW fencepost.cursors AS
SELECT l.lane,
       coalesce(r.sequence, 0)                     AS sequence,
       coalesce(r.position, 0)                     AS position,
       coalesce(r.snapshot, '1:1:'::pg_snapshot)   AS snapshot,
       r.target,
       coalesce(r.late_position, 0)                AS late_position,
       r.created_at                                AS marked_at
FROM fencepost.lanes AS l
LEFT JOIN LATERAL (
    SELECT * FROM fencepost.receipts AS newest WHERE newest.lane = l.lane ORDER BY newest.sequence DESC LIMIT 1
) AS r ON true;
COMMENT ON VIEW fencepost.cursors IS 'Each lane''s cursor: its newest receipt';

-- The delivered mark of every row, computed: nothing in the row says it.
CREATE VIEW fencepost.delivery AS
SELECT o.lane, o.id, o.event_id, o.topic, o.created_at,
       (o.id <= c.position AND pg_visible_in_snapshot(o.xid, c.snapshot))
       OR (c.target IS NOT NULL AND o.id <= c.late_position AND pg_visible_in_snapshot(o.xid, c.target)) AS delivered
FROM fencepost.outbox AS o
JOIN fencepost.cursors AS c USING (lane);

-- The doorbell: one sequence a lane, used as a flag. Its value is the Unix millisecond until which the lane's owner
-- sleeps and wants to be rung; 1 means nobody does. A sequence has no row versions, so arming it costs writers nothing
-- under a pinned horizon, and a dead relay's flag runs out by itself.
DO $$
BEGIN
    FOR lane IN 0 .. fencepost.lane_count() - 1 LOOP
        EXECUTE format('CREATE SEQUENCE fencepost.doorbell_%s AS bigint MINVALUE 1 CACHE 1', lane);
        EXECUTE format('SELECT setval(%L, 1)', 'fencepost.doorbell_' || lane);
    END LOOP;
END
$$;

CREATE FUNCTION fencepost.ring(lane integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    armed_until bigint := pg_sequence_last_value(('fencepost.doorbell_' || lane)::regclass);
BEGIN
    IF armed_until > 1 AND armed_until > extract(epoch FROM clock_timestamp()) * 1000 THEN
        PERFORM pg_notify('fencepost_doorbell', lane::text);
    END IF;
END
$$;
