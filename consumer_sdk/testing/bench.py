"""What the sentences of the contract are told with: a provider that keeps a book, holders that pause or die, and time that passes.

The provider knows no idempotency keys on purpose: whatever reaches it twice stands twice in its book.
"""

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from consumer_sdk.effect_store import EffectStore, Fetch
from consumer_sdk.effects import Absent, Applied, CallLimits, Effect, EffectKey, Reconciler, RunFence
from consumer_sdk.ledger import Ledger
from consumer_sdk.testing.harness import LedgerHarness
from consumer_sdk.testing.memory_ledger import TEST_SECRETS

__all__ = ["LIMITS", "REQUEST", "STATEMENTS", "Bench", "Crash", "Pause", "Provider", "Wanted", "sentence", "sentences"]

TENANT: Final = "acme"
OPERATION: Final = "card.charge"
REQUEST: Final = {"order": "o-1", "amount": 10}
LIMITS: Final = CallLimits()
#: The statements of ``once``, in the order in which it can come to them.
STATEMENTS: Final = ("reserve_effect", "read_effect", "send_effect", "finish_effect", "question_effect", "reconcile_effect")
_NO_RUN: Final = RunFence(None, None, None)


class Crash(BaseException):
    """The process is gone."""


class Provider:
    """Charges cards. Each entry of ``before`` and ``after`` meets one call: an error is raised, an event is waited for."""

    def __init__(self) -> None:
        self.book: list[str] = []
        self.calls: list[Effect] = []
        self.asked: list[Effect] = []
        self.before: list[BaseException | asyncio.Event | None] = []
        self.after: list[BaseException | asyncio.Event | None] = []
        self.reached = asyncio.Event()

    async def charge(self, effect: Effect) -> object:
        self.calls.append(effect)
        self.reached.set()
        await _meet(self.before)
        self.book.append(effect.key)
        await _meet(self.after)
        return {"receipt": len(self.book), "token": effect.fencing_token}

    async def state(self, effect: Effect) -> Applied | Absent:
        """A reconciler that looks into the book."""
        self.asked.append(effect)
        return Applied({"receipt": "found"}, reference="ch_1") if effect.key in self.book else Absent()


async def _meet(script: list[BaseException | asyncio.Event | None]) -> None:
    met = script.pop(0) if script else None
    if isinstance(met, asyncio.Event):
        await met.wait()
    elif met is not None:
        raise met


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One effect, as one holder asks for it."""

    key: EffectKey
    fence: RunFence

    def part(self, **parts: Any) -> "Wanted":
        """Another effect of the same holder."""
        return replace(self, key=self.key._replace(**parts))


class Pause:
    """Stands still before the statement ``name``, the ``times``-th time: ``reached`` is set there, and it waits for ``go``."""

    def __init__(self, fetch: Fetch, name: str, *, times: int = 1) -> None:
        self._fetch, self._name, self._left = fetch, name, times
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def fetch(self, name: str, *arguments: Any) -> Sequence[Any]:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                await self.go.wait()
        return await self._fetch(name, *arguments)


class Bench:
    """The ledger under test, and a provider."""

    def __init__(self, harness: LedgerHarness) -> None:
        self.harness = harness
        self.fetch: Fetch = harness.fetch
        self.provider = Provider()

    def message(self) -> Wanted:
        """An effect of a message that no run stands behind."""
        return Wanted(key=EffectKey(str(uuid.uuid4()), TENANT, 0, "charge", 0, OPERATION), fence=_NO_RUN)

    async def run(self, holder: str = "w1") -> Wanted:
        """An effect of a run that ``holder`` has."""
        fence = await self.harness.lease(holder, tenant_id=TENANT)
        return Wanted(key=EffectKey(str(fence.run_id), TENANT, 0, "order", 0, OPERATION), fence=fence)

    async def both(self) -> tuple[Wanted, Wanted]:
        """One effect of a message and one of a run."""
        return self.message(), await self.run()

    async def next_attempt(self, wanted: Wanted, holder: str = "w2") -> Wanted:
        """The same effect for whoever comes next: the run's next holder, or another delivery of the message."""
        if wanted.fence.run_id is None:
            return wanted
        return replace(wanted, fence=await self.harness.take_over(wanted.fence, holder))

    async def once(
        self,
        wanted: Wanted,
        *,
        request: object = REQUEST,
        call: Callable[[Effect], Awaitable[object]] | None = None,
        limits: CallLimits = LIMITS,
        reconciler: Reconciler | None = None,
        fetch: Fetch | None = None,
    ) -> Any:
        ledger = Ledger(EffectStore(fetch or self.fetch, wanted.fence.owner or "w1"), TEST_SECRETS)
        return await ledger.once(
            wanted.key,
            wanted.fence,
            request=request,
            call=call or self.provider.charge,
            limits=limits,
            reconciler=reconciler,
        )

    async def crashed(self, wanted: Wanted, *, before: str = "", after: str = "", **options: Any) -> None:
        """An attempt whose process dies right before or right after a statement, if it gets there."""

        async def dies(name: str, *arguments: Any) -> Sequence[Any]:
            if name == before:
                raise Crash
            rows = await self.fetch(name, *arguments)
            if name == after:
                raise Crash
            return rows

        try:
            await self.once(wanted, fetch=dies, **options)
        except (Crash, Exception):  # noqa: BLE001 - whatever it would have told its handler, it is gone
            return

    async def row(self, wanted: Wanted) -> Mapping[str, Any]:
        row = await self.harness.row(wanted.key)
        assert row is not None, "the ledger knows the effect"
        return row

    async def state(self, wanted: Wanted) -> str:
        return str((await self.row(wanted))["state"])

    async def pass_time(self, seconds: float) -> None:
        await self.harness.advance(seconds)


_Harness = TypeVar("_Harness")
_Bench = TypeVar("_Bench")
_Test = Callable[[Any, _Bench], Awaitable[None]]


def sentences(bench_of: Callable[[_Harness], _Bench]) -> Callable[[_Test[_Bench]], Callable[[Any], None]]:
    """Makes tests of a contract of what is told with such a bench. Each runs in a loop of its own and within its time, so that no
    plugin of pytest is needed."""

    def sentence(test: _Test[_Bench]) -> Callable[[Any], None]:
        async def told(suite: Any) -> None:
            async with asyncio.timeout(suite.limit_seconds), suite.opened() as harness:
                await test(suite, bench_of(harness))

        def run(suite: Any) -> None:
            asyncio.run(told(suite))

        functools.update_wrapper(run, test)
        del run.__wrapped__  # type: ignore[attr-defined]  # or pytest would take the bench for a fixture
        return run

    return sentence


sentence = sentences(Bench)
