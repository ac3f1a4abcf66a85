"""A tiny order service: each order and its event are written in one transaction.

    FENCEPOST_DATABASE_URL=postgresql://... python examples/producer.py --count 10 --interval 1

Needs a database that `fencepost migrate` has prepared.
"""

import argparse
import asyncio
import itertools
import os
import random
import sys
from collections.abc import Iterable

import asyncpg

from producer_sdk import Event
from producer_sdk.asyncpg import enqueue

TOPIC = "orders"
CUSTOMERS = ("ada", "grace", "edsger", "barbara")

CREATE_TABLE = """
CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents integer NOT NULL)
"""
INSERT_ORDER = "INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING id"


async def place_order(connection: asyncpg.Connection, customer: str, cents: int) -> None:
    async with connection.transaction():
        order_id = await connection.fetchval(INSERT_ORDER, customer, cents)
        event = Event.json(
            {"order_id": order_id, "customer": customer, "cents": cents},
            topic=TOPIC,
            type="order.placed",
            key=f"order-{order_id}",
            source="example/orders",
        )
        await enqueue(connection, event)
    print(f"committed order {order_id} with event {event.event_id}", flush=True)


async def main(database_url: str, count: int | None, interval_seconds: float) -> None:
    rounds: Iterable[int] = itertools.count() if count is None else range(count)
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(CREATE_TABLE)
        for number in rounds:
            if number:
                await asyncio.sleep(interval_seconds)
            await place_order(connection, random.choice(CUSTOMERS), random.randrange(100, 10_000))
    finally:
        await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes orders and their events until stopped.")
    parser.add_argument("--count", type=int, help="stop after so many orders; without it, go on")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two orders")
    options = parser.parse_args()
    if "FENCEPOST_DATABASE_URL" not in os.environ:
        sys.exit("set FENCEPOST_DATABASE_URL: postgresql://user:password@host:5432/database")
    try:
        asyncio.run(main(os.environ["FENCEPOST_DATABASE_URL"], options.count, options.interval))
    except KeyboardInterrupt:
        print("stopped")
