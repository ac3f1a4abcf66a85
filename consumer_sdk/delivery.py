"""One message on its way to one handler, and what can become of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args
from uuid import UUID

from consumer_sdk.identity import Identity
from consumer_sdk.message import Message, Record
from consumer_sdk.message_handlers import MessageHandler

__all__ = [
    "DEAD_REASONS", "Again", "Arrival", "Dead", "DeadReason", "Delivery", "Done", "DoneOutcome", "Outcome", "Redrive", "Refusal",
]  # fmt: skip

DeadReason = Literal[
    "undecodable", "unknown_type", "unknown_version", "tombstone", "invalid_payload", "too_old", "rejected", "ambiguous",
    "attempts_exhausted", "patience_exhausted", "run_failed",
]  # fmt: skip
DEAD_REASONS: Final[tuple[DeadReason, ...]] = get_args(DeadReason)
DoneOutcome = Literal["handled", "duplicate"]


class Refusal(NamedTuple):
    """Why a record cannot be given to a handler, in words that hold no value of it."""

    reason: DeadReason
    error_class: str
    error_code: str


@dataclass(slots=True, eq=False)
class Arrival:
    """A record that was received, until all of its handlers are done with it. ``finished`` is told then. ``stopping`` is set when
    its partition is to be let go of."""

    record: Record
    size: int
    finished: "Callable[[Arrival], None]"
    suspect: bool = False
    stopping: asyncio.Event | None = None
    left: int = 1

    def done(self) -> None:
        """One of its deliveries is done."""
        self.left -= 1
        if self.left == 0:
            self.finished(self)


class Redrive(NamedTuple):
    """A dead letter in hand: its id, the generation that fences what is written of it, and how often it had been tried."""

    dead_letter_id: UUID
    generation: int
    attempts: int


@dataclass(slots=True, eq=False)
class Delivery:
    """``attempts`` are those spent, ``postponed`` the retries that spent none. ``handler`` None: it is refused, for ``refusal``.
    ``suspect``: it may have ended the process that handled it before, or may end this one;
    ``doubtful``: another delivery of it was on its way here."""

    record: Record
    message: Message[Any] | None
    handler: MessageHandler | None
    identity: Identity
    arrival: Arrival | None
    refusal: Refusal | None = None
    redrive: Redrive | None = None
    suspect: bool = False
    doubtful: bool = False
    attempts: int = 0
    postponed: int = 0
    delay_seconds: float | None = None
    first_tried_at: float | None = None

    @property
    def is_apart(self) -> bool:
        """Whether it is to be in no batch with others: it has failed before, or may fail in a way that fails them."""
        return self.suspect or self.attempts > 0 or self.redrive is not None

    @property
    def type(self) -> str | None:
        """The message's type, where it could be read."""
        return None if self.message is None else self.message.type


class Done(NamedTuple):
    """The message has its outcome, and it is recorded."""

    outcome: DoneOutcome


class Again(NamedTuple):
    """Try again after so many seconds. ``spent``: it was an attempt of the message's."""

    after_seconds: float
    spent: bool


class Dead(NamedTuple):
    """The message is given up."""

    reason: DeadReason
    error_class: str
    error_code: str


Outcome = Done | Again | Dead
