"""A real server is killed and started anew, again and again, while the three clients wait for answers and read streams: one run,
one effect, the whole text once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from fencepost.devservices.processes import Watchdog
from producer_sdk.http.client import AsyncDurableClient, Attempt, Chunk, DurableAnswer, DurableClient, Frame, Result
from tests.support.javascript import run_javascript
from tests.support.killed_routes import WORDS
from tests.support.route_house import RouteHouse, open_house
from tests.support.waiting import eventually

WHO: Final = {"Authorization": "ada"}
TEXT: Final = "".join(WORDS)
CLIENTS: Final = ("asyncio", "plain", "javascript")
KILLS: Final = 4


@pytest.fixture
async def house(database_url: str, tmp_path: Path, watchdog: Watchdog) -> AsyncIterator[RouteHouse]:
    async with open_house(database_url, tmp_path, watchdog) as house:
        yield house


SEND: Final = """
const { status, text, replayed } = await durable.send(input.url, input.options);
return [status, text, replayed];
"""
STREAM: Final = """
const seen = [];
for await (const frame of durable.stream(input.url, input.options)) seen.push(frame.type === "attempt" ? null : frame.data);
return seen;
"""


async def send(kind: str, url: str, body: dict[str, str]) -> tuple[int, str, bool]:
    key = f"key-{kind}"
    match kind:
        case "asyncio":
            async with AsyncDurableClient() as client:
                return written(await client.send("POST", url, json=body, key=key, headers=WHO))
        case "plain":
            with DurableClient() as plain:
                return written(await asyncio.to_thread(plain.send, "POST", url, json=body, key=key, headers=WHO))
    status, text, replayed = await in_javascript(SEND, url, body, key)
    return status, text, replayed


def written(answer: DurableAnswer) -> tuple[int, str, bool]:
    return answer.status, answer.content.decode(), answer.replayed


async def stream(kind: str, url: str, body: dict[str, str], seen: list[Any]) -> None:
    """Adds what the frames hold to ``seen``: None for a new attempt."""
    key = f"key-{kind}"
    match kind:
        case "asyncio":
            async with AsyncDurableClient() as client:
                async for frame in client.stream("POST", url, json=body, key=key, headers=WHO):
                    seen.append(held(frame))  # noqa: PERF401 - the test looks on
        case "plain":
            await asyncio.to_thread(stream_plainly, url, body, key, seen)
        case _:
            seen += await in_javascript(STREAM, url, body, key)


def stream_plainly(url: str, body: dict[str, str], key: str, seen: list[Any]) -> None:
    with DurableClient() as client:
        seen.extend(held(frame) for frame in client.stream("POST", url, json=body, key=key, headers=WHO))


def held(frame: Frame) -> Any:
    match frame:
        case Chunk(_, data) | Result(data):
            return data
        case Attempt():
            return None
    raise AssertionError(frame)


async def in_javascript(script: str, url: str, body: dict[str, str], key: str) -> Any:
    options = {"json": body, "key": key, "headers": WHO}
    return await asyncio.to_thread(run_javascript, script, {"url": url, "options": options})


@asynccontextmanager
async def together(call: Callable[[str], Awaitable[Any]]) -> AsyncIterator[dict[str, asyncio.Task[Any]]]:
    """Every client at once. All have ended behind the block."""
    tasks = {kind: asyncio.ensure_future(call(kind)) for kind in CLIENTS}
    try:
        yield tasks
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()


async def test_a_server_that_is_killed_while_clients_wait_runs_each_operation_once(house: RouteHouse) -> None:
    """R15, ROUTE: one run, one effect, one answer; the handler's own row is written once as well."""
    async with together(lambda kind: send(kind, f"{house.url}/orders", {"item": kind})) as answers:
        for _ in range(KILLS):
            await house.asked(len(CLIENTS))
            await house.restart_server()
        await house.asked(len(CLIENTS))
        await eventually(lambda: house.counted("stage.charges", len(CLIENTS)))
        await house.restart_server()  # each has a run by now, which this server did not start
        await house.open("order")
    for kind, task in answers.items():
        status, text, replayed = task.result()
        assert (status, replayed) == (201, True)
        assert text.startswith(f'{{"item":"{kind}","row":')
    tables = ("fencepost.runs", "fencepost.lineages", "fencepost.idempotency_keys", "stage.orders")
    assert await house.counts(*tables) == [3, 3, 3, 3]
    assert await house.charges() == dict.fromkeys(CLIENTS, 1)


async def test_a_server_that_is_killed_while_clients_read_gives_each_the_whole_text_once(house: RouteHouse) -> None:
    """STREAM-5, S4, S19, S24: a kill may come before, amid and behind the chunk that is on its way."""
    seen: dict[str, list[Any]] = {kind: [] for kind in CLIENTS}
    async with together(lambda kind: stream(kind, f"{house.url}/answers", {"prompt": kind}, seen[kind])):
        await house.asked(len(CLIENTS))
        for number in range(len(WORDS)):
            await house.open(number)
            if number % 3 == 0:  # once it has been read
                await eventually(lambda most=number + 1: len(seen["asyncio"]) >= most)  # type: ignore[misc]
            if number < KILLS:
                await house.restart_server()
    assert seen == {kind: [*WORDS, TEXT] for kind in CLIENTS}
    assert await house.counts("fencepost.runs", "fencepost.lineages") == [3, 3]
    assert await house.charges() == dict.fromkeys(CLIENTS, 1)


async def test_a_reader_has_the_whole_text_of_the_last_attempt_whichever_of_worker_and_server_died(
    house: RouteHouse,
) -> None:
    """S7, S8: what comes behind the last frame that clears is one text."""
    seen: list[Any] = []
    reading = asyncio.ensure_future(stream("asyncio", f"{house.url}/answers", {"prompt": "x"}, seen))
    try:
        for number in range(3):
            await house.open(number)
        await eventually(lambda: len(seen) >= 3)
        await house.restart_worker()
        await house.restart_server()
        for number in range(3, len(WORDS)):
            await house.open(number)
        async with asyncio.timeout(60):
            await reading
    finally:
        reading.cancel()
    begun = len(seen) - 1 - seen[::-1].index(None)
    assert seen[:3] == list(WORDS[:3])
    assert seen[begun + 1 :] == [*WORDS, TEXT]
    assert await house.counts("fencepost.runs") == [1]
