"""Outside effects of messages: once for a message, whatever its handler, its consumer or the provider does.

The provider keeps a book and knows no idempotency keys: what reaches it twice stands twice in it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from consumer_sdk import (
    Absent,
    Ambiguous,
    Applied,
    CallLimits,
    EffectFailed,
    EffectMismatch,
    Message,
    MessageContext,
    MessageHandlers,
    Retry,
    Retryable,
    Terminal,
)  # fmt: skip
from consumer_sdk.effects import Effect
from tests.support.consumers import SECRETS, Ping, Stage, sample, stage
from tests.support.effects import CHARGE, Provider
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
#: Absence counts right after the call.
HASTY: Final = CallLimits(timeout_seconds=0.3, in_flight_seconds=0.001)
REDRIVE: Final = "SELECT outcome FROM fencepost.redrive_dead_letter($1, $2, 'ana', 'mended')"


@pytest.fixture
async def one(
    database_url: str, kafka: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:  # fmt: skip
    monkeypatch.setenv("FENCEPOST_IDEMPOTENCY_SECRETS", SECRETS)
    async with stage(database_url, kafka, topic) as made:
        yield made


@pytest.fixture
def provider() -> Provider:
    return Provider()


class Charging:
    """A handler that charges once, notes the receipt, and then meets the errors of ``then``, one an attempt."""

    def __init__(self, provider: Provider, *then: Exception) -> None:
        self.provider = provider
        self.then = list(then)
        self.receipts: list[Any] = []
        self.errors: list[Exception] = []

    async def __call__(self, message: Message[Ping], context: MessageContext) -> None:
        try:
            self.receipts.append(
                await context.once(CHARGE, request=message.value, call=self.provider.charge, limits=HASTY)
            )  # fmt: skip
        except Exception as error:
            self.errors.append(error)
            raise
        if self.then:
            raise self.then.pop(0)

    def app(self, *, reconciler: Any = None, **options: Any) -> MessageHandlers:
        app = MessageHandlers()

        @app.handler("ping", model=Ping, step="charge", **({"retry": SOON} | options))
        async def charge(message: Message[Ping], context: MessageContext) -> None:
            await self(message, context)

        if reconciler is not None:
            app.reconciler(CHARGE)(reconciler)
        return app


async def effects(made: Stage) -> list[dict[str, Any]]:
    rows = await made.connection.fetch("SELECT * FROM fencepost.effects WHERE operation = $1 ORDER BY created_at", CHARGE)
    return [dict(row) for row in rows]


@pytest.mark.parametrize(
    "error",
    [Terminal("no_stock"), Retryable("busy"), Ambiguous("who_knows"), RuntimeError("odd")],
    ids=lambda one: type(one).__name__,
)
async def test_no_error_erases_an_effect(one: Stage, provider: Provider, error: Exception) -> None:
    """LEDGER-14, LEDGER-11: given up, redelivered and redriven, the row stays as it is, and there was one call."""
    charging = Charging(provider, error)
    app = charging.app(attempts=1)
    event = await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
        (before,) = await effects(one)
        (letter,) = await one.dead()
        await one.send({"n": 1}, event_id=event)
        await one.until_committed({0: 2})
        assert len(charging.receipts) == 1
        assert await one.connection.fetchval(REDRIVE, letter["dead_letter_id"], True) == "redriving"
        await eventually(lambda: _outcome_is(one, event, "succeeded"))
    assert await effects(one) == [before]
    assert (before["state"], before["run_key"], before["step"]) == ("succeeded", event, f"{one.topic}/charge")
    assert charging.receipts == [{"receipt": 1, "token": 1}] * 2
    assert len(provider.book) == 1


async def test_a_definite_refusal_is_an_answer_that_is_kept(one: Stage, provider: Provider) -> None:
    """LEDGER-5: the same failure at the redrive, and nobody is asked again."""
    provider.before.append(Terminal("card_declined"))
    charging = Charging(provider)
    await one.send({"n": 1})
    async with one.running(charging.app()):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        await one.connection.fetchval(REDRIVE, letter["dead_letter_id"], False)
        await eventually(lambda: len(charging.errors) == 2)
        await eventually(lambda: _letter_is(one, "dead"))
    assert all(isinstance(error, EffectFailed) and error.code == "card_declined" for error in charging.errors)
    assert [(row["state"], row["error_code"]) for row in await effects(one)] == [("failed", "card_declined")]
    assert len(provider.calls) == 1
    assert (letter["reason"], letter["error_code"]) == ("rejected", "card_declined")


async def test_another_request_under_the_same_event_is_refused(one: Stage, provider: Provider) -> None:
    """LEDGER-6: a producer that reuses an id for another amount gets no second charge, and no wrong receipt."""
    charging = Charging(provider, Retryable("busy"))
    app = charging.app(attempts=1)
    event = await one.send({"n": 10})
    async with one.running(app):
        await one.until_committed({0: 1})
        before = await effects(one)
    # As after the message's own row is forgotten, and the effect's is not.
    await one.connection.execute("DELETE FROM fencepost.effects WHERE operation = 'fencepost.message'")
    await one.send({"n": 11}, event_id=event)
    async with one.running(app):
        await one.until_committed({0: 2})
    (letter,) = await one.dead()
    assert [type(error) for error in charging.errors] == [EffectMismatch]
    assert (letter["reason"], letter["error_code"], letter["offset"]) == ("rejected", "effect_mismatch", 1)
    assert await effects(one) == before
    assert len(provider.calls) == 1


async def test_of_two_holders_of_one_message_one_calls_and_both_get_the_result(one: Stage, provider: Provider) -> None:
    """LEDGER-16: the other waits for the answer, and ends as a duplicate."""
    gate = asyncio.Event()
    provider.after.append(gate)
    asked = asyncio.Barrier(2)
    receipts: list[object] = []
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="charge")
    async def charge(message: Message[Ping], context: MessageContext) -> None:
        await asked.wait()
        receipts.append(await context.once(CHARGE, request=message.value, call=provider.charge))

    event = await one.send({"n": 1})
    groups = [f"{one.topic}-{name}" for name in "ab"]
    async with (
        one.running(app, consumer_group=groups[0], consumer_name="same"),
        one.running(app, consumer_group=groups[1], consumer_name="same"),
    ):
        await eventually(lambda: len(provider.book) == 1)
        gate.set()
        for group in groups:
            await one.until_committed({0: 1}, group)
    assert receipts == [{"receipt": 1, "token": 1}] * 2
    assert len(provider.calls) == 1
    assert await one.outcomes() == {event: "succeeded"}
    assert await one.dead() == []


async def test_a_reconciler_finds_what_was_delivered_and_timed_out(one: Stage, provider: Provider) -> None:
    """LEDGER-3, LEDGER-12: the handler goes on with what was found, and nothing is sent again."""
    provider.after.append(asyncio.Event())
    charging = Charging(provider)
    await one.send({"n": 1})
    async with one.running(charging.app(reconciler=provider.state, attempts=20)) as consumer:
        await one.until_committed({0: 1}, seconds=40)
        assert sample(consumer, "fencepost_consumer_effects_total", outcome="reconciled") == 1
    assert charging.receipts == [{"receipt": "found"}]
    assert [row["state"] for row in await effects(one)] == ["applied"]
    assert len(provider.calls) == 1


async def test_a_reconciler_that_proves_absence_lets_it_be_sent_once_more(one: Stage, provider: Provider) -> None:
    """LEDGER-4: under the same provider key and a higher token."""
    provider.before.append(asyncio.Event())
    asked: list[Effect] = []

    async def reconciler(effect: Effect) -> Applied | Absent | None:
        asked.append(effect)
        return None if len(asked) == 1 else await provider.state(effect)

    charging = Charging(provider)
    await one.send({"n": 1})
    async with one.running(charging.app(reconciler=reconciler, attempts=20)):
        await one.until_committed({0: 1}, seconds=40)
    first, second = provider.calls
    assert len(asked) >= 2
    assert (first.key, second.sends) == (second.key, 2)
    assert second.fencing_token > first.fencing_token
    assert [row["state"] for row in await effects(one)] == ["succeeded"]


async def test_an_effect_that_nobody_can_explain_is_given_up_and_never_sent_again(one: Stage, provider: Provider) -> None:
    """LEDGER-15: no reconciler; the attempts are spent, a person resolves it, and the redrive goes on with that."""
    provider.after.append(TimeoutError())
    charging = Charging(provider)
    event = await one.send({"n": 1})
    async with one.running(charging.app(attempts=3)):
        await one.until_committed({0: 1})
        (letter,), (row,) = await one.dead(), await effects(one)
        assert (letter["reason"], letter["error_code"], row["state"]) == ("attempts_exhausted", "effect_unknown", "unknown")
        resolved = await one.connection.fetchval(
            "SELECT outcome FROM fencepost.resolve_effect('', $1, 0, $2, 0, $3, $4, 'applied', $5, 'ch_1', 'ana', 'looked')",
            event, row["step"], CHARGE, row["generation"], b'{"receipt": "by hand"}',
        )  # fmt: skip
        assert resolved == "resolved"
        await one.connection.fetchval(REDRIVE, letter["dead_letter_id"], False)
        await eventually(lambda: _outcome_is(one, event, "succeeded"))
    assert charging.receipts == [{"receipt": "by hand"}]
    assert len(provider.calls) == 1


async def test_effects_of_steps_operations_and_occurrences_are_effects_of_their_own(one: Stage, provider: Provider) -> None:
    app = MessageHandlers()
    for step in ("a", "b"):

        @app.handler("ping", model=Ping, step=step)
        async def charge(_message: Message[Ping], context: MessageContext) -> None:
            for operation, occurrence in ((CHARGE, 0), (CHARGE, 1), ("card.refund", 0)):
                await context.once(operation, request=1, call=provider.charge, occurrence=occurrence)

    await one.send({"n": 1})
    async with one.running(app):
        await one.until_committed({0: 1})
    assert len({effect.key for effect in provider.calls}) == 6


async def _outcome_is(made: Stage, event: str, state: str) -> bool:
    return (await made.outcomes()).get(event) == state


async def _letter_is(made: Stage, state: str) -> bool:
    return [letter["state"] for letter in await made.dead()] == [state]
