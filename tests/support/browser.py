"""A page in a real Chromium, as Debian packages it: playwright drives it, and brings none of its own."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from playwright.async_api import Page, async_playwright

__all__ = ["open_page"]

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """An empty page. The test is skipped where there is no Chromium, and fails for an error on the page that nobody caught."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(_NAMES)} is on the path")
    errors: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page
        finally:
            await browser.close()
    assert errors == []
