"""The JavaScript client in a real Chromium, against a server that dies between any two bytes."""

from typing import Any, Final

import pytest
from playwright.async_api import Page

from tests.support.browser import open_page
from tests.support.model_route import COLLECT, SCENARIOS, ModelRoute, collect_input, expected

RUN: Final = f"async (input) => {{ const durable = await import('/durable.js'); {COLLECT} }}"


async def collected(page: Page, keys: list[str]) -> list[Any]:
    seen: list[Any] = await page.evaluate(RUN, collect_input("/answers", keys))
    return seen


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_no_place_of_a_kill_changes_what_a_page_ends_with(scenario: str) -> None:
    """R15, S18, S19, S24, S25"""
    async with ModelRoute() as route, open_page() as page:
        await page.goto(route.address)
        assert await collected(page, [scenario]) == [expected(scenario)]
        keys = [f"{scenario}.{cut}" for cut in range(route.lengths[scenario][0])]
        for key, seen in zip(keys, await collected(page, keys), strict=True):
            assert seen == expected(scenario), key
        assert route.complaints == []
        assert len({operation.body for operation in route.operations.values()}) == 1


async def test_a_page_that_leaves_a_stream_closes_its_connection() -> None:
    async with ModelRoute() as route, open_page() as page:
        await page.goto(route.address)
        script = """async () => {
          const { stream } = await import("/durable.js");
          for await (const frame of stream("/answers", { json: 1, key: "endless" })) return frame.type;
        }"""
        assert await page.evaluate(script) == "progress"
        await route.left.wait()
