"""Starts the services and prints their addresses for a shell, or runs one command with them.

`python -m fencepost.devservices` runs until it is interrupted; `python -m fencepost.devservices -- COMMAND ...` until
the command ends, with the command's exit code.
"""

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError, for_code

from fencepost.devservices.errors import ServicesError
from fencepost.devservices.services import Services, start_services


def main() -> int:
    """Start, serve or run, stop; returns the exit code."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    # The first signal ends the wait below as Ctrl-C does, so that everything is stopped in order.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with start_services(arguments.directory, arguments.brokers, kind=arguments.kind) as services:
            asyncio.run(_create_topics(services.bootstrap_servers, arguments.topic))
            return _run(arguments.command, services) if arguments.command else _serve(services)
    except ServicesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fencepost.devservices", description="A PostgreSQL and a Kafka for development."
    )
    parser.add_argument("--directory", type=Path, help="keep data and logs here (default: a directory that is removed)")
    parser.add_argument("--brokers", type=int, default=1, help="number of Kafka brokers (default: 1)")
    parser.add_argument("--kind", choices=["given", "containers", "local"], help="default: the first that works")
    parser.add_argument("--topic", action="append", default=[], help="create this topic with 8 partitions; repeatable")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="run this command with the services")
    return parser


async def _create_topics(bootstrap_servers: str, topics: list[str]) -> None:
    if not topics:
        return
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(topic, 8, 1) for topic in topics])
    finally:
        await admin.close()
    for topic, code, *_ in answer.topic_errors:
        if code not in (0, TopicAlreadyExistsError.errno):
            raise ServicesError(f"topic {topic} could not be created: {for_code(code).__name__}")


def _addresses(services: Services) -> dict[str, str]:
    return {
        "FENCEPOST_DATABASE_URL": services.database_url,
        "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS": services.bootstrap_servers,
    }


def _serve(services: Services) -> int:
    for name, value in _addresses(services).items():
        sys.stdout.write(f"export {name}={value}\n")
    sys.stdout.flush()
    sys.stderr.write(f"{services.kind} services; Ctrl-C stops\n")
    try:
        signal.pause()
    except KeyboardInterrupt:
        sys.stderr.write("stopping\n")
    return 0


def _run(command: list[str], services: Services) -> int:
    # With this environment's own commands on the path, as in an activated one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(command, env=os.environ | _addresses(services) | {"PATH": path}, check=False).returncode


def _interrupt(_signal_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
