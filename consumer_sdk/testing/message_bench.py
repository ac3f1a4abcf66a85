"""What the sentences of the contract of messages are told with: consumers of one database, and a provider that keeps a book."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from consumer_sdk.classification import Ambiguous, Retryable, RetryLater, Terminal
from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.delivery import Dead, Done, Outcome
from consumer_sdk.message import Message
from consumer_sdk.message_context import MessageContext
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.message_store import Letter
from consumer_sdk.message_writer import MessageWriter
from consumer_sdk.testing.bench import Provider, sentences
from consumer_sdk.testing.builders import BuiltRecord, event
from consumer_sdk.testing.memory_messages import MESSAGE
from consumer_sdk.testing.message_harness import MessageHarness
from consumer_sdk.testing.stepwise import Attempt, StepwiseConsumer

__all__ = [
    "DUPLICATE", "FAILURES", "HANDLED", "TYPE", "Function", "Member", "MessageBench", "app_of", "event_id",
    "message_sentence", "ping",
]  # fmt: skip

TYPE: Final = "ping"
HANDLED: Final = Done("handled")
DUPLICATE: Final = Done("duplicate")
#: A failure of each class.
FAILURES: Final[tuple[Exception, ...]] = (
    Retryable("busy"),
    Terminal("refused"),
    Ambiguous("no_answer"),
    RetryLater("closed", seconds=60),
    RuntimeError(),
)

Function = Callable[[Message[Any], MessageContext], Awaitable[object]]


def app_of(*functions: Function, **options: Any) -> MessageHandlers:
    """An application in which each function is a step of its own."""
    app = MessageHandlers()
    for number, function in enumerate(functions, 1):
        app.handler(TYPE, step=f"step-{number}", **options)(_named(function))
    return app


def _named(function: Function) -> Any:
    async def handler(message: Message[Any], context: MessageContext) -> object:
        return await function(message, context)

    return handler


class Member:
    """One process of a consumer."""

    def __init__(self, bench: "MessageBench", app: MessageHandlers, consumer: str, holder: str) -> None:
        def writer(metrics: ConsumerMetrics) -> MessageWriter:
            self.writer = bench.harness.writer(app, metrics, consumer=consumer, holder=holder)
            return self.writer

        async def passed(_seconds: float) -> None:
            """Nothing that is kept waits for the next attempt."""

        self._stepwise = StepwiseConsumer(app, writer, consumer=consumer, passed=passed)

    async def tries(self, record: BuiltRecord, *, suspect: bool = False) -> Sequence[Attempt]:
        """The first attempts of a delivery, one a handler."""
        return (await self.tries_all([record], suspect=suspect))[0]

    async def tries_all(self, records: Sequence[BuiltRecord], *, suspect: bool = False) -> Sequence[Sequence[Attempt]]:
        return await self._stepwise.receive(records, suspect=suspect)

    async def tries_again(self, attempts: Sequence[Attempt]) -> Sequence[Attempt]:
        return await self._stepwise.again(attempts)

    async def gets(self, record: BuiltRecord, *, suspect: bool = False) -> Outcome:
        """The outcome of a delivery's first attempt, where there is one handler."""
        (attempt,) = await self.tries(record, suspect=suspect)
        return attempt.outcome

    async def claims(self, *, hold_seconds: float = 60) -> Sequence[Letter]:
        return await self._stepwise.claim(hold_seconds=hold_seconds)

    async def redrives(self, letter: Letter) -> Outcome:
        outcome, _ = await self._stepwise.redrive(letter)
        return outcome


class MessageBench:
    """A database under test, whose consumers are this test's own."""

    def __init__(self, harness: MessageHarness) -> None:
        self.harness = harness
        self.consumer = f"contract-{secrets.token_hex(8)}"
        self.provider = Provider()

    def member(self, app: MessageHandlers, holder: str = "m1", *, consumer: str | None = None) -> Member:
        return Member(self, app, consumer or self.consumer, holder)

    async def gets(self, app: MessageHandlers, record: BuiltRecord) -> Outcome:
        """The outcome of a delivery to a process that knows nothing of others."""
        return await self.member(app).gets(record)

    async def write(self, connection: Any, line: str) -> None:
        await self.harness.write(connection, line)

    async def writes(self, message: Message[Any], context: MessageContext) -> None:
        """A handler that writes the message's value in its transaction."""
        async with context.transaction() as connection:
            await self.write(connection, str(message.value))

    async def written(self) -> Sequence[str]:
        return await self.harness.written()

    async def outcome_row(self, record: BuiltRecord) -> Mapping[str, Any] | None:
        """The message's own row, of a message that one step handles."""
        rows = [row for row in await self.harness.rows(event_id(record)) if row["operation"] == MESSAGE]
        assert len(rows) < 2, "one row a message and step"
        return rows[0] if rows else None

    async def effects(self, record: BuiltRecord) -> Sequence[Mapping[str, Any]]:
        return [row for row in await self.harness.rows(event_id(record)) if row["operation"] != MESSAGE]

    async def letters(self, consumer: str | None = None) -> Sequence[Mapping[str, Any]]:
        return await self.harness.letters(consumer or self.consumer)

    async def dead_letter(self) -> Mapping[str, Any]:
        """The latest."""
        letters = await self.letters()
        assert letters, "what is given up is kept"
        return letters[-1]

    async def ask(self, *, effects_checked: bool = False) -> str:
        """Ask for the dead letter to be handled anew."""
        return await self.harness.ask((await self.dead_letter())["dead_letter_id"], effects_checked=effects_checked)

    async def redriven(self, app: MessageHandlers) -> Outcome:
        """The outcome of the dead letter's redrive."""
        assert await self.ask(effects_checked=True) == "redriving"
        member = self.member(app)
        (letter,) = await member.claims()
        return await member.redrives(letter)

    async def given_up(self, app: MessageHandlers, record: BuiltRecord) -> Dead:
        """The end of a message that cannot be handled."""
        member = self.member(app)
        attempts = await member.tries(record)
        while not isinstance(outcome := attempts[0].outcome, Dead):
            assert not isinstance(outcome, Done), outcome
            attempts = await member.tries_again(attempts)
        return outcome


def event_id(record: BuiltRecord) -> str:
    """A CloudEvent's own id."""
    return (dict(record.headers)["ce_id"] or b"").decode()


def ping(value: object = 1, **options: Any) -> BuiltRecord:
    """An event that the handlers take."""
    return event(TYPE, value, **options)


message_sentence = sentences(MessageBench)
