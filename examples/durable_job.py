"""A durable job from acceptance to answer: one command is accepted twice under one key, and executed once.

    python examples/durable_job.py

Prints ``created + replayed; generation=1; status=completed; events=2``. Without FENCEPOST_DATABASE_URL it starts a
PostgreSQL of its own, from packages, and stops it at the end.
"""

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from consumer_sdk import Handlers, RunContext, Worker, load_worker_settings
from fencepost.devservices import start_services
from fencepost.logs import configure_logs
from migrations.runner import migrate
from producer_sdk import Accepted, Command, Scope, Secrets
from producer_sdk.asyncpg import accept, read_run

handlers = Handlers()

STORY = """
SELECT j.lease_generation AS generation, (SELECT count(*) FROM fencepost.run_events AS e WHERE e.run_id = j.run_id) AS events
FROM fencepost.jobs AS j WHERE j.run_id = $1
"""


@handlers.handler("send_invoice")
async def send_invoice(context: RunContext, invoice: dict[str, object]) -> dict[str, object]:
    return {"sent": invoice["number"], "token": context.fencing_token}


async def accept_invoice(connection: asyncpg.Connection, key: str, keys: Secrets) -> Accepted:
    """What a service does per request, its own rows in the same transaction."""
    command = Command(workflow="send_invoice", input={"number": 42, "cents": 1999})
    scope = Scope(tenant_id="acme", principal="user-7", operation="POST /invoices")
    async with connection.transaction():
        return await accept(connection, command, scope, key, secrets=keys)


async def run(database_url: str) -> str:
    await migrate(database_url)
    connection = await asyncpg.connect(database_url)
    keys = Secrets({1: secrets.token_bytes(32)}, write=[1])
    key = secrets.token_hex(16)
    first = await accept_invoice(connection, key, keys)
    second = await accept_invoice(connection, key, keys)  # a client that got no answer sends again

    worker = Worker(handlers, load_worker_settings({"database_url": database_url, "worker_http_port": 0}))
    working = asyncio.create_task(worker.run())
    while (answer := await read_run(connection, second.run_id, tenant_id="acme")).finished_at is None:
        await asyncio.sleep(0.05)
    worker.stop()
    await working

    story = await connection.fetchrow(STORY, second.run_id)
    await connection.close()
    assert story is not None
    return f"{first.outcome} + {second.outcome}; generation={story['generation']}; status={answer.state}; events={story['events']}"


@contextmanager
def database() -> Iterator[str]:
    """The database that the environment names, or one that lives as long as this program."""
    if given := os.environ.get("FENCEPOST_DATABASE_URL"):
        yield given
        return
    with start_services() as services:
        yield services.create_database()


if __name__ == "__main__":
    configure_logs("error")
    with database() as address:
        print(asyncio.run(run(address)))
