-- Messages in the ledger, and those that were given up.
--
-- A message's own row, operation 'fencepost.message', says that a consumer is done with it: succeeded, or failed and then a dead
-- letter. It is bound to no request and asks no provider, so it has no fingerprint and no provider's key.

ALTER TABLE fencepost.effects
    ALTER COLUMN fingerprint DROP NOT NULL,
    ALTER COLUMN fingerprint_version DROP NOT NULL,
    ALTER COLUMN provider_key DROP NOT NULL,
    DROP CONSTRAINT effects_state_check;

-- A CHECK's expression is parsed anew by every statement that inserts, a function's body once a session: of a single row's insert the
-- expression was two thirds of the cost.
CREATE FUNCTION fencepost.is_whole(effect fencepost.effects) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
BEGIN
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
REVOKE ALL ON FUNCTION fencepost.is_whole FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.is_whole TO fencepost_consumer;
ALTER TABLE fencepost.effects ADD CONSTRAINT effects_state_check CHECK (fencepost.is_whole(effects));
COMMENT ON COLUMN fencepost.effects.step IS
    'Of a run its workflow or the handler''s step; of a message the consumer''s name and the handler''s step';
-- What is past its retention, oldest first.
CREATE INDEX effects_age_idx ON fencepost.effects (created_at);

-- A message that a consumer gave up, whole: bytes, headers and place, why, and what became of it since.
--   dead       nobody works on it            redriving  an operator has asked for it to be handled anew
--   redriven   it was handled after all      discarded  an operator has given it up for good
-- generation is the fence of a redrive: +1 each time that a consumer takes it in hand.
CREATE TABLE fencepost.dead_letters (
    dead_letter_id uuid        NOT NULL DEFAULT fencepost.uuid_v7(),
    run_key        text        COLLATE "C" NOT NULL,
    tenant_id      text        COLLATE "C" NOT NULL,
    step           text        COLLATE "C" NOT NULL,
    consumer       text        COLLATE "C" NOT NULL,
    topic          text        NOT NULL,
    "partition"    integer     NOT NULL,
    "offset"       bigint      NOT NULL,
    recorded_at    timestamptz NOT NULL,
    event_type     text,
    key            bytea,
    payload        bytea,
    header_names   bytea[]     NOT NULL,
    header_values  bytea[]     NOT NULL,
    reason         text        NOT NULL,
    error_class    text        NOT NULL,
    error_code     text        NOT NULL,
    attempts       integer     NOT NULL,
    state          text        NOT NULL DEFAULT 'dead',
    generation     bigint      NOT NULL DEFAULT 0,
    holder         text,
    held_until     timestamptz,
    redrives       integer     NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT dead_letters_pkey PRIMARY KEY (dead_letter_id),
    CONSTRAINT dead_letters_message_key UNIQUE (run_key, tenant_id, step),
    CONSTRAINT dead_letters_state_check CHECK (
        state IN ('dead', 'redriving', 'redriven', 'discarded')
        AND (holder IS NULL) = (held_until IS NULL) AND (holder IS NULL OR state = 'redriving')
        AND cardinality(header_names) = cardinality(header_values) AND attempts >= 0 AND redrives >= 0)
);
CREATE INDEX dead_letters_open_idx ON fencepost.dead_letters (consumer, dead_letter_id) WHERE state IN ('dead', 'redriving');
CREATE INDEX dead_letters_redriving_idx ON fencepost.dead_letters (consumer, dead_letter_id) WHERE state = 'redriving';

-- Messages that may have ended the process which handled them, and how often they were begun since. A message that kills its consumer
-- has no error to be counted by: it is counted before.
CREATE TABLE fencepost.message_trials (
    run_key   text        COLLATE "C" NOT NULL,
    tenant_id text        COLLATE "C" NOT NULL,
    step      text        COLLATE "C" NOT NULL,
    trials    integer     NOT NULL DEFAULT 1,
    begun_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT message_trials_pkey PRIMARY KEY (run_key, tenant_id, step)
);
CREATE INDEX message_trials_age_idx ON fencepost.message_trials (begun_at);

