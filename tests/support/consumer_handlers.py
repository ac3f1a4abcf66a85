"""Handlers for consumers that tests run as processes, one of each kind. The outside world is a table that no ledger guards.

Every call that gets through is a row of ``calls``; whoever is called twice for one message shows there. Some wait at a gate, which
a row of ``gates`` opens. Those that are strict have one attempt: an attempt that is spent without need is a dead letter.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import asyncpg

from consumer_sdk import Absent, Applied, CallLimits, Effect, Message, MessageContext, MessageHandlers, Retry, Terminal

__all__ = ["GATED_LIMITS", "SCHEMA", "WITHIN_SECONDS", "app"]

#: What the handlers write to, beside the ledger.
SCHEMA: Final = """
CREATE TABLE calls (provider_key text, event_id text, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE written (event_id text, kind text, key text, n bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE begun (event_id text, process integer, n bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE gates (name text);
"""
LIMITS: Final = CallLimits(timeout_seconds=1, in_flight_seconds=0.5)
GATED_LIMITS: Final = CallLimits(timeout_seconds=4, in_flight_seconds=0.5)
#: How long ``within`` may keep its transaction open.
WITHIN_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.05
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


@app.handler("deadly", step="deadly", attempts=2)
async def deadly(message: Message[Any], context: MessageContext) -> None:
    await execute("INSERT INTO begun VALUES ($1, $2)", message.event_id, os.getpid())
    os._exit(3)


@app.handler("plain", step="plain", attempts=1)
async def plain(message: Message[Any], context: MessageContext) -> None:
    """Nothing but the row that says that it was handled."""


@app.handler("strict", step="strict", attempts=1)
async def strict(message: Message[Any], context: MessageContext) -> None:
    async with context.transaction() as connection:
        await _write(connection, message)


@app.batch_handler("strict_batch", step="strict_batch", attempts=1)
async def strict_batch(messages: Sequence[Message[Any]], connection: "asyncpg.Connection[Any]") -> None:
    for message in messages:
        await _write(connection, message)


@app.handler("slow", step="slow", attempts=1)
async def slow(message: Message[Any], context: MessageContext) -> None:
    """Is in hand for a while, so that others end the process around it."""
    await asyncio.sleep(message.value["seconds"])
    async with context.transaction() as connection:
        await _write(connection, message)


@app.handler("gated", step="gated", attempts=50, retry=_SOON, attempt_seconds=120)
async def gated(message: Message[Any], context: MessageContext) -> None:
    """A call that has reached the provider, whose answer is on its way until the gate opens."""

    async def call(effect: Effect) -> dict[str, str]:
        answer = await charge(message.event_id, effect)
        await _opened(message)
        return answer

    await context.once("charge", request=message.value, call=call, limits=GATED_LIMITS)


@app.handler("waiting", step="waiting", attempts=1, attempt_seconds=120)
async def waiting(message: Message[Any], context: MessageContext) -> None:
    """Waits before its transaction."""
    await execute("INSERT INTO begun VALUES ($1, $2)", message.event_id, os.getpid())
    await _opened(message)
    async with context.transaction() as connection:
        await _write(connection, message)


@app.handler("within", step="within", attempts=1, attempt_seconds=WITHIN_SECONDS)
async def within(message: Message[Any], context: MessageContext) -> None:
    """Waits in its transaction, which holds the message's row; and only the first who handles it."""
    async with context.transaction() as connection:
        await _write(connection, message)
        begun = await execute(
            "INSERT INTO begun VALUES ($1, $2) RETURNING (SELECT count(*) FROM begun)", message.event_id, os.getpid()
        )
        if begun[0]["count"] == 0:
            await _opened(message)


@app.handler("blocking", step="blocking", attempts=1, attempt_seconds=120)
async def blocking(message: Message[Any], context: MessageContext) -> None:
    """Keeps the event loop, and so the whole member, from everything; and only the first who handles it."""
    begun = await execute("INSERT INTO begun VALUES ($1, $2) RETURNING (SELECT count(*) FROM begun)", message.event_id, os.getpid())
    if begun[0]["count"] == 0:
        time.sleep(message.value["seconds"])  # noqa: ASYNC251 - the very fault
    async with context.transaction() as connection:
        await _write(connection, message)


@app.handler("careless", step="careless", attempts=50, retry=_SOON)
async def careless(message: Message[Any], context: MessageContext) -> None:
    """The broken model: its row is committed beside the ledger."""
    await execute("INSERT INTO written VALUES ($1, 'careless', $2)", message.event_id, message.key and message.key.decode())


async def _opened(message: Message[Any]) -> None:
    while not await execute("SELECT FROM gates WHERE name = $1", message.value["gate"]):  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(_LOOK_SECONDS)


async def _write(connection: "asyncpg.Connection[Any]", message: Message[Any]) -> None:
    key = None if message.key is None else message.key.decode()
    await connection.execute("INSERT INTO written VALUES ($1, $2, $3)", message.event_id, message.type, key)
