-- The same from any language that speaks SQL: psql "$FENCEPOST_DATABASE_URL" -f examples/enqueue.sql
-- A SQL function cannot see autocommit. Without BEGIN the event would commit alone.
\set ON_ERROR_STOP on

CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents integer NOT NULL);

BEGIN;

INSERT INTO orders (customer, cents) VALUES ('ada', 4200) RETURNING id AS order_id
\gset

SELECT fencepost.enqueue(
    topic        => 'orders',
    type         => 'order.placed',
    key          => convert_to('order-' || :order_id, 'UTF8'),
    payload      => convert_to(json_build_object('order_id', :order_id, 'customer', 'ada', 'cents', 4200)::text, 'UTF8'),
    content_type => 'application/json',
    source       => 'example/orders'
) AS event_id;

COMMIT;
