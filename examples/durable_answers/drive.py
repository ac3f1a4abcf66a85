"""Drives the page in a real browser while server, line and worker are killed, and looks at what the page was sent.

Needs the package ``playwright``, without the browsers of its own, and a chromium of the system.
"""

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.durable_answers.model import answer_to
from examples.durable_answers.wire import Wire, open_wire
from examples.stage import Stage
from fencepost.devservices import ServicesError

if TYPE_CHECKING:
    from playwright.async_api import Page

__all__ = ["Drive", "Driven", "chromium"]

_PROMPT: Final = "What happens if I pull the plug?"
_WIDTH: Final = 1040
_HEIGHT: Final = 760
_END_SECONDS: Final = 45.0
#: In the middle of a sentence: each of the model's is longer.
_SAYS: Final = "seen.live.length > 20"
_CHUNKS: Final = "seen.frames.filter(({ type }) => type === 'progress')"


def chromium() -> str:
    """The system's browser. Raises ``ServicesError``."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise ServicesError("no chromium found: install it, on Debian by apt-get install chromium")


@dataclass(frozen=True, kw_only=True)
class Driven:
    """What came of it. ``ids``: of the chunks of the last page load, in their order; ``attempts``: of the page before its reload.

    ``kept_through_kill``: chunks that the page showed when the server was killed, and still showed when it was back."""

    prompt: str
    text: str
    result: str | None
    ids: list[str]
    ids_before_reload: list[str]
    attempts: list[int]
    kept_through_kill: int
    live_chunks: int
    requests_before_reload: int
    connections_cut: int
    state: str

    @property
    def exact(self) -> bool:
        return self.text == self.result == answer_to(self.prompt)

    @property
    def each_once(self) -> bool:
        """No id came twice, and within an attempt each followed the one before it."""
        return all(_in_order(ids) for ids in (self.ids, self.ids_before_reload))

    @property
    def kept(self) -> bool:
        killed = self.kept_through_kill > 0 and self.connections_cut > 0 and self.requests_before_reload > 2
        shown = self.exact and self.each_once and self.attempts != [] and self.live_chunks > 0
        return killed and shown and self.state == "done"

    def as_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "exact": self.exact, "each_once": self.each_once, **asdict(self)}


class Drive:
    """One visit of the page. ``restart_server`` and ``restart_worker`` start them again; ``told`` gets each line."""

    def __init__(
        self,
        stage: Stage,
        *,
        restart_server: Callable[[], Awaitable[None]],
        restart_worker: Callable[[], Awaitable[None]],
        screenshots: Path | None,
        told: Callable[[str], None],
    ) -> None:
        self._stage = stage
        self._restart_server = restart_server
        self._restart_worker = restart_worker
        self._screenshots = screenshots
        self._told = told

    async def go(self) -> Driven:
        """Raises ``ServicesError`` where something does not come about, or no browser is there."""
        from playwright.async_api import async_playwright

        async with open_wire(self._stage.port) as wire, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            try:
                page = await browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
                return await self._visit(page, wire)
            finally:
                await browser.close()

    async def _visit(self, page: "Page", wire: Wire) -> Driven:
        await page.goto(wire.url)
        await page.fill("#prompt", _PROMPT)
        await page.click("#ask")
        await self._sees(page, f"{_CHUNKS}.length >= 7 && {_SAYS}")
        kept = await self._kill_the_server(page)
        await self._sees(page, f"{_CHUNKS}.length > {kept}")
        cut = await self._cut_the_line(page, wire)
        await self._kill_the_worker(page)
        before = await self._seen(page)
        self._told("the page is loaded anew: it goes on with the key that it has kept")
        await page.reload()
        await self._sees(page, "seen.result !== null")
        await self._photograph(page, "done")
        after = await self._seen(page)
        return Driven(
            prompt=_PROMPT,
            text=after["text"],
            result=after["result"],
            ids=_ids(after),
            ids_before_reload=_ids(before),
            attempts=[frame["number"] for frame in before["frames"] if frame["type"] == "attempt"],
            kept_through_kill=kept,
            live_chunks=before["lives"],
            requests_before_reload=before["requests"],
            connections_cut=cut,
            state=await page.inner_text("#state"),
        )

    async def _kill_the_server(self, page: "Page") -> int:
        self._stage.kill("server")
        self._told("kill -9: the server, in the middle of the stream")
        await self._sees(page, "seen.failures >= 2")
        kept = int(await page.evaluate(f"{_CHUNKS}.length"))
        await self._photograph(page, "server-killed")
        await self._restart_server()
        await self._sees(page, "document.getElementById('state').dataset.state === 'streaming'")
        self._told(f"the server is started again; the page has its {kept} chunks and goes on behind them")
        return kept

    async def _cut_the_line(self, page: "Page", wire: Wire) -> int:
        requests = int(await page.evaluate("seen.requests"))
        cut = wire.cut()
        self._told(f"the line is cut: {cut} connections reset")
        await self._sees(page, f"seen.requests > {requests} && !seen.failures")
        return cut

    async def _kill_the_worker(self, page: "Page") -> None:
        # In a paragraph that has stored a sentence, and in the middle of the next: so it is unfinished, and is said anew.
        await self._sees(page, f"{_CHUNKS}.at(-1).data.paragraph === seen.writing && {_SAYS}")
        self._stage.kill("worker")
        self._told("kill -9: the worker, in the middle of a paragraph")
        await self._restart_worker()
        await self._sees(page, "seen.attempt > 0 && seen.text.length > 20")
        self._told("another worker has taken the run over: the page was told to begin anew")
        await self._photograph(page, "begun-anew")

    async def _sees(self, page: "Page", condition: str) -> None:
        """Wait until the condition holds in the page."""

        async def holds() -> bool:
            return bool(await page.evaluate(f"Boolean({condition})"))

        await self._stage.until(holds, f"in the page: {condition}", seconds=_END_SECONDS)

    async def _seen(self, page: "Page") -> dict[str, Any]:
        seen: dict[str, Any] = await page.evaluate("seen")
        return seen

    async def _photograph(self, page: "Page", name: str) -> None:
        if self._screenshots is not None:
            await page.screenshot(path=self._screenshots / f"{name}.png")


def _ids(seen: dict[str, Any]) -> list[str]:
    return [frame["id"] for frame in seen["frames"] if frame["type"] == "progress"]


def _in_order(ids: list[str]) -> bool:
    """Each attempt's offsets are 0, 1, 2 and so on, and attempts only rise."""
    places = [tuple(map(int, one.split("."))) for one in ids]
    attempts = sorted({attempt for attempt, _ in places})
    return bool(ids) and places == [(attempt, n) for attempt in attempts for n in range(sum(a == attempt for a, _ in places))]
