"""What the demo shows while it runs, and the table at the end: live on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from demo.audit import Audit
from demo.payments_audit import PaymentsAudit
from demo.payments_state import Counts
from demo.processes import State

__all__ = ["PaymentsProgress", "Progress", "View", "payments_table", "result_table"]

_PLAIN_LINE_SECONDS: Final = 2.0
_COLOURS: Final[Mapping[State, str]] = {
    "running": "[green]running[/green]",
    "frozen": "[cyan]frozen[/cyan]",
    "gone": "[dim]-[/dim]",
}


@dataclass
class Progress:
    """The moment's numbers."""

    committed: int = 0
    rolled_back: int = 0
    published: int = 0
    lanes: dict[str, int] = field(default_factory=dict)
    killed: str | None = None

    @property
    def lag(self) -> int:
        """Committed and not yet read by the consumer."""
        return max(0, self.committed - self.published)


@dataclass(frozen=True, kw_only=True)
class PaymentsProgress:
    """The moment's numbers of the payments, and what became of each process."""

    counts: Counts
    states: Mapping[str, State]


class View:
    """``say`` is for what happens once, ``show`` and ``show_payments`` for the numbers, as often as one likes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._shown_at = 0.0
        self._panels: dict[str, RenderableType] = {}

    def __enter__(self) -> "View":
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(f"{self._clock()}  {text}", highlight=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """The numbers of the moment."""
        lanes = ", ".join(f"{name} {count} lanes" for name, count in sorted(progress.lanes.items()))
        line = (
            f"committed {progress.committed:,}  rolled back {progress.rolled_back:,}  published {progress.published:,}  "
            f"lag {progress.lag:,}  {lanes}"
        )
        self._show("delivery", line, self._panel(progress))

    def show_payments(self, progress: PaymentsProgress) -> None:
        """The payments' numbers of the moment."""
        numbers = "  ".join(f"{name} {count:,}" for name, count in _numbers(progress.counts).items())
        unwell = "".join(f"  {name} {state}" for name, state in progress.states.items() if state == "frozen")
        self._show("payments", numbers + unwell, self._payments_panel(progress))

    def _show(self, part: str, line: str, panel: RenderableType) -> None:
        self._panels[part] = panel
        if self._live is not None:
            self._live.update(Group(*self._panels.values()), refresh=True)
        elif time.monotonic() - self._shown_at >= _PLAIN_LINE_SECONDS:
            self._shown_at = time.monotonic()
            self.say(line)

    def _clock(self) -> str:
        return f"{time.monotonic() - self._started:5.1f} s"

    def _panel(self, progress: Progress) -> RenderableType:
        table = Table(title=f"{self._clock()}  order service → outbox → relays → Kafka → consumer", title_justify="left")
        for column in ("committed", "rolled back", "published", "lag"):
            table.add_column(column, justify="right", min_width=9)
        names = sorted({*progress.lanes} | ({progress.killed} if progress.killed else set()))
        for name in names:
            table.add_column(f"{name}", justify="right", min_width=10)
        counts = (progress.committed, progress.rolled_back, progress.published, progress.lag)
        table.add_row(*(f"{count:,}" for count in counts), *(self._lanes(progress, name) for name in names))
        return table

    def _payments_panel(self, progress: PaymentsProgress) -> RenderableType:
        title = f"{self._clock()}  shop → outbox → relays → Kafka → consumers → provider, once → outbox → relays → Kafka"
        numbers = Table(title=title, title_justify="left")
        for name in _numbers(progress.counts):
            numbers.add_column(name, justify="right", min_width=9)
        numbers.add_row(*(f"{count:,}" for count in _numbers(progress.counts).values()))
        states = Table(show_header=True)
        for name in progress.states:
            states.add_column(name, min_width=9)
        states.add_row(*(_COLOURS[state] for state in progress.states.values()))
        return Group(numbers, states)

    @staticmethod
    def _lanes(progress: Progress, name: str) -> str:
        count = progress.lanes.get(name, 0)
        if name == progress.killed:
            return f"[red]killed, {count} leased[/red]" if count else "[red]killed[/red]"
        return f"{count} lanes"


def _numbers(counts: Counts) -> Mapping[str, int]:
    return {
        "orders": counts.orders,
        "charged": counts.charged,
        "declined": counts.declined,
        "unknown": counts.unknown,
        "reconciled": counts.reconciled,
        "dead letters": counts.dead_letters,
    }


def result_table(found: Audit, rate: float, latency: dict[str, float | None], takeover: dict[str, float | None]) -> Table:
    """The end: each number with what it says."""
    table = Table(title="What the writers committed against what the consumer read", title_justify="left", show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    table.add_row("committed", f"{found.committed:,}", "events in committed transactions")
    table.add_row("published", f"{found.published:,}", "of those, read by the consumer")
    table.add_row("lost", _judged(found.lost), "committed and never read: must be 0")
    note = f"read without a commit: must be 0 ({found.rolled_back:,} were rolled back)"
    table.add_row("rolled_back_published", _judged(found.rolled_back_published), note)
    table.add_row("out_of_order", _judged(found.out_of_order), "first read after a later version of its key: must be 0")
    table.add_row("duplicates", f"{found.duplicates:,}", "read again after the kill: delivery is at least once")
    table.add_row("rate_per_second", f"{rate:,.0f}", "events delivered, over the whole run; the writers set it")
    table.add_row("latency_ms", _milliseconds(latency), "commit to consumer: both relays alive, after the first seconds")
    table.add_row("  during the takeover", _milliseconds(takeover), "the same, from the kill until its lanes were taken over")
    return table


def payments_table(found: PaymentsAudit) -> Table:
    """What became of the orders, by the provider's own book."""
    table = Table(
        title="What the provider, the ledger, the shop and Kafka say of the orders", title_justify="left", show_header=False
    )
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    table.add_row("orders", f"{found.orders:,}", "placed in committed transactions")
    table.add_row("charged_once", f"{found.charged_once:,}", f"by the provider's book; {found.declined:,} more were declined")
    table.add_row("charged_twice", _judged(found.charged_twice), "the provider honours no key: must be 0")
    table.add_row("uncharged", _judged(found.uncharged), "neither charged nor declined: must be 0")
    table.add_row("completed_once", f"{found.completed_once:,}", "ended by one event that tells the provider's truth: must be all")
    table.add_row("unknown_left", _judged(found.unknown_left), "calls that nobody knows the answer to: must be 0")
    table.add_row("repeats", _judged(found.repeats), "requests for what had been charged: must be 0")
    table.add_row("completed_twice", _judged(found.completed_twice), "ended by two events: must be 0")
    table.add_row("reconciled", f"{found.reconciled:,}", "charges known only by asking the provider afterwards")
    return table


def _judged(count: int) -> str:
    return f"[bold green]{count}[/bold green]" if count == 0 else f"[bold red]{count:,}[/bold red]"


def _milliseconds(latency: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {'-' if value is None else f'{value:,.1f}'}" for name, value in latency.items())
