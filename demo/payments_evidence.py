"""Fetches what the audit of the payments compares: from the shop's table, the provider, the ledger and Kafka."""

from typing import TYPE_CHECKING, Any, Final

from aiokafka import AIOKafkaConsumer

from consumer_sdk import Message
from demo.payments import ORDER_DECLINED, ORDER_PAID
from demo.payments_audit import Completion, Evidence, LedgerRow, Order, State
from demo.provider_book import Charge
from demo.provider_client import ProviderClient

if TYPE_CHECKING:
    import asyncpg

__all__ = ["completion_of", "gather_evidence", "read_completions"]

_ORDERS: Final = "SELECT order_id, amount, state, receipt FROM payment_orders"
_LEDGER: Final = "SELECT provider_key, state FROM fencepost.effects WHERE operation = $1"
_STATES: Final[dict[str, State]] = {ORDER_PAID: "paid", ORDER_DECLINED: "declined"}
_POLL_MILLISECONDS: Final = 500


async def gather_evidence(
    connection: "asyncpg.Connection[Any]", provider: ProviderClient, *, operation: str, bootstrap_servers: str, topic: str
) -> Evidence:
    """All of it. ``operation`` is the ledger's name of a charge, ``topic`` the one that orders' ends are published to."""
    book = await provider.book()
    return Evidence(
        orders=[Order(*row) for row in await connection.fetch(_ORDERS)],
        charges=[Charge(**charge) for charge in book["charges"]],
        declined=set(book["declined"]),
        repeats=book["repeats"],
        ledger=[LedgerRow(*row) for row in await connection.fetch(_LEDGER, operation)],
        completions=await read_completions(bootstrap_servers, topic),
    )


async def read_completions(bootstrap_servers: str, topic: str) -> list[Completion]:
    """Every end of an order that the topic holds now, as often as it is there."""
    # Without a group: a look at the topic from outside, at all its partitions.
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap_servers, group_id=None, auto_offset_reset="earliest", enable_auto_commit=False
    )
    found: list[Completion] = []
    try:
        await consumer.start()
        ends = await consumer.end_offsets(list(consumer.assignment()))
        while not all([await consumer.position(partition) >= end for partition, end in ends.items()]):
            batches = await consumer.getmany(timeout_ms=_POLL_MILLISECONDS)
            messages = (Message.from_record(record) for records in batches.values() for record in records)
            found += [completion_of(message) for message in messages if message.type in _STATES]
    finally:
        await consumer.stop()
    return found


def completion_of(message: Message[Any]) -> Completion:
    """The end of an order, as an event tells it."""
    said = message.json()
    return Completion(message.event_id, said["order_id"], _STATES[message.type], said["receipt"])
