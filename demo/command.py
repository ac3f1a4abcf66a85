"""``fencepost demo``: the whole way from a transaction to a consumer on real services, with a crash, counted."""

import asyncio
import json
import logging
import signal
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler

from demo.scenario import Result, Scenario
from demo.view import View, payments_table, result_table
from fencepost.devservices import ServicesError, start_services
from fencepost.loops import fastest_loop

__all__ = ["register"]

_PLAIN_WIDTH = 120

_HELP = """Run the whole thing on real services, kill relays, consumers and a provider, and count.

Starts PostgreSQL and Kafka (the first set-up takes a minute or two), an order service whose writers commit, roll back,
dawdle and write in bulk, two relays of which one is killed with -9 midway, and a plain Kafka consumer. Then compares
what the writers committed with what the consumer read.

After it a shop: its orders are charged by two consumers at a provider that honours no key, fails, hangs and hangs up. A
relay, a consumer and the provider are killed in the middle of calls, a consumer is frozen past its session, another joins
and leaves. Then the shop's orders, the provider's book, the ledger and the events in Kafka are compared. Everything that
was started is stopped again.

Exit codes: 0 nothing lost, no rollback published, every key in order, every order charged once or declined and ended once;
1 otherwise; 2 the run itself went wrong.

Examples:

  fencepost demo

  fencepost demo --seconds 30 --rate 1000 --json result.json
"""


def register(root: typer.Typer) -> None:
    """Add the command to the root."""
    root.command("demo", help=_HELP)(_demo)


def _demo(
    seconds: Annotated[float, typer.Option(min=4, max=3600, help="How long the writers write.")] = 12,
    rate: Annotated[float, typer.Option(min=1, max=5_000, help="Transactions a second, all quick writers together.")] = 200,
    writers: Annotated[int, typer.Option(min=1, max=64, help="Quick writers; a slow one and a bulk one come on top.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers to this file.")] = None,
) -> None:
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_file.absolute().parent}", param_hint="--json")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    _show_progress_of_services(console)
    try:
        result = _run(console, seconds=seconds, rate=rate, writers=writers)
    except ServicesError as error:
        typer.echo(f"fencepost demo: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    _report(console, result)
    if not result.kept:
        raise typer.Exit(1)


def _run(console: Console, *, seconds: float, rate: float, writers: int) -> Result:
    console.print("starting PostgreSQL and Kafka; the first time, Kafka is downloaded", highlight=False)
    with tempfile.TemporaryDirectory(prefix="fencepost-demo-") as logs, start_services() as services:
        console.print(f"both run ({services.kind})", highlight=False)
        with View(console) as view:
            scenario = Scenario(services, view, seconds=seconds, rate=rate, writers=writers, logs=Path(logs))
            result = _with_fast_loop(scenario)
        console.print("stopping what was started", highlight=False)
    return result


def _with_fast_loop(scenario: Scenario) -> Result:
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(scenario.run())


def _report(console: Console, result: Result) -> None:
    console.print(result_table(result.audit, result.rate_per_second, result.latency_ms, result.latency_ms_during_takeover))
    if result.payments is not None:
        console.print(payments_table(result.payments))
    if result.kept:
        console.print("Every committed event arrived, no other did, and each key came in order.", highlight=False)
        console.print("Every order was charged once or declined, and ended once, whoever was killed.", highlight=False)
    else:
        console.print("[bold red]A promise was broken: please report this with the numbers above.[/bold red]")
    console.print("Next: README.md says what Fencepost promises and what not, and has the smallest producer and consumer.")


def _show_progress_of_services(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False)
    logger = logging.getLogger("fencepost.devservices")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # Clients log every retry while a service starts or stops; the demo says itself what went wrong.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def _interrupt(_signal_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
