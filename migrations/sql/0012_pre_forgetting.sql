-- Forgetting anew: what a call reads is bounded by its batch, whatever else is in the ledger, and several services agree on what is
-- old. A message that is given up again has a dead letter as young as that. And what a message's row costs: its check, and its insert.

-- How long services want the ledger to remember, and when one last said so. Several may share a ledger: the longest wish of the last
-- days decides, or a service with the shorter one would take from another what it still needs.
CREATE TABLE fencepost.retention_wishes (
    age      interval    NOT NULL,
    asked_at timestamptz NOT NULL,
    CONSTRAINT retention_wishes_pkey PRIMARY KEY (age)
);

-- How far the ledger was looked through, oldest first: one row, whose lock says that somebody is at it.
CREATE TABLE fencepost.forgetting (
    only_row  boolean     NOT NULL DEFAULT true,
    looked_from timestamptz,
    begun_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT forgetting_pkey PRIMARY KEY (only_row),
    CONSTRAINT forgetting_only_row_check CHECK (only_row)
);
COMMENT ON COLUMN fencepost.forgetting.looked_from IS 'Older rows were looked at in this pass; null: none was';
COMMENT ON COLUMN fencepost.forgetting.begun_at IS 'When this pass began at the oldest row';
INSERT INTO fencepost.forgetting DEFAULT VALUES;
GRANT SELECT ON fencepost.retention_wishes, fencepost.forgetting TO fencepost_operator;

