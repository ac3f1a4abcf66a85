"""What the commands on dead letters cost a table of 100,000: buffers, counted, not timed. What is over costs what waits nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest

from consumer_sdk.dead_letter_batches import BATCH
from consumer_sdk.dead_letter_filter import OPEN, LetterFilter
from fencepost.devservices import Services
from fencepost.statements import load_statements
from tests.support.dead_letters import INDEXES, bury
from tests.support.session import SharedServices, in_a_thread

HISTORY: Final = 60_000
OPEN_LETTERS: Final = 40_000
RARE: Final = 50
PAGE: Final = 21
SQL: Final = load_statements("consumer_sdk", "inspection.sql")


@pytest.fixture(scope="module")
def filled_url(services: Services, shared_services: SharedServices) -> Iterator[str]:
    """60,000 that are over, and then 40,000 that wait; a tenth as many payloads are large. Cloned, and not connected to."""
    url = services.create_database(shared_services.template_url)
    in_a_thread(lambda: asyncio.run(_fill(url)))
    yield url
    services.drop_database(url)


async def _fill(url: str) -> None:
    connection = await asyncpg.connect(url)
    for index in INDEXES:
        await connection.execute(index)
    await connection.execute("ALTER TABLE fencepost.dead_letters SET (autovacuum_enabled = false)")
    await bury(connection, HISTORY, ago=timedelta(days=9), state="redriven", payload=b"x" * 500)
    await bury(connection, OPEN_LETTERS - RARE, ago=timedelta(hours=1), payload=b"x" * 500)
    await bury(connection, RARE, consumer="mails", step="mails/send", reason="invalid_payload")
    await connection.execute(
        "INSERT INTO fencepost.audit (actor, command, reason, detail) SELECT 'ana', 'dead-letters redrive', 'mended',"
        " jsonb_build_object('dead_letter_id', dead_letter_id) FROM fencepost.dead_letters"
    )
    await connection.close()


@pytest.fixture(params=["of empty tables", "of full tables"])
async def full(request: pytest.FixtureRequest, services: Services, filled_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    """With statistics from before it was filled, or from after."""
    url = services.create_database(filled_url)
    connection = await asyncpg.connect(url)
    if request.param == "of full tables":
        await connection.execute("ANALYZE fencepost.dead_letters, fencepost.audit")
    yield connection
    await connection.close()
    services.drop_database(url)


async def buffers(connection: "asyncpg.Connection[Any]", name: str, *arguments: object) -> int:
    """Pages that the statement touched, those of the functions that it called among them."""
    explained = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)\n{SQL[name]}", *arguments)
    plan = json.loads(explained)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def which(**parts: Any) -> LetterFilter:
    none = dict.fromkeys(LetterFilter.__dataclass_fields__)
    return LetterFilter(**(none | parts))


def arguments(**parts: Any) -> tuple[object, ...]:
    return which(**parts).arguments(OPEN, now=datetime.now(UTC))


@pytest.mark.parametrize("statement", ["list_dead_letters", "list_newest_dead_letters"])
async def test_a_page_reads_a_page_whatever_is_over(full: "asyncpg.Connection[Any]", statement: str) -> None:
    """Of all consumers, of one, of a rare one, of the last minutes, and behind a cursor in the middle."""
    middle: UUID = await full.fetchval(
        "SELECT dead_letter_id FROM fencepost.dead_letters WHERE state = 'dead' ORDER BY dead_letter_id OFFSET 20000 LIMIT 1"
    )
    newest_first = statement == "list_newest_dead_letters"
    behind = which().arguments(OPEN, now=datetime.now(UTC), after=middle, newest_first=newest_first)
    asked = {
        "all": arguments(),
        "one consumer": arguments(consumer="payments"),
        "a rare consumer": arguments(consumer="mails"),
        "since": arguments(newer_than=timedelta(minutes=10)),
        "behind a cursor": behind,
    }
    read = {name: await buffers(full, statement, *given, PAGE) for name, given in asked.items()}
    assert {name: pages for name, pages in read.items() if pages > 150} == {}


async def test_a_summary_reads_no_letter_that_is_over(full: "asyncpg.Connection[Any]") -> None:
    """Every waiting letter once, and no payload: those are as many pages as they fill, and their index."""
    table: int = await full.fetchval("SELECT relpages FROM pg_class WHERE oid = 'fencepost.dead_letters'::regclass")
    table = table or await full.fetchval("SELECT pg_relation_size('fencepost.dead_letters') / 8192")
    rows = await buffers(full, "summarise_dead_letters", *arguments(), 1_000_000, 20)
    assert rows <= OPEN_LETTERS + table * 0.5
    assert await buffers(full, "summarise_dead_letters", *arguments(consumer="mails"), 1_000_000, 20) <= 150


async def test_the_letters_of_a_filter_are_found_in_one_walk(full: "asyncpg.Connection[Any]") -> None:
    found = await full.fetch(SQL["match_dead_letters"], *arguments(consumer="payments"), 100_000)
    assert len(found) == OPEN_LETTERS - RARE
    assert await buffers(full, "match_dead_letters", *arguments(consumer="payments"), 1_000) <= 1_500


async def test_a_letter_and_what_was_done_to_it_are_looked_up(full: "asyncpg.Connection[Any]") -> None:
    one: UUID = await full.fetchval("SELECT dead_letter_id FROM fencepost.dead_letters LIMIT 1")
    assert await buffers(full, "dead_letter", one, 100, 200) <= 30
    assert await buffers(full, "dead_letter_audit", one, 100) <= 30


@pytest.mark.parametrize(
    ("statement", "rest"), [("redrive_dead_letters", (False, "ana", "mended")), ("discard_dead_letters", ("ana", "no"))]
)
async def test_a_batch_costs_its_letters_and_nothing_of_the_table(
    full: "asyncpg.Connection[Any]", statement: str, rest: tuple[object, ...]
) -> None:
    letters = await full.fetch(SQL["match_dead_letters"], *arguments(consumer="payments"), BATCH)
    ids, changes = [letter["dead_letter_id"] for letter in letters], [letter["changed_at"] for letter in letters]
    assert await buffers(full, statement, ids, changes, *rest) <= 60 * BATCH
    assert await full.fetchval("SELECT count(*) FROM fencepost.dead_letters WHERE state = 'dead'") == OPEN_LETTERS - BATCH
