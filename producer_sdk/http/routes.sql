-- What durable routes ask of the database. Every statement is a function's call: a producer may touch no table of the schema.

-- name: find_key
-- What a tenant's key stands for: its hashes under versions, of which the first so many are written. The last: keep it for this
-- transaction. Placeholders stand once each, in order and with their casts, for drivers that count them.
SELECT outcome, root_run_id::text, monitor_id::text, stored_key_version, stored_profile, stored_schema_version, stored_fingerprint
FROM fencepost.find_key($1::text, $2::smallint[], $3::bytea[], $4::integer, $5::boolean);

-- name: look_up
-- What a key of tenant $1 stands for: hashes $3 under the versions $2, of which the first $4 are written. Nothing is kept; and how
-- the lineage stands comes along, which is all that a replay needs.
SELECT k.outcome, k.root_run_id::text, k.monitor_id::text AS key_monitor_id, k.stored_key_version, k.stored_profile,
       k.stored_schema_version, k.stored_fingerprint, s.*
FROM fencepost.find_key($1, $2, $3, $4, false) AS k
LEFT JOIN LATERAL fencepost.read_lineages(ARRAY[k.root_run_id], ARRAY[$1::text]) AS s ON k.outcome = 'found';

-- name: start_lineage
-- Make an accepted run of a tenant a lineage: its monitor's id, its route, and whose it is. Placeholders as above.
SELECT fencepost.start_lineage($1::text, $2::uuid, $3::uuid, $4::text, $5::bytea, $6::smallint);

-- name: read_lineages
-- How the lineages of roots $1, tenants $2 stand, by their place.
SELECT * FROM fencepost.read_lineages($1, $2);

-- name: read_chunks
-- Up to $5 chunks or $6 bytes each behind attempts $3 and offsets $4 of the lineages of roots $1, tenants $2.
SELECT * FROM fencepost.read_chunks($1, $2, $3, $4, $5, $6);

-- name: find_monitor
-- The lineage behind the monitor's id $2 of tenant $1; a row of nulls if there is none.
SELECT root_run_id, newest_run_id, route, principal_hash, principal_version FROM fencepost.find_monitor($1, $2);

-- name: keep_answer
-- Keep the answer $4 that was shaped of run $3 of the lineage of root $2, tenant $1; the one that is kept, null if none may be.
SELECT fencepost.keep_answer($1, $2, $3, $4) AS answer;

-- name: cancel
-- Cancel the newest run of the lineage, $2 of tenant $1, or ask its worker to; $3 and $4 go to the audit.
SELECT c.outcome, c.run_state, c.run_version
FROM fencepost.cancel_run(tenant_id => $1::text, run_id => $2::uuid, actor => $3::text, reason => $4::text) AS c;

-- name: arm_lineages
-- From now until $1 milliseconds ahead, whoever changes a lineage rings.
SELECT fencepost.arm_lineages($1);

-- name: arm_live
-- From now until $1 milliseconds ahead, live chunks are sent.
SELECT fencepost.arm_live($1);
