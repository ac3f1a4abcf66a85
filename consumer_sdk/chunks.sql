-- The chunks of streams. Whoever holds a run's lease numbers them, so a chunk's place is known before it is written: a write that was
-- not answered is repeated and changes nothing, and the order of places is the order of commits.
--
-- Every write is fenced by the job's row, locked FOR SHARE: whoever claims the job next, or ends or erases its run, comes before it or
-- after it. The lease is judged after the lock. No row back: it was lost, or somebody else holds the row for the moment; `why_lost`
-- of runs.sql tells them apart.

-- name: open_stream
-- Where the stream of lineage $5 stands, for an execution that may not be the first: run $2 of tenant $3 in iteration $6, which owner
-- $1 holds under generation $4. If the newest attempt holds chunks of something that has not ended, or is another iteration's, the next
-- attempt is opened here; what was left behind loses its step, so that nobody carries it over.
-- One row: attempt (null: there is no stream yet), next offset, whether it was cut. And one more for each step that has ended and whose
-- chunks are in an earlier attempt: which, and the first and last offset there.
WITH held AS MATERIALIZED (
    SELECT j.lease_expires_at, j.cancel_requested_at FROM fencepost.jobs AS j
    WHERE j.run_id = $2 AND j.tenant_id = $3 AND j.lease_owner = $1 AND j.lease_generation = $4
    FOR SHARE SKIP LOCKED
),
fenced AS MATERIALIZED (
    SELECT FROM held AS h WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL
),
stream AS MATERIALIZED (
    SELECT s.attempt, s.first_attempt, s.iteration <> $6::integer AS is_anothers, s.kept_since IS NULL AS is_forgotten
    FROM fencepost.streams AS s
    WHERE s.root_run_id = $5 AND s.tenant_id = $3 AND EXISTS (SELECT FROM fenced)
),
parts AS MATERIALIZED (
    SELECT c.attempt, c.step, c.occurrence, min(c."offset") AS first_offset, max(c."offset") AS last_offset,
           max(c."offset") FILTER (WHERE c.data IS NOT NULL) AS last_stored
    FROM stream AS s JOIN fencepost.chunks AS c
        ON c.root_run_id = $5 AND c.tenant_id = $3 AND c.attempt BETWEEN s.first_attempt AND s.attempt
    WHERE NOT s.is_anothers
    GROUP BY c.attempt, c.step, c.occurrence
),
known AS MATERIALIZED (
    SELECT p.*, e.has_ended IS TRUE AS has_ended
    FROM parts AS p LEFT JOIN LATERAL (
        SELECT true AS has_ended FROM fencepost.effects AS x
        WHERE x.run_key = $5::uuid::text AND x.tenant_id = $3 AND x.iteration = $6 AND x.step = p.step AND x.occurrence = p.occurrence
          AND x.operation = 'fencepost.step'
        LIMIT 1
    ) AS e ON p.step <> ''
),
unfinished AS MATERIALIZED (
    SELECT k.step, k.occurrence FROM known AS k WHERE NOT k.has_ended AND k.attempt = (SELECT s.attempt FROM stream AS s)
),
opened AS (
    UPDATE fencepost.streams AS s
    SET attempt = s.attempt + 1, first_attempt = CASE WHEN t.is_anothers THEN s.attempt + 1 ELSE s.first_attempt END, iteration = $6,
        kept_since = coalesce(s.kept_since, clock_timestamp())
    FROM stream AS t
    WHERE s.root_run_id = $5 AND s.tenant_id = $3 AND (t.is_anothers OR t.is_forgotten OR EXISTS (SELECT FROM unfinished))
    RETURNING s.attempt
),
left_behind AS (
    UPDATE fencepost.chunks AS c SET step = ''
    WHERE c.root_run_id = $5 AND c.tenant_id = $3 AND c.attempt = (SELECT s.attempt FROM stream AS s) AND c.step <> ''
      AND (c.step, c.occurrence) IN (SELECT u.step, u.occurrence FROM unfinished AS u)
),
place AS (
    SELECT coalesce(o.attempt, s.attempt) AS attempt,
           CASE WHEN o.attempt IS NULL THEN (
               SELECT max(k.last_stored) + 1 FROM known AS k WHERE k.attempt = s.attempt) END AS next_offset,
           o.attempt IS NULL AND EXISTS (
               SELECT FROM known AS k WHERE k.attempt = s.attempt AND k.last_offset IS DISTINCT FROM k.last_stored) AS is_cut
    FROM stream AS s LEFT JOIN opened AS o ON true
),
elsewhere AS (
    SELECT DISTINCT ON (k.step, k.occurrence) k.* FROM known AS k WHERE k.has_ended ORDER BY k.step, k.occurrence, k.attempt DESC
)
SELECT p.attempt, coalesce(p.next_offset, 0) AS next_offset, coalesce(p.is_cut, false) AS is_cut,
       NULL::text AS step, NULL::integer AS occurrence, NULL::integer AS source, NULL::bigint AS first_offset, NULL::bigint AS last_offset
