-- What the adapters send: one statement a call, on the caller's connection, inside the caller's transaction.
-- The placeholders stand once each and in order, so that the same text serves drivers that number them and drivers
-- that count them. Every one has its cast, because drivers differ in the type that they declare for a None.

-- name: enqueue
-- Writes one event. By name, so that a parameter added to the function changes nothing here.
SELECT fencepost.enqueue(
    topic => $1::text, type => $2::text, key => $3::bytea, payload => $4::bytea, event_id => $5::uuid,
    header_names => $6::text[], header_values => $7::bytea[], source => $8::text, content_type => $9::text,
    tenant_id => $10::text, run_id => $11::text, step => $12::text, operation => $13::text,
    fencing_token => $14::bigint, traceparent => $15::text, tracestate => $16::text);

-- name: enqueue_many
-- Writes events in array order. A whole array is null when no event has that attribute.
SELECT fencepost.enqueue_many(
    topics => $1::text[], types => $2::text[], keys => $3::bytea[], payloads => $4::bytea[], event_ids => $5::uuid[],
    header_ends => $6::integer[], header_names => $7::text[], header_values => $8::bytea[], sources => $9::text[],
    content_types => $10::text[], tenant_ids => $11::text[], run_ids => $12::text[], steps => $13::text[],
    operations => $14::text[], fencing_tokens => $15::bigint[], traceparents => $16::text[],
    tracestates => $17::text[]);

-- name: accept
-- Accepts one command, or finds the run that its key stands for. The isolation level comes along, because it decides whether
-- trying again in this transaction can help. A new run's data key, where it has one, is kept here and not in a statement of its own.
SELECT a.outcome,
       CASE WHEN a.outcome = 'created' AND k.wrapped IS NOT NULL
            THEN fencepost.keep_data_key(t.tenant_id, a.accepted_run_id, k.wrapped) ELSE a.accepted_run_id END::text AS run_id,
       a.run_state, a.stored_key_version, a.stored_profile, a.stored_schema_version, a.stored_fingerprint,
       current_setting('transaction_isolation') AS isolation
FROM (SELECT $1::text AS tenant_id) AS t CROSS JOIN LATERAL fencepost.accept(
    tenant_id => t.tenant_id, run_id => $2::uuid, workflow => $3::text, workflow_version => $4::integer, topic => $5::text,
    input => $6::bytea, delay => make_interval(secs => $7::double precision), max_attempts => $8::integer,
    deadline => make_interval(secs => $9::double precision), cost_limit => $10::numeric, traceparent => $11::text,
    key_versions => $12::smallint[], key_hashes => $13::bytea[], fingerprints => $14::bytea[], written => $15::integer,
    profile => $16::smallint, retention => make_interval(secs => $17::double precision)) AS a
CROSS JOIN (SELECT $18::bytea AS wrapped) AS k;

-- name: cancel_run
-- Cancels a run, or asks its worker to. The last parameter is the version that the caller saw, or null.
SELECT c.outcome, c.run_state, c.run_version
FROM fencepost.cancel_run(
    tenant_id => $1::text, run_id => $2::uuid, actor => $3::text, reason => $4::text, expected_version => $5::bigint) AS c;

-- name: read_run
-- One row; all null if the tenant has no such run. Times as microseconds since 1970, which every driver reads alike.
SELECT r.workflow, r.state, r.version, r.attempts, r.output, r.error_code,
       (extract(epoch FROM r.created_at) * 1000000)::bigint AS created_at,
       (extract(epoch FROM r.started_at) * 1000000)::bigint AS started_at,
       (extract(epoch FROM r.finished_at) * 1000000)::bigint AS finished_at,
       (extract(epoch FROM r.cancel_requested_at) * 1000000)::bigint AS cancel_requested_at
FROM fencepost.read_run(tenant_id => $1::text, run_id => $2::uuid) AS r;

-- name: read_data_key
-- The data key of a run's lineage: found, erased or not_found; and wrapped, null if it has none.
SELECT d.outcome, d.wrapped FROM fencepost.read_data_key(tenant_id => $1::text, run_id => $2::uuid) AS d;

-- name: erase_lineage
-- Erases the lineage of a run. Not a producer's right: grant the function itself to whoever may.
SELECT e.outcome, e.runs
FROM fencepost.erase_lineage(tenant_id => $1::text, run_id => $2::uuid, actor => $3::text, reason => $4::text) AS e;
