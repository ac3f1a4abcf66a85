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
