"""A consumer that ends itself at a point: ``python -m tests.support.crashing_consumer PLACE WHEN NTH``.

PLACE is one of ``PLACES``, WHEN before or after, NTH counts its uses from 1. The process ends as by kill -9: nothing is undone,
nothing is closed. PLACE ``nowhere`` never ends it.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from consumer_sdk.consumer import Consumer
from consumer_sdk.consumer_settings import load_consumer_settings
from consumer_sdk.effect_store import EffectStore
from consumer_sdk.kafka_member import KafkaMember
from consumer_sdk.message_store import MessageStore
from consumer_sdk.run_store import RunStore
from consumer_sdk.service import run_service
from consumer_sdk.transactions import HandlerConnection
from fencepost.logs import configure_logs

__all__ = ["PLACES"]

#: Where a consumer can end, by the method that does the step.
PLACES: Final[dict[str, tuple[type, str]]] = {
    "poll": (KafkaMember, "poll"),
    "known": (MessageStore, "known"),
    "reserve": (EffectStore, "reserve"),
    "send": (EffectStore, "send"),
    "finish": (EffectStore, "finish"),
    "begin": (HandlerConnection, "begin"),
    "record_within": (MessageStore, "record_within"),
    "commit": (HandlerConnection, "end"),
    "record": (MessageStore, "record"),
    "store_dead": (MessageStore, "store_dead"),
    "claim_run": (RunStore, "claim_run"),
    "commit_offsets": (KafkaMember, "commit"),
}


def crash_at(place: str, when: str, nth: int) -> None:
    """Make the method end the process at its nth use. A poll counts if it brought something."""
    owner, name = PLACES[place]
    method: Callable[..., Any] = getattr(owner, name)
    uses = 0

    async def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal uses
        uses += place != "poll"
        own = uses
        if when == "before" and own == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await method(*arguments, **named)
        if place == "poll":
            uses += bool(answer)
            own = uses
        if when == "after" and own == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, wrapped)


def main() -> None:
    from tests.support.consumer_handlers import app

    place, when, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if place != "nowhere":
        crash_at(place, when, nth)

    def make() -> Consumer:
        consumer = Consumer(app, load_consumer_settings())
        configure_logs("info", holder=consumer.holder)
        return consumer

    run_service(make)


if __name__ == "__main__":
    main()
