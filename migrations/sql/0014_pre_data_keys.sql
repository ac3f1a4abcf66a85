-- One data key for each lineage: what its payloads are encoded with, wrapped by a key of the service. Erasing the lineage deletes the
-- row, and whatever the key had made is unreadable, in topics and in dumps without the keys as well.
--
-- A table of its own and no column of runs, so that a dump can leave it out: pg_dump --exclude-table-data=fencepost.data_keys.
CREATE TABLE fencepost.data_keys (
    root_run_id uuid        NOT NULL,
    tenant_id   text        COLLATE "C" NOT NULL,
    wrapped     bytea       NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT data_keys_pkey PRIMARY KEY (root_run_id, tenant_id),
    CONSTRAINT data_keys_run_fkey FOREIGN KEY (root_run_id, tenant_id) REFERENCES fencepost.runs ON DELETE CASCADE,
    CONSTRAINT data_keys_check CHECK (octet_length(wrapped) BETWEEN 1 AND 4096)
);
COMMENT ON TABLE fencepost.data_keys IS 'The data keys of lineages; without its key nothing of a lineage can be read';
COMMENT ON COLUMN fencepost.data_keys.wrapped IS 'As the service''s codec has wrapped it; the database cannot unwrap it';

-- Keeps the data key of a run that this transaction has accepted; the run's id, so that the statement that accepts can call it.
CREATE FUNCTION fencepost.keep_data_key(tenant_id text, run_id uuid, wrapped bytea) RETURNS uuid
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO fencepost.data_keys (root_run_id, tenant_id, wrapped) VALUES ($2, $1, $3) RETURNING root_run_id
$$;
COMMENT ON FUNCTION fencepost.keep_data_key IS 'Keeps the data key of a run that this transaction has accepted';

-- The data key of a run's lineage, by any of its runs.
--   found      wrapped is null: it has none, the service's own codec reads it.
--   erased     nobody can read anything of it any more.
--   not_found
CREATE FUNCTION fencepost.read_data_key(tenant_id text, run_id uuid, OUT outcome text, OUT wrapped bytea)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
BEGIN
    SELECT CASE WHEN r.erased_at IS NULL THEN 'found' ELSE 'erased' END, k.wrapped INTO outcome, wrapped
    FROM fencepost.runs AS r
    LEFT JOIN fencepost.data_keys AS k ON k.root_run_id = r.root_run_id AND k.tenant_id = r.tenant_id
    WHERE r.run_id = run_id AND r.tenant_id = tenant_id;
    outcome := coalesce(outcome, 'not_found');
END
$$;
COMMENT ON FUNCTION fencepost.read_data_key IS 'The data key of a run''s lineage, and whether it was erased';

-- Operators read no keys: they erase, list and replay without them.
REVOKE ALL ON FUNCTION fencepost.keep_data_key, fencepost.read_data_key FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fencepost.keep_data_key TO fencepost_producer;
GRANT EXECUTE ON FUNCTION fencepost.read_data_key TO fencepost_producer, fencepost_consumer;
GRANT SELECT ON fencepost.data_keys TO fencepost_consumer;
