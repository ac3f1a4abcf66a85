"""Runs the example: ``python -m examples.durable_answers [--port PORT] [--drive [--screenshots DIR] [--json FILE]]``.

Starts PostgreSQL and Kafka from packages, a server and a worker, and prints the address of the page. With ``--drive`` a headless
chromium asks a question; the server is killed with -9 in the middle of the stream and started again, the line is cut, the worker is
killed, the page is loaded anew; and what the page was sent is compared with what the model said.

Exit codes: 0, with ``--drive`` only if the text is exact and each chunk came once; 1 otherwise; 2 the run itself went wrong.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Final

from examples.durable_answers.drive import Drive, Driven
from examples.stage import Stage, keep_open, open_stage, port_number, told
from fencepost.devservices import Services, ServicesError, start_services

_APP: Final = "examples.durable_answers.app:app"
_WORKFLOWS: Final = "examples.durable_answers.app:durable"


async def drive(services: Services, logs: Path, screenshots: Path | None) -> Driven:
    """Drive the page through everything that is killed."""
    async with open_stage(services, logs) as stage:
        await _open(stage)
        return await Drive(
            stage,
            restart_server=lambda: stage.serve(_APP),
            restart_worker=lambda: stage.work(_WORKFLOWS),
            screenshots=screenshots,
            told=told,
        ).go()


async def _open(stage: Stage) -> None:
    await asyncio.gather(stage.work(_WORKFLOWS), stage.serve(_APP))


def _show(driven: Driven) -> None:
    told(f"\nchunks {len(driven.ids)}, attempts after 0: {driven.attempts}, requests before the reload: "
          f"{driven.requests_before_reload}")  # fmt: skip
    told(f"the text is {'' if driven.exact else 'NOT '}exactly what the model said, {len(driven.text)} characters; "
          f"each chunk came {'once' if driven.each_once else 'NOT once'}")  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.durable_answers", description="A page whose stream survives what is killed."
    )
    parser.add_argument("--port", type=port_number, default=8081, help="where the page is served; default 8081")
    parser.add_argument("--drive", action="store_true", help="in a headless chromium, with everything killed; then end")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="with --drive: keep screenshots in this directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --drive: write what came of it to this file")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    if not options.drive:
        return keep_open(_APP, _WORKFLOWS, port=options.port)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    told("starting PostgreSQL and Kafka; the first time, Kafka is downloaded")
    try:
        with tempfile.TemporaryDirectory(prefix="durable-answers-") as logs, start_services() as services:
            driven = asyncio.run(drive(services, Path(logs), options.screenshots))
    except ServicesError as error:
        print(f"durable_answers: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(driven.as_json(), indent=2) + "\n")
    _show(driven)
    return 0 if driven.kept else 1


if __name__ == "__main__":
    sys.exit(main())
