"""``fencepost worker run``: executes the runs that a module's handlers are for."""

from typing import Annotated

import typer

from consumer_sdk.loading import load_handlers
from consumer_sdk.service import run_service
from consumer_sdk.worker import Worker
from consumer_sdk.worker_settings import load_worker_settings
from fencepost.console import naming_options
from fencepost.logs import configure_logs

__all__ = ["worker"]

worker = typer.Typer(help="The worker: executes runs.", no_args_is_help=True)


@worker.callback()
def _group() -> None:
    """A callback keeps a group a group while it has one command."""


@worker.command("run")
def run(
    handlers: Annotated[str, typer.Argument(metavar="HANDLERS", help="Where the handlers or workflows are: module:attribute.")],
    database_url: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_DATABASE_URL.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Overrides FENCEPOST_WORKER_CONCURRENCY.")] = None,
) -> None:
    """Execute runs until SIGTERM or Ctrl-C.

    Everything else is set by FENCEPOST_WORKER_* in the environment; see the settings reference. Exit codes: 0 after a stop,
    1 after a fault that a restart may mend, 2 for a wrong set-up.

    Example:

      FENCEPOST_DATABASE_URL=postgresql://app@db/app \\
      fencepost worker run orders.work:handlers
    """
    given = {"database_url": database_url, "worker_concurrency": concurrency}
    with naming_options(FENCEPOST_DATABASE_URL="--database-url", FENCEPOST_WORKER_CONCURRENCY="--concurrency"):
        settings = load_worker_settings({name: value for name, value in given.items() if value is not None})
    found = load_handlers(handlers)

    def make() -> Worker:
        running = Worker(found, settings)
        configure_logs(settings.worker_log_level, worker_id=running.worker_id)
        return running

    run_service(make)
