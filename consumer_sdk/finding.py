"""One look of an investigation: evidence, verdict, and what to do next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import typer

from consumer_sdk.inspection import plain
from consumer_sdk.tables import print_rows
from fencepost.console import print_json, seconds

__all__ = ["SHOWN", "Finding", "report", "violations"]

# Rows that a look prints at most.
SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Finding:
    """``verdict``: ok; warn, a person must judge; fail, a promise is broken. ``next`` is empty when all is well."""

    look: str
    verdict: Literal["ok", "warn", "fail"]
    says: str
    next: str = ""
    rows: Sequence[Mapping[str, Any]] = ()


def violations(look: str, rows: Sequence[Any], *, holds: str, broken: str, do: str) -> Finding:
    """A rule that no row may break."""
    if not rows:
        return Finding(look=look, verdict="ok", says=holds)
    count = f"{len(rows)} or more" if len(rows) >= SHOWN else str(len(rows))
    return Finding(look=look, verdict="fail", says=f"{broken}: {count}", next=do, rows=[dict(row) for row in rows])


def report(findings: Sequence[Finding], *, as_json: bool, summary: str) -> None:
    """Print them and end: exit code 1 if one failed. ``summary`` is what it means if none did."""
    failed = [finding.look for finding in findings if finding.verdict == "fail"]
    if as_json:
        print_json([{**asdict(finding), "rows": [plain(row) for row in finding.rows]} for finding in findings])
    else:
        for finding in findings:
            _print(finding)
        typer.echo(f"\nBroken: {', '.join(failed)}." if failed else f"\n{summary}")
    if failed:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    typer.echo(f"\n{finding.verdict:<5} {finding.look}: {finding.says}")
    if finding.rows:
        names = list(finding.rows[0])
        shown = [[_cell(name, row[name]) for name in names] for row in finding.rows]
        print_rows([name.removesuffix("_seconds").replace("_", " ") for name in names], shown)
    if finding.next:
        typer.echo(f"   -> {finding.next}")


def _cell(name: str, value: object) -> object:
    if name.endswith("_seconds") and isinstance(value, int | float):
        return f"-{seconds(-value)}" if value < 0 else seconds(value)
    return plain({name: value})[name]
