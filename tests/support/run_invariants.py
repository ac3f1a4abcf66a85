"""What holds of all rows of runs at every moment, whoever did what: each as SQL that finds the runs that break it."""

from typing import Any, Final

import asyncpg

__all__ = ["WATCH", "violations"]

_ENDED: Final = "('run_completed', 'run_failed', 'run_cancelled', 'run_continued')"
_INVARIANTS: Final = {
    "a run and its job agree": """
        SELECT r.run_id FROM fencepost.runs AS r LEFT JOIN fencepost.jobs AS j USING (run_id, tenant_id)
        WHERE (r.state, coalesce(j.state, 'none')) NOT IN (
            ('queued', 'queued'), ('running', 'leased'), ('running', 'queued'),
            ('completed', 'completed'), ('failed', 'dead'), ('cancelled', 'cancelled'), ('continued', 'completed'))""",
    "an ended run has one terminal event, its last, and no other run has any": f"""
        SELECT r.run_id FROM fencepost.runs AS r LEFT JOIN fencepost.run_events AS e USING (run_id, tenant_id)
        GROUP BY r.run_id, r.tenant_id
        HAVING array_agg(e.type ORDER BY e.sequence) FILTER (WHERE e.type IN {_ENDED})
                   IS DISTINCT FROM CASE WHEN r.state IN ('completed', 'failed', 'cancelled', 'continued')
                                                 THEN ARRAY['run_' || r.state] END
            OR max(e.sequence) FILTER (WHERE e.type IN {_ENDED}) < max(e.sequence)""",
    "events are 1 to n, the first says queued": """
        SELECT r.run_id FROM fencepost.runs AS r LEFT JOIN fencepost.run_events AS e USING (run_id, tenant_id)
        GROUP BY r.run_id, r.tenant_id
        HAVING (count(e.sequence), min(e.sequence), max(e.sequence))
                   IS DISTINCT FROM (r.event_sequence, 1::bigint, r.event_sequence)
            OR (array_agg(e.type ORDER BY e.sequence))[1] <> 'run_queued'""",
    "each event is one row of the outbox, in order": """
        SELECT coalesce(e.run_id, o.run_id) FROM
            (SELECT run_id, sequence, 'fencepost.' || type AS type FROM fencepost.run_events) AS e
        FULL JOIN
            (SELECT run_id::uuid AS run_id, row_number() OVER (PARTITION BY key ORDER BY id) AS sequence, event_type AS type,
                    convert_from(key, 'UTF8')::uuid = run_id::uuid
                        AND (convert_from(payload, 'UTF8')::jsonb ->> 'sequence')::bigint
                            = row_number() OVER (PARTITION BY key ORDER BY id) AS true_to_it
             FROM fencepost.outbox) AS o
        ON (e.run_id, e.sequence, e.type) = (o.run_id, o.sequence, o.type)
        WHERE e.run_id IS NULL OR o.true_to_it IS NOT TRUE""",
    "no more attempts than allowed": "SELECT run_id FROM fencepost.jobs WHERE attempts > max_attempts",
    "a generation is one claim, and open while it is leased": """
        SELECT j.run_id FROM fencepost.jobs AS j LEFT JOIN fencepost.job_attempts AS a USING (run_id, tenant_id)
        GROUP BY j.run_id, j.tenant_id
        HAVING (count(a.generation), coalesce(max(a.generation), 0)) IS DISTINCT FROM (j.lease_generation, j.lease_generation)
            OR array_agg(a.generation) FILTER (WHERE a.generation IS NOT NULL AND a.finished_at IS NULL)
                   IS DISTINCT FROM CASE WHEN j.state = 'leased' THEN ARRAY[j.lease_generation] END""",
    "leased is owner and expiry": """
        SELECT run_id FROM fencepost.jobs
        WHERE NOT (state = 'leased') = ALL (ARRAY[lease_owner IS NOT NULL, lease_expires_at IS NOT NULL])""",
    "a completion is by the last attempt": """
        SELECT r.run_id FROM fencepost.runs AS r JOIN fencepost.jobs AS j USING (run_id, tenant_id)
        LEFT JOIN fencepost.job_attempts AS a ON a.run_id = r.run_id AND a.tenant_id = r.tenant_id AND a.outcome = 'completed'
        LEFT JOIN fencepost.run_events AS e
            ON e.run_id = r.run_id AND e.tenant_id = r.tenant_id AND e.type IN ('run_completed', 'run_continued')
        GROUP BY r.run_id, r.tenant_id, j.run_id, j.tenant_id
        HAVING (array_agg(a.generation), array_agg(e.fencing_token)) IS DISTINCT FROM
            CASE WHEN r.state IN ('completed', 'continued') THEN (ARRAY[j.lease_generation], ARRAY[j.lease_generation])
                 ELSE (ARRAY[NULL::bigint], ARRAY[NULL::bigint]) END""",
    "a replay is a run of the same lineage": """
        SELECT x.run_id FROM fencepost.job_replays AS x JOIN fencepost.runs AS old USING (run_id, tenant_id)
        LEFT JOIN fencepost.runs AS new ON new.run_id = x.new_run_id AND new.tenant_id = x.tenant_id
        WHERE old.state <> 'failed' OR (new.replay_of, new.root_run_id) IS DISTINCT FROM (old.run_id, old.root_run_id)""",
}
_ALL: Final = "\nUNION ALL\n".join(
    f"SELECT '{name}' AS broken, run_id::text FROM ({sql}) AS found(run_id)" for name, sql in _INVARIANTS.items()
)

# What a look at the rows cannot show, because it is about two moments: the statement that does it fails. A test may move the
# time of creation; the terminal event may draw its sequence after the state has changed.
WATCH: Final = """
CREATE OR REPLACE FUNCTION public.watch_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.version < OLD.version OR NEW.event_sequence < OLD.event_sequence THEN
        RAISE EXCEPTION 'a run went back';
    ELSIF NEW.state <> OLD.state AND NEW.version <= OLD.version THEN
        RAISE EXCEPTION 'a run changed its state under one version';
    ELSIF OLD.finished_at IS NOT NULL
        AND to_jsonb(NEW) - '{event_sequence,created_at}'::text[] <> to_jsonb(OLD) - '{event_sequence,created_at}'::text[] THEN
        RAISE EXCEPTION 'an ended run changed';
    END IF;
    RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER watch BEFORE UPDATE ON fencepost.runs FOR EACH ROW EXECUTE FUNCTION public.watch_run();

CREATE OR REPLACE FUNCTION public.watch_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.lease_generation NOT IN (OLD.lease_generation, OLD.lease_generation + 1) THEN
        RAISE EXCEPTION 'a generation was skipped or used again';
    ELSIF OLD.finished_at IS NOT NULL AND NEW.state <> OLD.state THEN
        RAISE EXCEPTION 'an ended job changed';
    END IF;
    RETURN NEW;
END
$$;
CREATE OR REPLACE TRIGGER watch BEFORE UPDATE ON fencepost.jobs FOR EACH ROW EXECUTE FUNCTION public.watch_job();
"""


async def violations(connection: "asyncpg.Connection[Any]") -> list[tuple[str, str]]:
    """(broken invariant, run), for every one."""
    return [(row["broken"], row["run_id"]) for row in await connection.fetch(_ALL)]