FROM fenced AS f LEFT JOIN place AS p ON true
UNION ALL
SELECT p.attempt, 0, false, e.step, e.occurrence, e.attempt, e.first_offset, e.last_offset
FROM place AS p JOIN elsewhere AS e ON e.attempt < p.attempt;

-- name: publish_chunks
-- Store chunks of many runs. By run: runs $2 of tenants $3 under generations $4 of owner $1; lineages $5, iterations $6, stream attempts
-- $7; $8: the first chunk opens the stream, unless that was done; $9: the chunks may be stored already. By chunk: the run's place in
-- those arrays $10, offsets $11, steps $12, occurrences $13, data $14. The places of the runs that the fence let through.
-- A plain INSERT: ON CONFLICT costs as much again, and would pass over a place that somebody else has taken.
WITH held AS MATERIALIZED (
    SELECT g.*, j.lease_expires_at, j.cancel_requested_at
    FROM unnest($2::uuid[], $3::text[], $4::bigint[], $5::uuid[], $6::integer[], $7::integer[], $8::boolean[], $9::boolean[])
        WITH ORDINALITY AS g(run_id, tenant_id, generation, root_run_id, iteration, attempt, opens, repeats, place)
    CROSS JOIN LATERAL (
        SELECT x.lease_expires_at, x.cancel_requested_at FROM fencepost.jobs AS x
        WHERE x.run_id = g.run_id AND x.tenant_id = g.tenant_id AND x.lease_owner = $1 AND x.lease_generation = g.generation
        FOR SHARE SKIP LOCKED
    ) AS j
),
fenced AS MATERIALIZED (
    SELECT * FROM held AS h WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL
),
opened AS (
    INSERT INTO fencepost.streams (root_run_id, tenant_id, attempt, iteration)
    SELECT f.root_run_id, f.tenant_id, f.attempt, f.iteration FROM fenced AS f WHERE f.opens
    ON CONFLICT DO NOTHING
),
stored AS (
    INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data)
    SELECT f.root_run_id, f.tenant_id, f.attempt, c."offset", f.iteration, c.step, c.occurrence, c.data
    FROM unnest($10::bigint[], $11::bigint[], $12::text[], $13::integer[], $14::bytea[]) AS c(place, "offset", step, occurrence, data)
    JOIN fenced AS f ON f.place = c.place
    WHERE NOT f.repeats OR (
        SELECT x.data IS NOT DISTINCT FROM c.data FROM fencepost.chunks AS x
        WHERE x.root_run_id = f.root_run_id AND x.tenant_id = f.tenant_id AND x.attempt = f.attempt AND x."offset" = c."offset"
    ) IS NOT TRUE
)
SELECT f.place FROM fenced AS f;

-- name: carry_chunks
-- Copy what step $9, occurrence $10, has in stream attempt $11 from offset $12 to $13 to attempt $7, from offset $8 on: lineage $5 in
-- iteration $6; run $2 of tenant $3, which owner $1 holds under generation $4. Only up to $14 chunks have room; where there are more,
-- or the step was cut, the mark of a cut stream follows. How many chunks, and whether it was cut.
WITH held AS MATERIALIZED (
    SELECT j.lease_expires_at, j.cancel_requested_at FROM fencepost.jobs AS j
    WHERE j.run_id = $2 AND j.tenant_id = $3 AND j.lease_owner = $1 AND j.lease_generation = $4
    FOR SHARE SKIP LOCKED
),
fenced AS MATERIALIZED (
    SELECT FROM held AS h WHERE h.lease_expires_at > clock_timestamp() AND h.cancel_requested_at IS NULL
),
found AS MATERIALIZED (
    SELECT n.place, CASE WHEN n.place < $14 THEN n.data END AS data
    FROM (
        SELECT row_number() OVER (ORDER BY c."offset") - 1 AS place, c.data FROM fencepost.chunks AS c
        WHERE c.root_run_id = $5 AND c.tenant_id = $3 AND c.attempt = $11 AND c."offset" BETWEEN $12 AND $13
          AND c.step = $9 AND c.occurrence = $10 AND EXISTS (SELECT FROM fenced)
        ORDER BY c."offset" LIMIT $14::bigint + 1
    ) AS n
),
carried AS (
    INSERT INTO fencepost.chunks (root_run_id, tenant_id, attempt, "offset", iteration, step, occurrence, data)
    SELECT $5, $3, $7, CASE WHEN f.data IS NULL THEN 9223372036854775807 ELSE $8::bigint + f.place END, $6, $9, $10, f.data
    FROM found AS f
    ON CONFLICT DO NOTHING
)
SELECT (SELECT count(f.data) FROM found AS f) AS carried, EXISTS (SELECT FROM found AS f WHERE f.data IS NULL) AS is_cut
FROM fenced;

-- name: send_live
-- Send the payloads $1 to whoever listens. False: nobody does.
SELECT fencepost.send_live($1::text[]) AS listened;

-- name: forget_chunks
-- Delete up to $2 chunks of lineages that ended longer ago than $1; how many.
SELECT fencepost.forget_chunks($1, $2) AS forgotten;
