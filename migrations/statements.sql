-- The migration runner's own statements.

-- name: create_ledger
CREATE SCHEMA IF NOT EXISTS fencepost;
CREATE TABLE IF NOT EXISTS fencepost.migrations (
    number     integer     PRIMARY KEY,
    title      text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: lock_runner
-- A session lock: it spans the transactions of all files, and goes with the connection if the runner dies.
SELECT pg_advisory_lock(hashtext('fencepost.migrations'));

-- name: unlock_runner
SELECT pg_advisory_unlock(hashtext('fencepost.migrations'));

-- name: ledger_exists
SELECT to_regclass('fencepost.migrations') IS NOT NULL;

-- name: applied
SELECT number, checksum, to_char(applied_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS applied_at
FROM fencepost.migrations ORDER BY number;

-- name: record
INSERT INTO fencepost.migrations (number, title, checksum) VALUES ($1, $2, $3);
