"""What the demo shows while it runs, and the table at the end: live on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from demo.audit import Audit
from demo.payments_audit import PaymentsAudit

__all__ = ["Progress", "View", "result_table"]

_PLAIN_LINE_SECONDS: Final = 2.0


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


class View:
    """``say`` is for what happens once, ``show`` for the numbers, as often as one likes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live: Live | None = None
        self._shown_at = 0.0

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
        if self._live is not None:
            self._live.update(self._panel(progress), refresh=True)
        elif time.monotonic() - self._shown_at >= _PLAIN_LINE_SECONDS:
            self._shown_at = time.monotonic()
            lanes = ", ".join(f"{name} {count} lanes" for name, count in sorted(progress.lanes.items()))
            self.say(
                f"committed {progress.committed:,}  rolled back {progress.rolled_back:,}  published {progress.published:,}  "
                f"lag {progress.lag:,}  {lanes}"
            )

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

    @staticmethod
    def _lanes(progress: Progress, name: str) -> str:
        count = progress.lanes.get(name, 0)
        if name == progress.killed:
            return f"[red]killed, {count} leased[/red]" if count else "[red]killed[/red]"
        return f"{count} lanes"


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
    table.add_row("reconciled", f"{found.reconciled:,}", "charges known only by asking the provider afterwards")
    return table


def _judged(count: int) -> str:
    return f"[bold green]{count}[/bold green]" if count == 0 else f"[bold red]{count:,}[/bold red]"


def _milliseconds(latency: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {'-' if value is None else f'{value:,.1f}'}" for name, value in latency.items())
