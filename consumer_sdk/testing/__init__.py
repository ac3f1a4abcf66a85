"""For tests of handlers, without Kafka and without PostgreSQL.

``handle`` delivers a message to an application's handlers as the consumer would, and tells what became of it; what is kept between
deliveries is a ``Memory``, whose clock moves only when it is told to::

    memory = Memory()
    order = event("order.placed", {"order": "o-1"})
    assert (await handle(app, order, memory=memory)).outcome == Done("handled")
    assert (await handle(app, order, memory=memory)).outcome == Done("duplicate")

``handle_many`` delivers several together, and ``redrive`` handles dead letters anew. These three need ``fencepost[consumer]``.

``MemoryEffects`` is the ledger's table in memory, with a clock and leases that the test moves; ``memory_ledger`` is a ledger over
it. It passes the same contract as the ledger on PostgreSQL: ``consumer_sdk.testing.contract.LedgerContract``, for which pytest is
needed. ``MemoryMessages`` are the tables of messages and dead letters, and their contract is ``MessageContract`` of
``consumer_sdk.testing.message_contract``. ``event`` builds a record in the wire format, ``message`` what a handler gets of it, and
``record`` any record at all::

    effects = MemoryEffects()
    ledger = memory_ledger(effects)
    ...
    effects.clock.advance(60)
    assert effects.row(key).state == "succeeded"
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from consumer_sdk.delivery import Again, Dead, Done
from consumer_sdk.testing.builders import BuiltRecord, EventOptions, event, message, record
from consumer_sdk.testing.clock import Clock
from consumer_sdk.testing.dead_letter import DeadLetter
from consumer_sdk.testing.effect_row import EffectRow
from consumer_sdk.testing.harness import LedgerHarness, MemoryHarness
from consumer_sdk.testing.leases import Leases
from consumer_sdk.testing.memory import Memory
from consumer_sdk.testing.memory_effects import MemoryEffects
from consumer_sdk.testing.memory_ledger import TEST_SECRETS, memory_ledger
from consumer_sdk.testing.memory_messages import MemoryMessages
from consumer_sdk.testing.recorder import RecordedCall, Recorder

if TYPE_CHECKING:
    from consumer_sdk.testing.delivering import Handled, Step, handle, handle_many, redrive

__all__ = [
    "Again",
    "BuiltRecord",
    "Clock",
    "Dead",
    "DeadLetter",
    "Done",
    "EffectRow",
    "EventOptions",
    "Handled",
    "LedgerHarness",
    "Leases",
    "Memory",
    "MemoryEffects",
    "MemoryHarness",
    "MemoryMessages",
    "RecordedCall",
    "Recorder",
    "Step",
    "TEST_SECRETS",
    "event",
    "handle",
    "handle_many",
    "memory_ledger",
    "message",
    "record",
    "redrive",
]

_LATE = ("Handled", "Step", "handle", "handle_many", "redrive")


def __getattr__(name: str) -> Any:
    # The consumer's own code brings its driver and its metrics; who builds a message needs neither.
    if name in _LATE:
        return getattr(import_module("consumer_sdk.testing.delivering"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
