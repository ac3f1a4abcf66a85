"""Handlers for workers in processes of their own: a run's input is the script of its attempts, barriers are database rows.

The input maps an attempt's number (or ``"*"``) to steps, each a name and its arguments: ``{"1": [["wait", "gate"]], "*": []}``.
What a handler notes and what it waits for stand in tables that the worker knows nothing about, on connections of their own.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import asyncpg

from consumer_sdk.classification import Ambiguous, Retryable, Terminal
from consumer_sdk.context import RunContext
from consumer_sdk.handlers import Handlers
from fencepost.retry import Retry

__all__ = ["STAGE_URL", "Stage", "handlers"]

#: Environment variable with the address of the database that holds the barriers.
STAGE_URL: Final = "STAGE_DATABASE_URL"
_POLL_SECONDS: Final = 0.02
_SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
_SCHEMA: Final = """
CREATE SCHEMA IF NOT EXISTS stage;
CREATE TABLE IF NOT EXISTS stage.gates (name text PRIMARY KEY);
CREATE TABLE IF NOT EXISTS stage.notes (id bigserial PRIMARY KEY, run_id text, generation bigint, note text);
CREATE TABLE IF NOT EXISTS stage.effects (run_id text, generation bigint);
GRANT USAGE ON SCHEMA stage TO PUBLIC;
GRANT ALL ON stage.gates, stage.notes, stage.effects TO PUBLIC;
"""

handlers = Handlers()


class Stage:
    """The tests' side: gates to open, notes and effects to read."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self.connection = connection

    async def build(self) -> "Stage":
        await self.connection.execute(_SCHEMA)
        return self

    async def open(self, gate: str) -> None:
        await self.connection.execute("INSERT INTO stage.gates VALUES ($1)", gate)

    async def notes(self, run_id: object = None) -> list[str]:
        """What the handlers noted, in order, of one run or of all."""
        rows = await self.connection.fetch(
            "SELECT note FROM stage.notes WHERE $1::text IS NULL OR run_id = $1 ORDER BY id",
            None if run_id is None else str(run_id),
        )
        return [row["note"] for row in rows]

    async def effects(self, run_id: object) -> list[int]:
        """The generations whose domain writes were committed."""
        rows = await self.connection.fetch("SELECT generation FROM stage.effects WHERE run_id = $1", str(run_id))
        return [row["generation"] for row in rows]


@handlers.handler("script", retry=_SOON)
async def script(context: RunContext, steps: Mapping[str, Sequence[Sequence[Any]]]) -> object:
    return await _play(context, steps)


@handlers.handler("limited", retry=_SOON, attempt_seconds=1.0)
async def limited(context: RunContext, steps: Mapping[str, Sequence[Sequence[Any]]]) -> object:
    return await _play(context, steps)


@handlers.handler("count", retry=_SOON)
async def count(context: RunContext, _input: object) -> None:
    """Counts its calls and takes no time."""
    connection = await _shared()
    async with _lock:
        await connection.execute("INSERT INTO stage.effects VALUES ($1, $2)", str(context.run_id), context.fencing_token)


async def _play(context: RunContext, steps: Mapping[str, Sequence[Sequence[Any]]]) -> object:
    result: object = None
    for name, *arguments in steps.get(str(context.attempt), steps.get("*", [])):
        result = await _STEPS[name](context, *arguments)
    return result


async def _note(context: RunContext, note: str) -> None:
    connection = await asyncpg.connect(os.environ[STAGE_URL])
    try:
        await connection.execute(
            "INSERT INTO stage.notes (run_id, generation, note) VALUES ($1, $2, $3)",
            str(context.run_id),
            context.fencing_token,
            note,
        )
    finally:
        await connection.close()


async def _wait(context: RunContext, gate: str) -> None:
    """Until the gate is open. Notes that it waits, and that it was cancelled."""
    await _note(context, f"waits for {gate}")
    try:
        await _opened(gate)
    except asyncio.CancelledError:
        await _note(context, "cancelled")
        raise


async def _ignore(context: RunContext, gate: str) -> None:
    """Until the gate is open, whatever is asked."""
    await _note(context, f"ignores all but {gate}")
    opened = asyncio.create_task(_opened(gate))
    while not opened.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(opened)
    await _note(context, f"saw {gate}")


async def _tidy(context: RunContext, gate: str) -> None:
    """Waits; once cancelled, waits for the gate ``gate-tidy`` and lets the cancellation go."""
    with contextlib.suppress(asyncio.CancelledError):
        await _wait(context, gate)
    await _opened(f"{gate}-tidy")


async def _block(context: RunContext, seconds: float) -> None:
    """What nobody should do: stops the event loop."""
    await _note(context, "blocks")
    time.sleep(seconds)  # noqa: ASYNC251 - on purpose


async def _thread(context: RunContext, seconds: float) -> None:
    await _note(context, "in a thread")
    await asyncio.to_thread(time.sleep, seconds)


async def _fail(_context: RunContext, kind: str, message: str = "") -> None:
    raise {
        "retryable": Retryable("busy"), "terminal": Terminal("refused"), "ambiguous": Ambiguous("unknown"),
        "error": RuntimeError(message), "exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "group": ExceptionGroup(message, [
            ValueError(message), Terminal("refused")]), "base_group": BaseExceptionGroup(message, [SystemExit(message)]),
        "generator": GeneratorExit(),
    }[kind]  # fmt: skip


async def _progress(context: RunContext, checkpoint: object) -> None:
    context.progress(checkpoint)


async def _save(context: RunContext, checkpoint: object) -> None:
    await context.save(checkpoint)


async def _event(context: RunContext, name: str) -> None:
    await context.event(name, {"attempt": context.attempt})


async def _resume(context: RunContext) -> None:
    await _note(context, f"from {context.checkpoint}")


async def _effect(context: RunContext, complete: bool = True) -> None:
    """A domain write, and the completion with it."""
    async with context.transaction() as connection:
        await connection.execute("INSERT INTO stage.effects VALUES ($1, $2)", str(context.run_id), context.fencing_token)
        if complete:
            await context.complete({"by": context.fencing_token})


async def _return(_context: RunContext, value: object) -> object:
    return value


async def _forget(_context: RunContext, message: str) -> None:
    """Starts a task that fails, and forgets it."""

    async def fail() -> None:
        raise RuntimeError(message)

    await asyncio.wait([asyncio.create_task(fail())])


async def _stray(context: RunContext) -> None:
    """Leaves a task behind that never ends, whatever is asked."""

    async def stay() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    _strays.append(asyncio.create_task(stay()))
    await _note(context, "left a task")


_STEPS: Final[Mapping[str, Callable[..., Awaitable[object]]]] = {
    "note": _note, "wait": _wait, "ignore": _ignore, "tidy": _tidy, "block": _block, "thread": _thread, "fail": _fail,
    "progress": _progress, "save": _save, "event": _event, "resume": _resume, "effect": _effect, "return": _return,
    "forget": _forget, "stray": _stray,
}  # fmt: skip


_lock: Final = asyncio.Lock()
_connections: Final[list[Any]] = []
_strays: Final[list[asyncio.Task[None]]] = []


async def _shared() -> Any:
    async with _lock:
        if not _connections:
            _connections.append(await asyncpg.connect(os.environ[STAGE_URL]))
    return _connections[0]


async def _opened(gate: str) -> None:
    connection = await asyncpg.connect(os.environ[STAGE_URL])
    try:
        while not await connection.fetchval("SELECT count(*) FROM stage.gates WHERE name = $1", gate):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        connection.terminate()
