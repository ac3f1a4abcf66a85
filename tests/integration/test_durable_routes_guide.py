"""The guide of those who write durable routes, run as it stands: its service, and the test that it shows of it."""

import os
import re
from base64 import b64encode
from pathlib import Path
from typing import Final

import asyncpg

from tests.integration.test_documentation import run_python

PAGE: Final = (Path(__file__).parents[2] / "docs" / "guides" / "durable-routes.md").read_text()
BOOKINGS: Final = "CREATE TABLE bookings (id text PRIMARY KEY, owner text, seat text, state text)"


def block(language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


async def test_the_service_passes_the_test_that_the_page_shows(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(block("python"))
    (tmp_path / "test_shop.py").write_text(block("python test"))
    connection = await asyncpg.connect(database_url)
    await connection.execute(BOOKINGS)
    environment = os.environ | {
        "FENCEPOST_DATABASE_URL": database_url,
        "FENCEPOST_IDEMPOTENCY_SECRETS": f"1:{b64encode(b'1' * 32).decode()}",
        "PYTHONPATH": str(tmp_path),
    }
    printed = await run_python(["-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)], environment)
    assert "1 passed" in printed
    assert await connection.fetchval("SELECT count(*) FROM bookings") == 1
    await connection.close()
