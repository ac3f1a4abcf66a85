"""``fencepost consumer run``: handles the messages of topics with a module's handlers."""

from typing import Annotated

import typer

from consumer_sdk.consumer import Consumer
from consumer_sdk.consumer_settings import load_consumer_settings
from consumer_sdk.loading import load_object
from consumer_sdk.message_handlers import MessageHandlers
from consumer_sdk.service import run_service
from fencepost.console import naming_options
from fencepost.logs import configure_logs

__all__ = ["consumer"]

consumer = typer.Typer(help="The consumer: handles messages.", no_args_is_help=True)


@consumer.callback()
def _group() -> None:
    """A callback keeps a group a group while it has one command."""


@consumer.command("run")
def run(
    handlers: Annotated[str, typer.Argument(metavar="HANDLERS", help="Where the handlers are: module:attribute.")],
    database_url: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_DATABASE_URL.")] = None,
    topics: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_CONSUMER_TOPICS.")] = None,
    group: Annotated[str | None, typer.Option(help="Overrides FENCEPOST_CONSUMER_GROUP.")] = None,
) -> None:
    """Handle messages until SIGTERM or Ctrl-C.

    Everything else is set by FENCEPOST_CONSUMER_* in the environment; see the settings reference. Exit codes: 0 after a stop,
    1 after a fault that a restart may mend, 2 for a wrong set-up.

    Example:

      FENCEPOST_DATABASE_URL=postgresql://app@db/app \\
      FENCEPOST_KAFKA_BOOTSTRAP_SERVERS=kafka:9092 \\
      fencepost consumer run payments.messages:app --topics payments --group pay
    """
    given = {"database_url": database_url, "consumer_topics": topics, "consumer_group": group}
    options = {"DATABASE_URL": "--database-url", "CONSUMER_TOPICS": "--topics", "CONSUMER_GROUP": "--group"}
    with naming_options(**{f"FENCEPOST_{name}": option for name, option in options.items()}):
        settings = load_consumer_settings({name: value for name, value in given.items() if value is not None})
    found = load_object(handlers, MessageHandlers)

    def make() -> Consumer:
        running = Consumer(found, settings)
        configure_logs(settings.consumer_log_level, holder=running.holder)
        return running

    run_service(make)
