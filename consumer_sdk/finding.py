"""One look of an investigation: evidence, verdict, and what to do next."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import typer

from consumer_sdk.inspection import plain
from fencepost.console import print_json, seconds
from fencepost.tables import print_rows, width

__all__ = ["SHOWN", "Finding", "report", "scope", "violations"]

# Rows that a look prints at most.
SHOWN: Final = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``verdict``: ok; warn, a person must judge; fail, a promise is broken. ``next`` is empty when all is well. ``urgent``: a
    warning that needs somebody now, so that scripts see it as well."""

    look: str
    verdict: Literal["ok", "warn", "fail"]
    says: str
    next: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    urgent: bool = False


def scope(count: int, most: int, *, around_one: bool = False) -> Finding:
    """How much was looked at: nothing broken among no runs says nothing. ``around_one``: one run is, and those that are like it."""
    number = f"{count}{' or more' if count >= most else ''}"
    says = f"runs looked at: {number}"
    if around_one:
        says = f"this run, its lineage, and those of its input; for acceptance and keys all of the window: {number}"
    if count or around_one:
        return Finding(look="scope", verdict="ok", says=says)
    return Finding(look="scope", verdict="warn", says=says, next="widen --since-hours, or look at the tenant's name")


def violations(look: str, rows: Sequence[Any], *, holds: str, broken: str, do: str) -> Finding:
    """A rule that no row may break."""
    if not rows:
        return Finding(look=look, verdict="ok", says=holds)
    count = f"{len(rows)} or more" if len(rows) >= SHOWN else str(len(rows))
    return Finding(look=look, verdict="fail", says=f"{broken}: {count}", next=do, rows=[dict(row) for row in rows])


def report(findings: Sequence[Finding], *, as_json: bool, summary: str, warned: str | None = None) -> None:
    """Print them and end: exit code 1 if one failed or is urgent. ``summary`` is what it means if none failed, ``warned`` what it
    means if some warn; they may mean the same."""
    if as_json:
        print_json([{**asdict(finding), "rows": [plain(row) for row in finding.rows]} for finding in findings])
    else:
        for finding in findings:
            _print(finding)
        typer.echo(f"\n{_conclusion(findings, summary, warned or summary)}")
    if any(finding.verdict == "fail" or finding.urgent for finding in findings):
        raise typer.Exit(1)


def _conclusion(findings: Sequence[Finding], summary: str, warned: str) -> str:
    failing, warning = ([found.look for found in findings if found.verdict == verdict] for verdict in ("fail", "warn"))
    look = f" Look at the warnings: {', '.join(warning)}." if warning else ""
    if failing:
        return f"Broken: {', '.join(failing)}.{look}"
    if "scope" in warning:
        return "No run was looked at, so this says nothing about any."
    return f"{warned}{look}" if warning else summary


def _print(finding: Finding) -> None:
    typer.echo(f"\n{_filled(f'{finding.verdict:<5} {finding.look}: {finding.says}')}")
    if finding.rows:
        names = list(finding.rows[0])
        print_rows([_heading(name) for name in names], [[_cell(name, row[name]) for name in names] for row in finding.rows])
    if finding.next:
        typer.echo("\n".join(_filled(f"   -> {line}") for line in finding.next.splitlines()))


def _filled(text: str) -> str:
    return textwrap.fill(text, width(), subsequent_indent=" " * 6, break_on_hyphens=False)


def _heading(name: str) -> str:
    return name.removesuffix("_seconds").removesuffix("_id").replace("_", " ")


def _cell(name: str, value: object) -> object:
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%m-%d %H:%M:%S}"
    if name.endswith("_seconds") and isinstance(value, int | float):
        return f"-{seconds(-value)}" if value < 0 else seconds(value)
    return value
