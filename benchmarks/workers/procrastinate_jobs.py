"""The baseline of the jobs benchmark: procrastinate's own worker on jobs that do nothing, deferred in bulk beforehand.

Its pool keeps its default size, four connections: with ten or twenty it is slower on two cores.
"""

import time
from typing import Any, Final

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks.workers import ready_and_wait, run_worker

_JOBS_PER_CALL: Final = 1_000


async def procrastinate_jobs(kafka: str, database_url: str, rows: int, concurrency: int) -> dict[str, Any]:
    """Create the schema and ``rows`` jobs, then work until none is left."""
    app = App(connector=PsycopgConnector(conninfo=database_url))

    @app.task
    async def noop() -> None:
        """Returns at once."""

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for begun in range(0, rows, _JOBS_PER_CALL):
            await noop.batch_defer_async(*[{}] * min(_JOBS_PER_CALL, rows - begun))
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
            await connection.execute("VACUUM ANALYZE")
            await connection.execute("CHECKPOINT")
        await ready_and_wait()
        began = time.process_time()
        await app.run_worker_async(concurrency=concurrency, wait=False, install_signal_handlers=False)
        return {"cpu_seconds": time.process_time() - began}


if __name__ == "__main__":
    run_worker(procrastinate_jobs)