-- Deletes up to `most` rows that are older than `age`, and than every other service's: not while a run of the lineage is alive, or a
-- dead letter of the message may be redriven. 0: there is nothing more to do now, or another is at it.
--
-- A row that is old and held back is passed, and looked at again by the next pass, an hour later at the earliest: however many there
-- are, a call looks at four batches at most. What holds a row back is asked once for all rows of a lineage or message. Each look is an
-- index probe whatever the statistics say, hence the settings and the LATERAL ... LIMIT 1: joined, a plan made for small tables reads
-- them whole.
CREATE OR REPLACE FUNCTION fencepost.forget_effects(age interval, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    most_batches CONSTANT integer := 4;
    pass_at_least CONSTANT interval := '1 hour';
    wishes_count_for CONSTANT interval := '7 days';
    called_at CONSTANT timestamptz := clock_timestamp();
    place fencepost.forgetting;
    old_before timestamptz;
    seen record;
BEGIN
    SELECT * INTO place FROM fencepost.forgetting FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;

    INSERT INTO fencepost.retention_wishes AS w (age, asked_at) VALUES (age, called_at)
    ON CONFLICT ON CONSTRAINT retention_wishes_pkey DO UPDATE SET asked_at = called_at
    WHERE w.asked_at < called_at - interval '1 hour';
    DELETE FROM fencepost.retention_wishes AS w WHERE w.asked_at < called_at - wishes_count_for;
    SELECT called_at - max(w.age) INTO old_before FROM fencepost.retention_wishes AS w;

    FOR batch IN 1 .. most_batches LOOP
        WITH looked AS MATERIALIZED (
            SELECT c.ctid AS at, c.run_key, c.tenant_id, c.created_at, c.finished_at,
                   CASE WHEN c.run_id IS NOT NULL THEN c.run_key::uuid END AS root_run_id
            FROM fencepost.effects AS c
            WHERE c.created_at >= coalesce(place.looked_from, '-infinity') AND c.created_at < old_before
            ORDER BY c.created_at LIMIT most
        ),
        owners AS MATERIALIZED (
            SELECT l.run_key, l.tenant_id, l.root_run_id, array_agg(l.at) AS rows FROM looked AS l
            WHERE l.finished_at < old_before GROUP BY l.run_key, l.tenant_id, l.root_run_id
        ),
        free AS MATERIALIZED (
            SELECT unnest(o.rows) AS at FROM owners AS o
            LEFT JOIN LATERAL (
                SELECT true AS is_held FROM fencepost.runs AS r
                WHERE r.run_id = o.root_run_id AND r.tenant_id = o.tenant_id AND r.finished_at IS NULL
                UNION ALL
                SELECT true FROM fencepost.runs AS r
                WHERE r.root_run_id = o.root_run_id AND r.tenant_id = o.tenant_id AND r.root_run_id <> r.run_id
                  AND r.finished_at IS NULL
                UNION ALL
                SELECT true FROM fencepost.dead_letters AS d  -- not "in (open states)", whose indexes lead elsewhere
                WHERE d.run_key = o.run_key AND d.tenant_id = o.tenant_id AND d.state NOT IN ('redriven', 'discarded')
                LIMIT 1
            ) AS held ON true
            WHERE held.is_held IS NULL
        ),
        locked AS MATERIALIZED (
            SELECT t.ctid AS at FROM fencepost.effects AS t
            WHERE t.ctid = ANY (ARRAY(SELECT f.at FROM free AS f)) AND t.finished_at < old_before FOR UPDATE SKIP LOCKED
        ),
        forgotten AS (
            DELETE FROM fencepost.effects AS e WHERE e.ctid = ANY (ARRAY(SELECT l.at FROM locked AS l)) RETURNING 1
        )
        SELECT (SELECT count(*) FROM looked) AS looks, (SELECT max(l.created_at) FROM looked AS l) AS last_at,
               (SELECT count(*) FROM forgotten) AS forgotten
        INTO seen;
        IF seen.looks < most OR seen.forgotten = 0 AND seen.last_at = place.looked_from THEN
            -- All of that moment were looked at; or they fill a batch and are all held back, and the rest waits for the next pass.
            seen.last_at := seen.last_at + interval '1 microsecond';
        END IF;
        place.looked_from := coalesce(seen.last_at, place.looked_from);
        EXIT WHEN seen.forgotten > 0 OR seen.looks < most;
    END LOOP;

    IF seen.looks < most AND place.begun_at < called_at - pass_at_least THEN
        place.looked_from := NULL;
        place.begun_at := called_at;
    END IF;
    UPDATE fencepost.forgetting AS p SET looked_from = place.looked_from, begun_at = place.begun_at
    WHERE (p.looked_from, p.begun_at) IS DISTINCT FROM (place.looked_from, place.begun_at);
    RETURN seen.forgotten;
END
$$;
COMMENT ON FUNCTION fencepost.forget_effects IS 'Deletes ledger rows past their retention, whose lineage and dead letters are over';

-- Dead letters that wait, oldest or newest first, of any consumer: what was redriven or discarded stays in the table, and lists of
-- what is open would walk over all of it.
CREATE INDEX dead_letters_waiting_idx ON fencepost.dead_letters (dead_letter_id) WHERE state IN ('dead', 'redriving');
-- What operators did to a dead letter, for its story.
CREATE INDEX audit_dead_letter_idx ON fencepost.audit ((detail ->> 'dead_letter_id')) WHERE detail ? 'dead_letter_id';

-- Half-states are impossible, as before; the row that is written most is known at once.
CREATE OR REPLACE FUNCTION fencepost.is_whole(effect fencepost.effects) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
    -- A message that is handled is nearly every row there is, and each field that is looked at costs.
    IF effect.operation = 'fencepost.message' AND effect.state = 'succeeded' AND effect.finished_at IS NOT NULL
       AND effect.generation > 0 AND effect.sends >= 0
       AND num_nonnulls(effect.held_until, effect.result, effect.error_code, effect.run_id, effect.run_generation, effect.fingerprint,
                        effect.fingerprint_version, effect.provider_key, effect.provider_reference) = 0 THEN
        RETURN true;
    END IF;
    RETURN effect.state IN ('reserved', 'sent', 'succeeded', 'failed', 'unknown', 'applied', 'absent', 'disputed')
        AND (effect.held_until IS NOT NULL) = (effect.state = 'reserved')
        AND (effect.finished_at IS NOT NULL) = (effect.state IN ('succeeded', 'failed', 'applied', 'disputed'))
        AND (effect.result IS NULL OR effect.state IN ('succeeded', 'applied'))
        AND (effect.error_code IS NOT NULL) = (effect.state = 'failed')
        AND (effect.deadline_at IS NOT NULL OR effect.state IN ('reserved', 'succeeded') OR effect.operation = 'fencepost.message')
        AND (effect.run_id IS NULL) = (effect.run_generation IS NULL)
        AND (effect.fingerprint IS NULL) = (effect.operation = 'fencepost.message')
        AND (effect.fingerprint IS NULL) = (effect.fingerprint_version IS NULL)
        AND (effect.fingerprint IS NULL) = (effect.provider_key IS NULL)
        AND effect.generation > 0 AND effect.sends >= 0 AND coalesce(octet_length(effect.fingerprint), 32) = 32
        AND coalesce(octet_length(effect.result), 0) <= 1000000 AND coalesce(octet_length(effect.provider_reference), 0) <= 1000;
END
$$;

-- Records a message as handled; false: it was already. Called by its text, with BEGIN before it in one round trip: an INSERT would be
-- parsed and planned by every message, this is once a session.
CREATE FUNCTION fencepost.record_message(run_key text, tenant_id text, step text, holder text) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
BEGIN
    INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)
    VALUES (run_key, tenant_id, 0, step, 0, 'fencepost.message', 'succeeded', holder, clock_timestamp())
    ON CONFLICT DO NOTHING;
    RETURN FOUND;
END
$$;
REVOKE ALL ON FUNCTION fencepost.record_message FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.record_message TO fencepost_consumer;
