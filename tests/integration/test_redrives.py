"""Redrives: an operator asks, a consumer handles the message anew under its old identity, once, and says what became of it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk import Ambiguous, Message, MessageContext, MessageHandlers, RetryLater, Terminal, plain_records
from tests.support.consumers import Ping, Stage, sample, stage
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

REDRIVE: Final = "SELECT outcome FROM fencepost.redrive_dead_letter($1, $2, 'ana', 'mended')"
DISCARD: Final = "SELECT outcome FROM fencepost.discard_dead_letter($1, 'ana', 'no use')"
REDRIVES: Final = "fencepost_consumer_redrives_total"


@pytest.fixture
async def one(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as made:
        yield made


class Broken:
    """A handler that fails until it is mended, and then writes a row."""

    def __init__(self) -> None:
        self.mended = asyncio.Event()
        self.error: Exception = Terminal("broken")
        self.attempts: list[int] = []

    def app(self, **options: Any) -> MessageHandlers:
        app = MessageHandlers()

        @app.handler("ping", model=Ping, step="write", **options)
        async def write(message: Message[Ping], context: MessageContext) -> None:
            self.attempts.append(context.attempt)
            if not self.mended.is_set():
                raise self.error
            async with context.transaction() as connection:
                await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

        return app


async def dead_letter(made: Stage, app: MessageHandlers) -> asyncpg.Record:
    """Consume all that there is, and return the one dead letter."""
    async with made.running(app):
        await eventually(made.dead)
        (letter,) = await made.dead()
        await made.until_committed({0: letter["offset"] + 1})
    return letter


async def redrive(made: Stage, letter: asyncpg.Record, *, checked: bool = False) -> str:
    return str(await made.connection.fetchval(REDRIVE, letter["dead_letter_id"], checked))


async def until_state(made: Stage, *states: str) -> None:
    async def there() -> bool:
        return [letter["state"] for letter in await made.dead()] == list(states)

    await eventually(there, message=f"the dead letters are {states}")


async def test_what_was_asked_for_while_nobody_ran_is_done_by_the_next_process(one: Stage) -> None:
    """CONSUME-25: under the same identity, which then is no duplicate of itself; the dead letter is kept, and audited."""
    broken = Broken()
    event = await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    assert await redrive(one, letter) == "redriving"
    async with one.running(broken.app()) as consumer:
        await until_state(one, "redriven")
        await eventually(lambda: sample(consumer, REDRIVES, outcome="redriven") == 1)
    assert await one.seen() == [1]
    assert await one.outcomes() == {event: "succeeded"}
    assert await one.connection.fetchval("SELECT count(*) FROM fencepost.audit WHERE command = 'dead-letters redrive'") == 1
    assert (await one.dead())[0]["payload"] == b'{"n": 1}'


async def test_of_two_operators_at_once_one_is_told_that_the_other_was_first(one: Stage) -> None:
    """LEDGER-11: two sessions ask in the same moment; two consumers look; it runs once."""
    broken = Broken()
    await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    other = await asyncpg.connect(one.database_url)
    asked = (session.fetchval(REDRIVE, letter["dead_letter_id"], False) for session in (one.connection, other))
    outcomes = await asyncio.gather(*asked)
    await other.close()
    async with (
        one.running(broken.app()),
        one.running(broken.app(), consumer_group=f"{one.topic}-2", consumer_name=one.topic),
    ):
        await until_state(one, "redriven")
    assert sorted(outcomes) == ["not_dead", "redriving"]
    assert await one.seen() == [1]


async def test_a_redrive_is_one_attempt(one: Stage) -> None:
    """It fails into the dead letter that it came from, counted; the operator decides about another."""
    broken = Broken()
    await one.send({"n": 1})
    letter = await dead_letter(one, broken.app(attempts=5))
    broken.error = ValueError("another")
    await redrive(one, letter)
    async with one.running(broken.app(attempts=5)) as consumer:
        await until_state(one, "dead")
        await eventually(lambda: sample(consumer, REDRIVES, outcome="dead") == 1)
        (letter,) = await one.dead()
        assert (letter["attempts"], letter["redrives"], letter["reason"]) == (2, 1, "attempts_exhausted")
        broken.error = RetryLater("not_now", seconds=0.1)
        await redrive(one, letter)
        await until_state(one, "dead")
        await eventually(lambda: sample(consumer, REDRIVES, outcome="dead") == 2)
    (letter,) = await one.dead()
    assert (letter["attempts"], letter["redrives"], letter["reason"]) == (3, 2, "patience_exhausted")
    assert len(broken.attempts) == 3


async def test_an_ambiguous_message_is_redriven_when_somebody_has_looked(one: Stage) -> None:
    broken = Broken()
    broken.error = Ambiguous("who_knows")
    await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    assert await redrive(one, letter) == "ambiguous"
    assert await redrive(one, letter, checked=True) == "redriving"
    async with one.running(broken.app()):
        await until_state(one, "redriven")
    assert await one.seen() == [1]


async def test_what_was_discarded_is_not_handled(one: Stage) -> None:
    broken = Broken()
    event = await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    assert await one.connection.fetchval(DISCARD, letter["dead_letter_id"]) == "discarded"
    assert await redrive(one, letter) == "not_dead"
    async with one.running(broken.app()):
        await one.send({"n": 1}, event_id=event)
        await one.send({"n": 2})
        await one.until_committed({0: 3})
    assert await one.seen() == [2]
    assert (await one.outcomes())[event] == "failed"


async def test_a_redrive_overtakes_nothing_and_stops_nothing(one: Stage) -> None:
    """While it hangs, messages of the same key are handled: it has left its lane long ago."""
    leave, reached = asyncio.Event(), asyncio.Event()
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="write")
    async def write(message: Message[Ping], context: MessageContext) -> None:
        if message.value.n == 0:
            if not await one.dead():
                raise Terminal("broken")
            reached.set()
            await leave.wait()
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    await one.send({"n": 0})
    async with one.running(app):
        await one.until_committed({0: 1})
        (letter,) = await one.dead()
        await redrive(one, letter)
        await reached.wait()
        await one.send({"n": 1})
        await one.until_committed({0: 2})
        leave.set()
        await until_state(one, "redriven")
    assert await one.seen() == [1, 0]


async def test_a_redrive_that_the_stop_cuts_short_is_given_back(one: Stage) -> None:
    """CONSUME-3: no attempt, no failure, and free at once for the next process."""
    reached, hang = asyncio.Event(), asyncio.Event()
    app = MessageHandlers()

    @app.handler("ping", model=Ping, step="write")
    async def write(_message: Message[Ping], _context: MessageContext) -> None:
        if not await one.dead():
            raise Terminal("broken")
        reached.set()
        await hang.wait()

    await one.send({"n": 1})
    letter = await dead_letter(one, app)
    await redrive(one, letter)
    async with one.running(app, consumer_stop_grace_seconds=0):
        await reached.wait()
    (cut,) = await one.dead()
    assert (cut["state"], cut["holder"], cut["attempts"]) == ("redriving", None, 1)
    hang.set()
    async with one.running(app):
        await until_state(one, "redriven")


async def test_a_database_that_goes_away_under_a_redrive_is_nobodys_failure(one: Stage) -> None:
    """CONSUME-20: it is handled when the database is back, as the same redrive."""
    broken, cut = Broken(), asyncio.Event()
    app = MessageHandlers()

    async with TcpProxy(one.database_url) as proxy:

        @app.handler("ping", model=Ping, step="write")
        async def write(message: Message[Ping], context: MessageContext) -> None:
            if not await one.dead():
                raise Terminal("broken")
            async with context.transaction() as connection:
                if not cut.is_set():
                    cut.set()
                    await proxy.refuse()
                await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

        await one.send({"n": 1})
        letter = await dead_letter(one, broken.app())
        await redrive(one, letter)
        async with one.running(app, database_url=proxy.url, consumer_statement_seconds=1) as consumer:
            await cut.wait()
            errors = ("redrive", "measure", "known")
            await eventually(
                lambda: sum(sample(consumer, "fencepost_consumer_database_errors_total", statement=one) for one in errors) >= 1, 30
            )
            await one.connection.execute(  # what could not be given back is free when its hold is over
                "UPDATE fencepost.dead_letters SET held_until = clock_timestamp() WHERE holder IS NOT NULL"
            )
            await proxy.accept()
            await until_state(one, "redriven")
    (letter,) = await one.dead()
    assert (letter["attempts"], letter["redrives"]) == (1, 1)
    assert await one.seen() == [1]


async def test_a_dead_letter_of_a_batch_handler_is_redriven_by_itself(one: Stage) -> None:
    sizes, mended = list[int](), asyncio.Event()
    app = MessageHandlers()

    @app.batch_handler("ping", model=Ping, step="write")
    async def write(messages: Sequence[Message[Ping]], connection: "asyncpg.Connection[Any]") -> None:
        sizes.append(len(messages))
        if any(message.value.n == 3 for message in messages) and not mended.is_set():
            raise Terminal("three")
        await connection.executemany("INSERT INTO seen VALUES ($1, $2)", [(each.event_id, each.value.n) for each in messages])

    for number in range(8):
        await one.send({"n": number})
    async with one.running(app):
        await one.until_committed({0: 8})
        (letter,) = await one.dead()
        mended.set()
        sizes.clear()
        await redrive(one, letter)
        await until_state(one, "redriven")
    assert sizes == [1]
    assert await one.seen() == [0, 1, 2, 4, 5, 6, 7, 3]
    assert set((await one.outcomes()).values()) == {"succeeded"}


async def test_a_message_that_did_not_fit_is_handled_by_the_model_that_was_mended(one: Stage) -> None:
    noted: list[object] = []

    def app_of(model: Any) -> MessageHandlers:
        app = MessageHandlers()

        @app.handler("ping", model=model, step="note")
        async def note(message: Message[Any], _context: MessageContext) -> None:
            noted.append(message.value)

        return app

    event = await one.send({"m": 1})
    letter = await dead_letter(one, app_of(Ping))
    await redrive(one, letter)
    async with one.running(app_of(None)):
        await until_state(one, "redriven")
        await one.send({"m": 1}, event_id=event)
        await one.until_committed({0: 2})
    assert noted == [{"m": 1}]
    assert await one.outcomes() == {event: "succeeded"}


async def test_a_message_that_nobody_took_is_handled_by_everybody_who_takes_it_now(one: Stage) -> None:
    """An unknown type has no step to come back to: each handler that there is by now handles it, once."""
    noted, other = list[str](), MessageHandlers()
    other.handler("pong", step="pong")(_nothing)
    event = await one.send({"n": 1})
    letter = await dead_letter(one, other)
    assert letter["reason"] == "unknown_type"
    app = MessageHandlers()
    for step in ("first", "second"):

        @app.handler("ping", step=step)
        async def note(_message: Message[Any], _context: MessageContext, told: str = step) -> None:
            noted.append(told)

    await redrive(one, letter)
    async with one.running(app):
        await until_state(one, "redriven")
        redriven = sorted(noted)
        await one.send({"n": 1}, event_id=event)
        await one.until_committed({0: 2})
    assert redriven == sorted(noted) == ["first", "second"]


async def test_a_record_that_could_not_be_read_is_read_by_the_adapter_that_was_added(one: Stage) -> None:
    noted, app = list[object](), MessageHandlers()

    async def note(message: Message[Any], _context: MessageContext) -> None:
        noted.append(message.value)

    app.handler("ping", step="note")(note)
    await one.send_record(b'{"n": 1}')
    letter = await dead_letter(one, app)
    assert letter["reason"] == "undecodable"
    app.adapter(one.topic, plain_records(type="ping", source="legacy"))
    await redrive(one, letter)
    async with one.running(app):
        await until_state(one, "redriven")
    assert noted == [{"n": 1}]


async def test_a_dead_letter_that_is_older_than_the_replay_age_is_an_error(one: Stage) -> None:
    """The ledger may have forgotten what it did: no second effect."""
    broken = Broken()
    await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    await one.connection.execute("UPDATE fencepost.dead_letters SET created_at = created_at - interval '8 days'")
    await redrive(one, letter)
    async with one.running(broken.app()):
        await until_state(one, "dead")
        await eventually(lambda: _reason_is(one, "too_old"))
    assert await one.seen() == []


async def test_a_redrive_belongs_to_its_own_consumer(one: Stage) -> None:
    broken, other = Broken(), Broken()
    await one.send({"n": 1})
    letter = await dead_letter(one, broken.app())
    broken.mended.set()
    other.mended.set()
    await redrive(one, letter)
    settings = {"consumer_group": f"{one.topic}-other", "consumer_offset_reset": "latest"}
    async with one.running(other.app(), **settings), one.running(broken.app()):
        await until_state(one, "redriven")
    assert (len(broken.attempts), other.attempts) == (2, [])


async def _nothing(_message: Message[Any], _context: MessageContext) -> None: ...


async def _reason_is(made: Stage, reason: str) -> bool:
    return [letter["reason"] for letter in await made.dead()] == [reason]
