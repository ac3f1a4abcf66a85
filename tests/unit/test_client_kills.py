"""The server dies between any two bytes of its answer, and both Python clients and the JavaScript one end with exactly what was
answered: each chunk once, under one key, with the same body each time."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from producer_sdk.http.client import (
    Activity,
    AsyncDurableClient,
    Attempt,
    Chunk,
    DurableAnswer,
    DurableClient,
    DurableProblem,
    Frame,
    Result,
    Truncated,
)
from tests.support.javascript import run_javascript
from tests.support.model_route import AT_ONCE, COLLECT, PROMPT, SCENARIOS, STREAMS, ModelRoute, collect_input, expected

Seen = list[list[Any]]
Client = Callable[[ModelRoute, Sequence[str]], Awaitable[list[Seen]]]


def written(frame: Frame) -> list[Any]:
    match frame:
        case Chunk(place, data):
            return ["progress", place, data]
        case Attempt(number):
            return ["attempt", number]
        case Truncated():
            return ["truncated"]
        case Activity(data):
            return ["activity", data]
        case Result(data):
            return ["result", data]


def answer_of(answer: DurableAnswer) -> Seen:
    return [["answer", answer.status, answer.content.decode(), answer.replayed]]


def problem_of(problem: DurableProblem) -> list[Any]:
    return ["problem", problem.slug, problem.status, problem.extensions["error_type"]]


def is_stream(key: str) -> bool:
    return key.partition(".")[0] in STREAMS


async def by_asyncio(route: ModelRoute, keys: Sequence[str]) -> list[Seen]:
    async def collect(client: AsyncDurableClient, key: str) -> Seen:
        seen: Seen = []
        try:
            if not is_stream(key):
                return answer_of(await client.send("POST", route.url, json=PROMPT, key=key))
            async for frame in client.stream("POST", route.url, json=PROMPT, key=key):
                seen.append(written(frame))
        except DurableProblem as problem:
            seen.append(problem_of(problem))
        return seen

    free = asyncio.Semaphore(AT_ONCE)

    async def collect_one(client: AsyncDurableClient, key: str) -> Seen:
        async with free:
            return await collect(client, key)

    async with AsyncDurableClient(limits=httpx.Limits(max_connections=AT_ONCE)) as client:
        return await asyncio.gather(*(collect_one(client, key) for key in keys))


async def by_threads(route: ModelRoute, keys: Sequence[str]) -> list[Seen]:
    def collect(client: DurableClient, key: str) -> Seen:
        seen: Seen = []
        try:
            if not is_stream(key):
                return answer_of(client.send("POST", route.url, json=PROMPT, key=key))
            for frame in client.stream("POST", route.url, json=PROMPT, key=key):
                seen.append(written(frame))
        except DurableProblem as problem:
            seen.append(problem_of(problem))
        return seen

    def collect_all() -> list[Seen]:
        with (
            DurableClient(limits=httpx.Limits(max_connections=AT_ONCE)) as client,
            ThreadPoolExecutor(AT_ONCE) as threads,
        ):
            return list(threads.map(lambda key: collect(client, key), keys))

    return await asyncio.to_thread(collect_all)


async def by_javascript(route: ModelRoute, keys: Sequence[str]) -> list[Seen]:
    return list(await asyncio.to_thread(run_javascript, COLLECT, collect_input(route.url, keys)))


CLIENTS: Final[dict[str, Client]] = {"asyncio": by_asyncio, "threads": by_threads, "javascript": by_javascript}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return CLIENTS[request.param]


async def check(route: ModelRoute, client: Client, keys: Sequence[str]) -> None:
    """Every key ends as its scenario says, and no request broke the contract on its way."""
    for key, seen in zip(keys, await client(route, keys), strict=True):
        assert seen == expected(key.partition(".")[0]), key
    assert route.complaints == []
    bodies = {operation.body for operation in route.operations.values()}
    assert len(bodies) == 1
    assert json.loads(bodies.pop()) == PROMPT


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_no_place_of_a_kill_changes_what_the_client_ends_with(client: Client, scenario: str) -> None:
    """R15, S18, S19, S24: the first answer is cut at every byte."""
    async with ModelRoute() as route:
        await check(route, client, [scenario])
        length = route.lengths[scenario][0]
        uncut = len(route.operations[scenario].requests)
        keys = [f"{scenario}.{cut}" for cut in range(length)]
        await check(route, client, keys)
        # What lies behind the last frame, or the last byte of a body, is not missed.
        assert {len(route.operations[key].requests) for key in keys[:100]} <= {uncut, uncut + 1}
        assert len(route.operations[keys[0]].requests) >= max(uncut, 2)


async def test_a_server_that_dies_again_and_again_loses_and_repeats_nothing(client: Client) -> None:
    """S24"""
    chance = random.Random(random.randrange(2**32))
    keys = [
        ".".join([scenario, *(str(chance.randrange(900)) for _ in range(chance.randrange(2, 5)))])
        for scenario in SCENARIOS
        for _ in range(40)
    ]
    async with ModelRoute() as route:
        await check(route, client, list(dict.fromkeys(keys)))
