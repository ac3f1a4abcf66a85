"""A relay with a fault of its own: the product's code, wrapped from outside, in a process that a test starts.

``CRASH_POINT`` and ``CRASH_AT`` in its environment end it at a point; ``SEQUENCE_JUMPS_AT`` gives its producer a hole in the
sequence numbers, which the broker answers with the error that is fatal to an idempotent producer.
"""

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aiokafka import TopicPartition

from fencepost.cli import main
from relay.lane import Flight
from relay.producer import Producer
from relay.publishing import Publishing
from relay.store import Store
from tests.support.relay_process import RelayProcess

EXIT_CODE: Final = 9
ROOT: Final = Path(__file__).resolve().parents[2]

#: Point -> (class, method, whether the process ends before or after the method).
CRASH_POINTS: Final[dict[str, tuple[type, str, bool]]] = {
    "before the relay joins": (Store, "join", True),
    "after the relay joined": (Store, "join", False),
    "before a claim": (Store, "claim", True),
    "after a claim": (Store, "claim", False),
    "before the cursors are read": (Store, "cursors", True),
    "after the cursors were read": (Store, "cursors", False),
    "before a producer starts": (Producer, "start", True),
    "after a producer started": (Producer, "start", False),
    "before a poll": (Store, "poll", True),
    "after a poll": (Store, "poll", False),
    "before a batch is handed to the producer": (Publishing, "start", True),
    "after a batch was handed to the producer": (Publishing, "start", False),
    "before a Kafka batch is sent": (Producer, "send", True),
    "after a Kafka batch was acknowledged": (Producer, "send", False),
    "before an acknowledgement is noted": (Flight, "acknowledge", True),
    "after an acknowledgement was noted": (Flight, "acknowledge", False),
    "before a mark": (Store, "mark", True),
    "after a mark": (Store, "mark", False),
    "before a renewal": (Store, "renew", True),
    "after a renewal": (Store, "renew", False),
    "before the bell is armed": (Store, "arm", True),
    "after the bell was armed": (Store, "arm", False),
}
#: These are reached at a stop that somebody asked for.
STOP_POINTS: Final[dict[str, tuple[type, str, bool]]] = {
    "before the relay leaves": (Store, "leave", True),
    "after the relay left": (Store, "leave", False),
    "before the producer is discarded": (Producer, "discard", True),
    "after the producer was discarded": (Producer, "discard", False),
    "before a release": (Store, "release", True),
    "after a release": (Store, "release", False),
}


class AlteredRelay(RelayProcess):
    """A relay process with the wrapping; its environment says where it ends."""

    program = ("-m", "tests.support.altered_relay", "relay", "run")


def end_at(point: str, occurrence: int) -> None:
    """From now on the process ends at this occurrence of the point, as a crash would end it."""
    owner, name, before = (CRASH_POINTS | STOP_POINTS)[point]
    remaining = occurrence

    def reached() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os._exit(EXIT_CODE)

    setattr(owner, name, _wrapped(getattr(owner, name), reached, before=before))


def jump_at(occurrence: int) -> None:
    """Before this Kafka batch, forget a few sequence numbers of its partition."""
    remaining = occurrence
    send = Producer.send

    def jumping(self: Producer, builder: Any, topic: str, partition: int) -> "asyncio.Future[int]":
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            self._producer._txn_manager.increment_sequence_number(TopicPartition(topic, partition), 5)
        return send(self, builder, topic, partition)

    Producer.send = jumping  # type: ignore[method-assign]


def _wrapped(method: Callable[..., Any], reached: Callable[[], None], *, before: bool) -> Callable[..., Any]:

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if before:
            reached()
        result = method(*args, **kwargs)
        if not before:
            reached()
        return result

    @functools.wraps(method)
    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        if before:
            reached()
        result = await method(*args, **kwargs)
        if not before:
            reached()
        return result

    return asynchronous if inspect.iscoroutinefunction(method) else plain


if __name__ == "__main__":
    if "CRASH_POINT" in os.environ:
        end_at(os.environ["CRASH_POINT"], int(os.environ["CRASH_AT"]))
    if "SEQUENCE_JUMPS_AT" in os.environ:
        jump_at(int(os.environ["SEQUENCE_JUMPS_AT"]))
    main()
