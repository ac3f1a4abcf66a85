-- Operators' changes leave a trace, and a copy of the outbox in another cluster can be made its own.

CREATE TABLE fencepost.audit (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text        NOT NULL CHECK (octet_length(actor) BETWEEN 1 AND 256),
    database_role text     NOT NULL DEFAULT session_user,
    command    text        NOT NULL CHECK (octet_length(command) BETWEEN 1 AND 256),
    reason     text        NOT NULL CHECK (octet_length(reason) BETWEEN 1 AND 2000),
    detail     jsonb       NOT NULL DEFAULT '{}'
);
GRANT SELECT ON fencepost.audit TO fencepost_operator;

-- Cursors hold transaction ids of the cluster that they were made in. In another cluster (a restored dump, say) they
-- say nothing: old delivered rows would look late, and late ones delivered. Rebase decides by the old cursors what was
-- delivered, then restates it in this cluster's ids:
--   delivered rows whose id of old lies in this cluster's future get 3, the id that is visible in every snapshot;
--   undelivered rows at or below the position get this transaction's id, and the new cursors see nothing from it on;
--   so do rows above the position whose id lies in the future: once published, they would look late at every poll.
-- A new installation id follows, since the original may still be alive. Refused while a relay holds a lane. One transaction: all or nothing.
CREATE FUNCTION fencepost.rebase(actor text, reason text, OUT undelivered_restated bigint, OUT delivered_restated bigint, OUT lanes integer)
LANGUAGE plpgsql AS $$
DECLARE
    here xid8 := pg_current_xact_id();
BEGIN
    LOCK TABLE fencepost.lanes, fencepost.receipts IN EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM fencepost.lanes WHERE lease_expires_at > clock_timestamp()) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use', MESSAGE = 'fencepost: a relay holds lanes of this outbox',
            HINT = 'Stop every relay on it, or wait for the leases to end, and run the command again.';
    END IF;
    CREATE TEMPORARY TABLE fencepost_rebase ON COMMIT DROP AS SELECT * FROM fencepost.cursors;

    UPDATE fencepost.outbox AS o SET xid = here
    FROM fencepost_rebase AS c
    WHERE c.lane = o.lane AND CASE WHEN o.id > c.position THEN o.xid > here ELSE
        NOT pg_visible_in_snapshot(o.xid, c.snapshot)
        AND NOT (c.target IS NOT NULL AND o.id <= c.late_position AND pg_visible_in_snapshot(o.xid, c.target)) END;
    GET DIAGNOSTICS undelivered_restated = ROW_COUNT;

    UPDATE fencepost.outbox SET xid = '3'::xid8 WHERE xid > here;
    GET DIAGNOSTICS delivered_restated = ROW_COUNT;

    INSERT INTO fencepost.receipts (lane, sequence, generation, relay_id, position, snapshot, row_count, late_count, partitions)
    SELECT c.lane, c.sequence + 1, l.lease_generation + 1, 'fencepost lanes rebase', c.position,
           format('%s:%s:', here, here)::pg_snapshot, 0, 0, '{}'
    FROM fencepost_rebase AS c JOIN fencepost.lanes AS l USING (lane);
    UPDATE fencepost.lanes SET lease_owner = NULL, lease_expires_at = NULL, lease_generation = lease_generation + 1;
    GET DIAGNOSTICS lanes = ROW_COUNT;
    DELETE FROM fencepost.relays;

    UPDATE fencepost.installation
    SET installation_id = gen_random_uuid(), system_identifier = (pg_control_system()).system_identifier, created_at = clock_timestamp();
    INSERT INTO fencepost.audit (actor, command, reason, detail)
    VALUES (actor, 'lanes rebase', reason, jsonb_build_object('undelivered_restated', undelivered_restated, 'delivered_restated', delivered_restated));
END
$$;
REVOKE ALL ON FUNCTION fencepost.rebase FROM PUBLIC;