-- Gives a message up: its outcome, the dead letter and the outbox row that publishes it, in one transaction. Null: the message has an
-- outcome already, and nothing was changed. The published copy is bounded by the outbox; the table keeps the whole.
CREATE FUNCTION fencepost.store_dead_letter(
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
BEGIN
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
    -- A row is left where the ledger has forgotten the message since: it is given up once more.
    ON CONFLICT ON CONSTRAINT dead_letters_message_key DO UPDATE
    SET topic = excluded.topic, "partition" = excluded."partition", "offset" = excluded."offset", recorded_at = excluded.recorded_at,
        event_type = excluded.event_type, key = excluded.key, payload = excluded.payload, header_names = excluded.header_names,
        header_values = excluded.header_values, reason = excluded.reason, error_class = excluded.error_class,
        error_code = excluded.error_code, attempts = excluded.attempts, state = 'dead', holder = NULL, held_until = NULL,
        changed_at = clock_timestamp()
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
        PERFORM fencepost.ring(rung);
    END IF;
    RETURN stored;
END
$$;
COMMENT ON FUNCTION fencepost.store_dead_letter IS 'Gives a message up: outcome, dead letter and outbox row in one transaction';

-- Deletes up to `most` rows that are older than `age`: not while a run of the lineage is alive, or a dead letter of the message may be
-- redriven. A function, since whoever could delete any row could have its effect repeated.
CREATE FUNCTION fencepost.forget_effects(age interval, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    forgotten integer;
BEGIN
    DELETE FROM fencepost.effects AS e
    USING (
        SELECT c.run_key, c.tenant_id, c.iteration, c.step, c.occurrence, c.operation FROM fencepost.effects AS c
        WHERE c.created_at < clock_timestamp() - age AND c.finished_at < clock_timestamp() - age
          AND NOT EXISTS (
            SELECT FROM fencepost.runs AS r
            WHERE c.run_id IS NOT NULL AND r.tenant_id = c.tenant_id AND r.finished_at IS NULL
              AND (r.run_id = CASE WHEN c.run_id IS NOT NULL THEN c.run_key::uuid END
                   OR r.root_run_id <> r.run_id AND r.root_run_id = CASE WHEN c.run_id IS NOT NULL THEN c.run_key::uuid END))
          AND NOT EXISTS (
            SELECT FROM fencepost.dead_letters AS d
            WHERE d.run_key = c.run_key AND d.tenant_id = c.tenant_id AND d.state IN ('dead', 'redriving'))
        ORDER BY c.created_at LIMIT most FOR UPDATE SKIP LOCKED
    ) AS old
    WHERE e.run_key = old.run_key AND e.tenant_id = old.tenant_id AND e.iteration = old.iteration AND e.step = old.step
      AND e.occurrence = old.occurrence AND e.operation = old.operation;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END
$$;
COMMENT ON FUNCTION fencepost.forget_effects IS 'Deletes ledger rows past their retention, whose lineage and dead letters are over';

-- An operator asks for a dead letter to be handled anew. The consumer that it belongs to does so, under the same identity.
--   redriving  asked for        not_found  no such dead letter
--   not_dead   somebody else was first, or it is over; letter_state says which
--   ambiguous  an effect may have happened that no ledger row tells of; effects_checked says that somebody has looked
CREATE FUNCTION fencepost.redrive_dead_letter(
    dead_letter_id uuid, effects_checked boolean, actor text, reason text, OUT outcome text, OUT letter_state text
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    letter fencepost.dead_letters;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    SELECT * INTO letter FROM fencepost.dead_letters AS d WHERE d.dead_letter_id = dead_letter_id FOR UPDATE;
    letter_state := letter.state;
    outcome := CASE
        WHEN letter.dead_letter_id IS NULL THEN 'not_found'
        WHEN letter.state <> 'dead' THEN 'not_dead'
        WHEN letter.reason = 'ambiguous' AND effects_checked IS NOT TRUE THEN 'ambiguous'
        ELSE 'redriving'
    END;
    IF outcome = 'redriving' THEN
        letter_state := 'redriving';
        UPDATE fencepost.dead_letters AS d SET state = 'redriving', redrives = d.redrives + 1, changed_at = clock_timestamp()
        WHERE d.dead_letter_id = dead_letter_id;
        INSERT INTO fencepost.audit (actor, command, reason, detail)
        VALUES (actor, 'dead-letters redrive', reason, jsonb_build_object(
            'dead_letter_id', dead_letter_id, 'consumer', letter.consumer, 'effects_checked', effects_checked IS TRUE));
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.redrive_dead_letter IS 'Asks a consumer to handle a dead letter anew; audited';

-- An operator gives a dead letter up for good: it stays, and can no longer be redriven. Outcomes as above, discarded for redriving.
CREATE FUNCTION fencepost.discard_dead_letter(dead_letter_id uuid, actor text, reason text, OUT outcome text, OUT letter_state text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    letter fencepost.dead_letters;
BEGIN
    PERFORM fencepost.check_actor(actor, reason);
    SELECT * INTO letter FROM fencepost.dead_letters AS d WHERE d.dead_letter_id = dead_letter_id FOR UPDATE;
    letter_state := letter.state;
    outcome := CASE
        WHEN letter.dead_letter_id IS NULL THEN 'not_found'
        WHEN letter.state <> 'dead' THEN 'not_dead'
        ELSE 'discarded'
    END;
    IF outcome = 'discarded' THEN
        letter_state := 'discarded';
        UPDATE fencepost.dead_letters AS d SET state = 'discarded', changed_at = clock_timestamp()
        WHERE d.dead_letter_id = dead_letter_id;
        INSERT INTO fencepost.audit (actor, command, reason, detail)
        VALUES (actor, 'dead-letters discard', reason, jsonb_build_object(
            'dead_letter_id', dead_letter_id, 'consumer', letter.consumer));
    END IF;
END
$$;
COMMENT ON FUNCTION fencepost.discard_dead_letter IS 'Gives a dead letter up for good; audited';

REVOKE ALL ON FUNCTION fencepost.forget_effects, fencepost.store_dead_letter, fencepost.redrive_dead_letter, fencepost.discard_dead_letter FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.forget_effects, fencepost.store_dead_letter TO fencepost_consumer;
GRANT EXECUTE ON FUNCTION fencepost.redrive_dead_letter, fencepost.discard_dead_letter TO fencepost_operator;
GRANT SELECT ON fencepost.dead_letters TO fencepost_operator, fencepost_consumer;
GRANT UPDATE (reason, error_class, error_code, attempts, state, generation, holder, held_until, changed_at)
    ON fencepost.dead_letters TO fencepost_consumer;
GRANT SELECT ON fencepost.message_trials TO fencepost_operator;
GRANT SELECT, INSERT, UPDATE, DELETE ON fencepost.message_trials TO fencepost_consumer;
