"""A worker that ends itself after a write: ``python -m tests.support.crashing_workflow NTH``; 0 never ends it.

What it wrote is counted from 1 and noted in ``public.writes``; the effect itself is one of them. The process ends as by kill -9.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import asyncpg

from consumer_sdk import (
    Absent,
    Applied,
    CallLimits,
    Effect,
    Handlers,
    Retry,
    Worker,
    WorkflowContext,
    load_worker_settings,
    workflow_context,
)
from consumer_sdk.service import run_service
from fencepost.database import StatementPool
from fencepost.workflows import Workflows

__all__ = ["CALL", "SCHEMA", "WRITES", "handlers"]

SCHEMA: Final = """
DROP TABLE IF EXISTS public.charges, public.writes;
CREATE TABLE public.charges (key text, period integer, receipt serial);
CREATE TABLE public.writes (id integer, name text);
"""
#: The effect: what reaches this provider twice is charged twice.
CALL: Final = "the charge"
WRITES: Final = frozenset({
    CALL, "claim", "record_steps", "reserve_effect", "send_effect", "finish_effect", "begin_timer", "release", "publish_chunks",
    "continue_run", "complete", "fail",
})  # fmt: skip
_LIMITS: Final = CallLimits(timeout_seconds=5, in_flight_seconds=0.001)
_CHARGE: Final = "card.charge"

workflows = Workflows()
handlers = Handlers()
handlers.include(workflows)


async def reckon(period: int) -> int:
    return 10 * (period + 1)


@workflows.workflow("order", retry=Retry(base_seconds=0.02, cap_seconds=0.02))
async def order(context: WorkflowContext, period: int) -> dict[str, int]:
    async def charge(amount: int) -> int:
        async def call(effect: Effect) -> int:
            receipt = await _asked("INSERT INTO public.charges (key, period) VALUES ($1, $2) RETURNING receipt", effect.key, period)
            await _wrote(CALL)
            return int(receipt)

        return await context.once(_CHARGE, request={"amount": amount}, call=call, limits=_LIMITS)  # type: ignore[return-value]

    amount = await context.step("reckon", reckon, period)
    await context.publish({"amount": amount})
    receipt = await context.step("charge", charge, amount)
    await context.sleep(0.05)
    if period == 0:
        context.continue_as_new(1)
    return {"period": period, "amount": amount, "receipt": receipt}


@handlers.reconciler(_CHARGE)
async def charge_state(effect: Effect) -> Applied | Absent:
    receipt = await _asked("SELECT receipt FROM public.charges WHERE key = $1", effect.key)
    return Absent() if receipt is None else Applied(receipt)


async def _asked(query: str, *arguments: object) -> Any:
    connection = await asyncpg.connect(os.environ["FENCEPOST_DATABASE_URL"])
    try:
        return await connection.fetchval(query, *arguments)
    finally:
        await connection.close()


_last = -1
_written = 0


async def _wrote(name: str) -> None:
    """In the process that is to end: count, and end at the last one."""
    global _written
    if _last < 0:
        return
    _written += 1
    number = _written  # before the note, which takes its time while others write
    try:
        await _asked("INSERT INTO public.writes (id, name) VALUES ($1, $2)", number, name)
    finally:  # a call that ran out of time as well: it is the write that counts
        if number == _last:
            os.kill(os.getpid(), signal.SIGKILL)


def _count_statements() -> None:
    fetch = StatementPool.fetch

    async def counted(self: StatementPool, name: str, *arguments: object) -> Sequence[Any]:
        rows = await fetch(self, name, *arguments)
        if name in WRITES and (rows or name != "claim"):
            await _wrote(name)
        return rows

    StatementPool.fetch = counted  # type: ignore[method-assign]


def main() -> None:
    global _last
    _last = int(sys.argv[1])
    _count_statements()
    workflow_context._SHORT_SECONDS = 0.0  # type: ignore[misc]  # every sleep lets go of the run
    run_service(lambda: Worker(handlers, load_worker_settings()))


if __name__ == "__main__":
    main()
