"""The guide of the clients, run as it stands against a real server and a worker."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from fencepost.devservices.processes import Watchdog
from producer_sdk.http.client import conversation
from producer_sdk.http.problems import PROBLEMS
from tests.integration.test_documentation import run_python
from tests.support.javascript import run_javascript
from tests.support.killed_routes import WORDS
from tests.support.route_house import RouteHouse, open_house

PAGE: Final = (Path(__file__).parents[2] / "docs" / "guides" / "route-clients.md").read_text()
PYTHON: Final = re.findall(r"^```python route\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
JAVASCRIPT: Final = re.findall(r"^```js\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
async def house(database_url: str, tmp_path: Path, watchdog: Watchdog) -> AsyncIterator[RouteHouse]:
    async with open_house(database_url, tmp_path, watchdog) as house:
        for gate in ("order", *range(len(WORDS))):
            await house.open(gate)
        yield house


async def test_every_block_runs(house: RouteHouse, tmp_path: Path) -> None:
    environment = os.environ | {"SHOP_URL": house.url, "TOKEN": "ada", "STATE_DIRECTORY": str(tmp_path)}
    outputs = [await run_python(["-c", block], environment) for block in PYTHON]
    assert outputs == ["201 {'item': 'chair', 'row': 1}\n", "201 False\n", "all there: True\n"]
    assert not (tmp_path / "order.json").exists()

    [block] = JAVASCRIPT
    first, _, functions = block.partition("\n")
    assert first == 'import { newKey, send, stream } from "/durable.js";'
    script = f"""
    const {{ newKey, send, stream }} = durable;
    const kept = new Map();
    const localStorage = {{
      getItem: (name) => kept.get(name) ?? null,
      setItem: (name, key) => kept.set(name, key),
      removeItem: (name) => kept.delete(name),
    }};
    {functions.replace('("/', f'("{house.url}/')}
    const headers = {{ Authorization: "ada" }};
    const shown = [];
    await ask("why", headers, (text) => shown.push(text));
    return [shown.at(-1), kept.size, ...(await order("lamp", headers))];
    """
    said = await asyncio.to_thread(run_javascript, script, None)
    assert said == ["".join(WORDS), 0, 201, {"item": "lamp", "row": 3}]


def test_the_table_of_errors_names_problems_that_there_are() -> None:
    table = PAGE.partition("## What to do with each error")[2].partition("##")[0]
    slugs = {name for row in re.findall(r"`DurableProblem`, (.*?) \|", table) for name in re.findall("`([a-z-]+)`", row)}
    assert slugs <= PROBLEMS.keys()
    assert {slug for slug, problem in PROBLEMS.items() if problem.status == 500} <= slugs


def test_the_pages_numbers_are_the_clients() -> None:
    assert f"{conversation.Patience().timeout_seconds:.0f})" in PAGE
    assert f"{conversation._MOST_PAUSE_SECONDS:.0f} s at most" in PAGE
    assert f"up to {conversation._SPREAD_SECONDS} s more" in PAGE
