-- Least privilege: three group roles without login. Grant them to the users that services, relays and people log in as.

DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['fencepost_producer', 'fencepost_relay', 'fencepost_operator'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            END IF;
        EXCEPTION
            -- Roles belong to the cluster: another database's migration may create them at the same moment.
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN
                RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                    MESSAGE = format('fencepost: may not create the role %s', role),
                    HINT = 'Run the migration as a role with CREATEROLE, or create fencepost_producer, fencepost_relay and fencepost_operator (NOLOGIN) first.';
        END;
    END LOOP;
END
$$;

REVOKE ALL ON SCHEMA fencepost FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fencepost FROM PUBLIC;

GRANT USAGE ON SCHEMA fencepost TO fencepost_producer, fencepost_relay, fencepost_operator;
GRANT EXECUTE ON FUNCTION fencepost.enqueue, fencepost.enqueue_many, fencepost.uuid_v7 TO fencepost_producer;

GRANT SELECT ON fencepost.outbox, fencepost.installation, fencepost.cursors, fencepost.delivery TO fencepost_relay;
GRANT SELECT, UPDATE ON fencepost.lanes TO fencepost_relay;
GRANT SELECT, INSERT ON fencepost.receipts TO fencepost_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON fencepost.relays TO fencepost_relay;
GRANT EXECUTE ON FUNCTION fencepost.lane_count TO fencepost_relay;

GRANT SELECT ON ALL TABLES IN SCHEMA fencepost TO fencepost_operator;
GRANT EXECUTE ON FUNCTION fencepost.lane_count, fencepost.lane_of TO fencepost_operator;

-- Which migrations are applied is no secret: check and --status ask. A service that applies these files with a tool of its
-- own has no such table.
DO $$
BEGIN
    IF to_regclass('fencepost.migrations') IS NOT NULL THEN
        GRANT SELECT ON fencepost.migrations TO fencepost_relay, fencepost_operator;
    END IF;
END
$$;

-- Arming the bell is setval (UPDATE on the sequence). Sequences of lanes only, never the outbox's own.
DO $$
BEGIN
    FOR lane IN 0 .. fencepost.lane_count() - 1 LOOP
        EXECUTE format('GRANT SELECT, UPDATE ON SEQUENCE fencepost.doorbell_%s TO fencepost_relay', lane);
    END LOOP;
END
$$;

-- In a block of its own: what an exception handler catches undoes its whole block.
DO $$
BEGIN
    -- The relay's horizon metric names who holds back vacuum; without this it sees only its own sessions.
    GRANT pg_read_all_stats TO fencepost_relay, fencepost_operator;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE NOTICE 'fencepost: pg_read_all_stats could not be granted to fencepost_relay; the horizon metric will be partial';
END
$$;
