"""The relay's commands: ``relay run``, ``status``, ``trace``, ``check`` and ``lanes rebase``."""

import asyncio
import signal
from typing import Annotated

import typer

from fencepost.console import naming_options
from fencepost.logs import configure_logs
from fencepost.loops import fastest_loop
from relay.app import Relay
from relay.check import check
from relay.rebase import rebase
from relay.settings import load_settings
from relay.status import status
from relay.trace import trace

__all__ = ["register"]

_relay = typer.Typer(help="The relay service.", no_args_is_help=True)
_lanes = typer.Typer(help="Lanes of the outbox.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    """Add the relay's commands to the root."""
    root.add_typer(_relay, name="relay")
    root.add_typer(_lanes, name="lanes")
    root.command("status")(status)
    root.command("trace")(trace)
    root.command("check")(check)


@_relay.callback()
@_lanes.callback()
def _group() -> None:
    """A callback keeps a group a group while it has one command."""


_lanes.command("rebase")(rebase)


@_relay.command("run")
def run(
    database_url: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_DATABASE_URL.")] = None,
    kafka_bootstrap_servers: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_KAFKA_BOOTSTRAP_SERVERS.")] = None,
) -> None:
    """Publish outbox rows until SIGTERM or Ctrl-C.

    Everything else is set by FENCEPOST_* in the environment; see the settings reference. Exit codes: 0 after a stop,
    1 after a fault that a restart may mend, 2 for a wrong set-up.

    Example:

      FENCEPOST_DATABASE_URL=postgresql://app@db/app \\
      FENCEPOST_KAFKA_BOOTSTRAP_SERVERS=kafka:9092 fencepost relay run
    """
    given = {"database_url": database_url, "kafka_bootstrap_servers": kafka_bootstrap_servers}
    options = {"FENCEPOST_DATABASE_URL": "--database-url", "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS": "--kafka-bootstrap-servers"}
    with naming_options(**options):
        settings = load_settings({name: value for name, value in given.items() if value is not None})

    async def main() -> None:
        relay = Relay(settings)
        configure_logs(settings.log_level, relay_id=relay.relay_id)
        await relay.run()
        # Stopped in order: a second signal must not turn exit code 0 into a kill while the interpreter ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(main())
