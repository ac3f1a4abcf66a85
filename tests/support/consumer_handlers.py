"""Handlers for consumers that tests run as processes, one of each kind. The outside world is a table that no ledger guards.

Every call that gets through is a row of ``calls``; whoever is called twice for one message shows there.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Final

import asyncpg

from consumer_sdk import Absent, Applied, CallLimits, Effect, Message, MessageContext, MessageHandlers, Retry, Terminal

__all__ = ["SCHEMA", "app"]

#: What the handlers write to, beside the ledger.
SCHEMA: Final = """
CREATE TABLE calls (provider_key text, event_id text, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE written (event_id text, kind text, key text, n bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE begun (event_id text, process integer);
"""
LIMITS: Final = CallLimits(timeout_seconds=1, in_flight_seconds=0.5)
_SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.5)

app = MessageHandlers()


async def execute(statement: str, *arguments: object) -> Sequence[Any]:
    """A statement of the outside world's, committed by itself."""
    connection = await asyncpg.connect(os.environ["FENCEPOST_DATABASE_URL"])
    try:
        return await connection.fetch(statement, *arguments)
    finally:
        await connection.close()


async def charge(event_id: str, effect: Effect) -> dict[str, str]:
    """A provider that honours no key."""
    await execute("INSERT INTO calls VALUES ($1, $2)", effect.key, event_id)
    return {"receipt": event_id}


@app.reconciler("charge")
async def charged(effect: Effect) -> Applied | Absent:
    rows = await execute("SELECT event_id FROM calls WHERE provider_key = $1", effect.key)
    return Applied({"receipt": rows[0]["event_id"]}) if rows else Absent()


@app.handler("once", step="once", attempts=50, retry=_SOON)
async def once(message: Message[Any], context: MessageContext) -> None:
    await context.once(
        "charge", request=message.value, call=lambda effect: charge(message.event_id, effect), limits=LIMITS
    )  # fmt: skip


@app.handler("transaction", step="transaction", attempts=50, retry=_SOON)
async def transaction(message: Message[Any], context: MessageContext) -> None:
    async with context.transaction() as connection:
        await _write(connection, message)


@app.handler("both", step="both", attempts=50, retry=_SOON)
async def both(message: Message[Any], context: MessageContext) -> None:
    await context.once("charge", request=message.value, call=lambda effect: charge(message.event_id, effect), limits=LIMITS)
    async with context.transaction() as connection:
        await _write(connection, message)


@app.batch_handler("batch", step="batch", attempts=50, retry=_SOON)
async def batch(messages: Sequence[Message[Any]], connection: "asyncpg.Connection[Any]") -> None:
    for message in messages:
        await _write(connection, message)


@app.handler("poison", step="poison")
async def poison(message: Message[Any], context: MessageContext) -> None:
    raise Terminal("poison")


@app.handler("fencepost.run_queued", step="execute", workflow="report", attempts=50, retry=_SOON)
async def execute_run(message: Message[Any], context: MessageContext) -> None:
    await context.once("charge", request="run", call=lambda effect: charge(message.event_id, effect), limits=LIMITS)
    async with context.transaction() as connection:
        await _write(connection, message)
        await context.complete({"done": True})


@app.handler("slow", step="slow", attempt_seconds=120)
async def slow(message: Message[Any], context: MessageContext) -> None:
    await execute("INSERT INTO begun VALUES ($1, $2)", message.event_id, os.getpid())
    await asyncio.sleep(message.value["seconds"])


@app.handler("deadly", step="deadly", attempts=2)
async def deadly(message: Message[Any], context: MessageContext) -> None:
    await execute("INSERT INTO begun VALUES ($1, $2)", message.event_id, os.getpid())
    os._exit(3)


async def _write(connection: "asyncpg.Connection[Any]", message: Message[Any]) -> None:
    key = None if message.key is None else message.key.decode()
    await connection.execute("INSERT INTO written VALUES ($1, $2, $3)", message.event_id, message.type, key)
