"""``fencepost worker run``: executes the runs that a module's handlers are for."""

import asyncio
import importlib
import os
import signal
import sys
import threading
from typing import Annotated, Any

import structlog
import typer

from consumer_sdk.evidence import frames_of
from consumer_sdk.handlers import Handlers
from consumer_sdk.worker import Worker
from consumer_sdk.worker_settings import load_worker_settings
from fencepost.errors import ConfigurationError
from fencepost.logs import configure_logs
from fencepost.loops import fastest_loop

__all__ = ["load_handlers", "worker"]

_log = structlog.get_logger(__name__)

worker = typer.Typer(help="The worker: executes runs.", no_args_is_help=True)


@worker.callback()
def _group() -> None:
    """A callback keeps a group a group while it has one command."""


def load_handlers(place: str) -> Handlers:
    """The ``Handlers`` at ``module:attribute``; the current directory is looked in first."""
    module_name, colon, attribute = place.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError("HANDLERS must be module:attribute, for example orders.work:handlers")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name != error.name and not module_name.startswith(f"{error.name}."):
            raise ConfigurationError(f"HANDLERS: {module_name} imports {error.name}, which is not installed") from error
        raise ConfigurationError(
            f"HANDLERS: there is no module {error.name}; start where it can be imported, or install it"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError("HANDLERS must name a module by its full name, for example orders.work:handlers") from error
    except Exception as error:  # noqa: BLE001 - a boundary: whatever a module does when it is imported
        place = (frames_of(error) or ["?"])[-1] if not isinstance(error, SyntaxError) else f"{error.filename}:{error.lineno}"
        raise ConfigurationError(f"HANDLERS: importing {module_name} failed: {type(error).__name__} at {place}") from None
    found = getattr(module, attribute, None)
    if not isinstance(found, Handlers):
        raise ConfigurationError(f"HANDLERS: {module_name} has no consumer_sdk.Handlers named {attribute}")
    return found


def _threads_of_handlers() -> bool:
    return any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate())


def _log_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A task of a handler's own that failed, say. Its class only: the message may quote what must not be logged."""
    error = context.get("exception")
    _log.error("loop_error", message=context.get("message"), error_class=type(error).__name__ if error else None)


@worker.command("run")
def run(
    handlers: Annotated[str, typer.Argument(metavar="HANDLERS", help="Where the handlers are: module:attribute.")],
    database_url: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_DATABASE_URL.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Overrides FENCEPOST_WORKER_CONCURRENCY.")] = None,
) -> None:
    """Execute runs until SIGTERM or Ctrl-C.

    Everything else is set by FENCEPOST_WORKER_* in the environment; see the settings reference. Exit codes: 0 after a stop,
    1 after a fault that a restart may mend, 2 for a wrong set-up.

    Example:

      FENCEPOST_DATABASE_URL=postgresql://app@db/app fencepost worker run orders.work:handlers
    """
    given = {"database_url": database_url, "worker_concurrency": concurrency}
    settings = load_worker_settings({name: value for name, value in given.items() if value is not None})
    found = load_handlers(handlers)

    async def main() -> None:
        running = Worker(found, settings)
        configure_logs(settings.worker_log_level, worker_id=running.worker_id)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, running.stop)
        loop.set_exception_handler(_log_loop_error)
        await running.run()
        # Stopped in order: a second signal must not turn exit code 0 into a kill while the interpreter ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        if running.left_behind or _threads_of_handlers():
            # The interpreter would wait for them without a bound. Their leases run out, and others recover their runs.
            sys.stderr.flush()
            os._exit(0)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(main())
