-- What a consumer writes of messages. A message's row in the ledger, operation 'fencepost.message', is the proof that its consumer is
-- done with it: whoever inserts it first has handled the message, and everybody else finds a duplicate.
--
-- $1..$3 are arrays: run keys, tenants and steps, one of each a message. Batches insert in one order, so that two cannot deadlock.

-- name: known_messages
-- Which of the messages have an outcome, by their place in the arrays.
SELECT g.n::integer AS n
FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS g(run_key, tenant_id, step, n)
CROSS JOIN LATERAL (
    SELECT FROM fencepost.effects AS e
    WHERE e.run_key = g.run_key AND e.tenant_id = g.tenant_id AND e.iteration = 0 AND e.step = g.step AND e.occurrence = 0
      AND e.operation = 'fencepost.message'
    LIMIT 1  -- one look into the index a message, whatever the statistics say: joined, an empty table's plan reads the whole ledger
) AS e;

-- name: record_message
-- Record message ($1 run key, $2 tenant, $3 step) as handled by $4: a row if it was not yet. It goes out with BEGIN, its parameters
-- inlined, as a transaction's first statement; why it comes first, see record_messages.
SELECT 1 WHERE fencepost.record_message($1, $2, $3, $4);

-- name: record_messages
-- Record messages as handled by $4; those that were not yet. Within a transaction it comes first, so that of two deliveries of one
-- message the second waits here and then finds a duplicate; $5 and $6 then bound the transaction's statements and its silence, in
-- milliseconds as text (0: no bound of its own).
WITH limits AS MATERIALIZED (
    SELECT set_config('statement_timeout', $5, true), set_config('idle_in_transaction_session_timeout', $6, true)
    WHERE $5 <> '0'
)
INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)
SELECT g.run_key, g.tenant_id, 0, g.step, 0, 'fencepost.message', 'succeeded', $4, clock_timestamp()
FROM (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS g(run_key, tenant_id, step)
      WHERE (SELECT count(*) FROM limits) >= 0 ORDER BY 1, 2, 3) AS g
ON CONFLICT DO NOTHING
RETURNING run_key, tenant_id, step;

-- name: store_dead_letter
SELECT fencepost.store_dead_letter($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,
                                   $22, $23, $24, $25) AS dead_letter_id;

-- name: claim_redrives
-- Take up to $4 dead letters of consumer $2 in hand for $3, which an operator wants handled anew.
UPDATE fencepost.dead_letters AS d
SET generation = d.generation + 1, holder = $1, held_until = clock_timestamp() + $3::interval
FROM (
    SELECT c.dead_letter_id FROM fencepost.dead_letters AS c
    WHERE c.consumer = $2 AND c.state = 'redriving' AND (c.held_until <= clock_timestamp()) IS NOT FALSE
    ORDER BY c.dead_letter_id LIMIT $4 FOR UPDATE SKIP LOCKED
) AS wanted
WHERE d.dead_letter_id = wanted.dead_letter_id
RETURNING d.*;

-- name: finish_redrive
-- Dead letter $1, in hand under generation $2, is handled: its message's row with it. $3..$5 its identity, $6 holder; $7, $8 as in
-- record_messages. `ended`: it was still in hand. `recorded`: nobody had handled it yet.
WITH limits AS MATERIALIZED (
    SELECT set_config('statement_timeout', $7, true), set_config('idle_in_transaction_session_timeout', $8, true)
    WHERE $7 <> '0'
),
ended AS (
    UPDATE fencepost.dead_letters AS d
    SET state = 'redriven', holder = NULL, held_until = NULL, changed_at = clock_timestamp()
    WHERE d.dead_letter_id = $1 AND d.generation = $2 AND d.state = 'redriving' AND (SELECT count(*) FROM limits) >= 0
    RETURNING d.dead_letter_id
),
recorded AS (
    INSERT INTO fencepost.effects AS e (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)
    SELECT $3, $4, 0, $5, 0, 'fencepost.message', 'succeeded', $6, clock_timestamp() FROM ended
    ON CONFLICT (run_key, tenant_id, iteration, step, occurrence, operation) DO UPDATE
    SET state = 'succeeded', generation = e.generation + 1, holder = excluded.holder, error_class = NULL, error_code = NULL,
        finished_at = excluded.finished_at
    WHERE e.state = 'failed'
    RETURNING e.run_key
)
SELECT EXISTS (SELECT FROM ended) AS ended, EXISTS (SELECT FROM recorded) AS recorded;

-- name: fail_redrive
-- Dead letter $1, in hand under generation $2, is dead once more: $3 reason, $4 error class, $5 error code, $6 attempts on top.
UPDATE fencepost.dead_letters AS d
SET state = 'dead', holder = NULL, held_until = NULL, reason = $3, error_class = $4, error_code = $5, attempts = d.attempts + $6,
    changed_at = clock_timestamp()
WHERE d.dead_letter_id = $1 AND d.generation = $2 AND d.state = 'redriving'
RETURNING d.dead_letter_id;

-- name: release_redrive
-- Dead letter $1, in hand under generation $2, is given back: it was not handled, and did not fail.
UPDATE fencepost.dead_letters AS d SET holder = NULL, held_until = NULL
WHERE d.dead_letter_id = $1 AND d.generation = $2 AND d.state = 'redriving'
RETURNING d.dead_letter_id;

-- name: begin_trial
-- A message is begun ($1 run key, $2 tenant, $3 step) that may have ended the process which handled it before. How often it was.
INSERT INTO fencepost.message_trials AS t (run_key, tenant_id, step) VALUES ($1, $2, $3)
ON CONFLICT (run_key, tenant_id, step) DO UPDATE SET trials = t.trials + 1, begun_at = clock_timestamp()
RETURNING t.trials;

-- name: end_trial
-- The trial that made $4 of them has ended, and its process has not: $5 are left. It may be said twice.
WITH last AS (
    DELETE FROM fencepost.message_trials AS t
    WHERE t.run_key = $1 AND t.tenant_id = $2 AND t.step = $3 AND t.trials = $4::integer AND $5::integer = 0
)
UPDATE fencepost.message_trials AS t SET trials = $5
WHERE t.run_key = $1 AND t.tenant_id = $2 AND t.step = $3 AND t.trials = $4 AND $5 > 0
RETURNING t.trials;

-- name: forget_trials
-- Delete up to $2 trials begun longer than $1 ago.
DELETE FROM fencepost.message_trials AS t
USING (SELECT c.run_key, c.tenant_id, c.step FROM fencepost.message_trials AS c WHERE c.begun_at < clock_timestamp() - $1::interval
       ORDER BY c.begun_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
WHERE t.run_key = old.run_key AND t.tenant_id = old.tenant_id AND t.step = old.step
RETURNING t.trials;

-- name: oldest_remembered
-- Up to when the ledger remembers, if it remembers for $1: an older message may have been handled and forgotten.
SELECT clock_timestamp() - $1::interval AS oldest;

-- name: forget_effects
-- Delete up to $2 rows older than $1: not while a run of the lineage is alive, or a dead letter of the message may be redriven.
SELECT fencepost.forget_effects($1, $2) AS forgotten;

-- name: dead_letters_waiting
-- How many dead letters of consumer $1 wait for an operator, counted up to $2, and since when the oldest has.
SELECT count(*)::integer AS waiting, coalesce(extract(epoch FROM clock_timestamp() - min(d.created_at)), 0)::float8 AS oldest_seconds
FROM (SELECT created_at FROM fencepost.dead_letters WHERE consumer = $1 AND state = 'dead' ORDER BY dead_letter_id LIMIT $2) AS d;
