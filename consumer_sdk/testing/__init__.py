"""For tests of handlers, without Kafka and without PostgreSQL.

``MemoryEffects`` is the ledger's table in memory, with a clock and leases that the test moves; ``memory_ledger`` is a ledger over
it. It passes the same contract as the ledger on PostgreSQL: ``consumer_sdk.testing.contract.LedgerContract``, for which pytest is
needed. ``event`` builds a record in the wire format, ``message`` what a handler gets of it, and ``record`` any record at all::

    effects = MemoryEffects()
    ledger = memory_ledger(effects)
    ...
    effects.clock.advance(60)
    assert effects.row(key).state == "succeeded"
"""

from consumer_sdk.testing.builders import BuiltRecord, EventOptions, event, message, record
from consumer_sdk.testing.clock import Clock
from consumer_sdk.testing.effect_row import EffectRow
from consumer_sdk.testing.harness import LedgerHarness, MemoryHarness
from consumer_sdk.testing.leases import Leases
from consumer_sdk.testing.memory_effects import MemoryEffects
from consumer_sdk.testing.memory_ledger import TEST_SECRETS, memory_ledger

__all__ = [
    "BuiltRecord",
    "Clock",
    "EffectRow",
    "EventOptions",
    "LedgerHarness",
    "Leases",
    "MemoryEffects",
    "MemoryHarness",
    "TEST_SECRETS",
    "event",
    "memory_ledger",
    "message",
    "record",
]
