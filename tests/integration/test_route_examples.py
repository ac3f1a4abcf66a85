"""The examples of durable routes run by the command that their pages name, and the tutorial's commands print what it shows."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from examples.durable_answers.model import answer_to
from fencepost.devservices import Services, free_port
from fencepost.devservices.services import DATABASE_VARIABLE, KAFKA_VARIABLE
from tests.support.consoles import Console, exchanges
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).parents[2]
TUTORIAL: Final = ROOT / "docs" / "guides" / "durable-routes-tutorial.md"
SECONDS: Final = 150.0
PYTHON_BLOCK: Final = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

no_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or find_spec("playwright") is None,
    reason="needs a chromium (apt-get install chromium) and the package playwright",
)


@pytest.fixture
def environment(services: Services) -> dict[str, str]:
    return os.environ | {DATABASE_VARIABLE: services.database_url, KAFKA_VARIABLE: services.bootstrap_servers}


def run(environment: dict[str, str], numbers: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """An example's numbers and what it prints."""
    command = [sys.executable, *arguments, "--json", str(numbers)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(numbers.read_text())
    return found, done.stdout


def test_the_checkout_charges_and_ships_each_order_once_through_kills(environment: dict[str, str], tmp_path: Path) -> None:
    """R9, R3, R15, R18, R20, R24, R25: counted from the provider's own book."""
    found, printed = run(environment, tmp_path / "numbers.json", "-m", "examples.durable_checkout", "--orders", "12")
    assert found["open_when_killed"] > 0
    assert found["answered"] == found["crowd"] == 12
    assert found["paid"] == found["charged_once"] == found["shipped_once"] == 14
    assert (found["charged_twice"], found["charged_for_nothing"], found["shipped_twice"]) == (0, 0, 0)
    assert found["stock_adds_up"]
    answers = found["exchanges"]
    assert [answer["status"] for answer in answers] == [201, 201, 202, 200, 201, 422, 422, 402]
    first, replay, pending = answers[:3]
    assert replay["body"] == first["body"]
    assert (first["headers"].get("idempotent-replayed"), replay["headers"]["idempotent-replayed"]) == (None, "true")
    assert pending["headers"]["retry-after"] == "1"
    assert pending["headers"]["location"].startswith("/operations/")
    assert "kill -9: worker and server" in printed


@no_browser
def test_the_page_s_answer_is_exact_through_a_killed_server_a_cut_line_and_a_killed_worker(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """S7, S8, S10, S17, S20, S24: in a real browser; each chunk is shown once, and the attempt frame is seen."""
    arguments = ("-m", "examples.durable_answers", "--drive", "--screenshots", str(tmp_path))
    found, _ = run(environment, tmp_path / "numbers.json", *arguments)
    assert found["text"] == found["result"] == answer_to(found["prompt"])
    assert found["each_once"]
    assert found["attempts"] == [1]
    assert found["kept_through_kill"] >= 5
    assert found["connections_cut"] >= 1
    assert found["live_chunks"] > 0
    assert found["state"] == "done"
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("server-killed", "begun-anew", "done"))


@pytest.fixture
def hello(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of the tutorial's service."""
    address, log = f"localhost:{free_port()}", tmp_path / "hello.log"
    command = [sys.executable, "-m", "examples.durable_hello", "--port", address.rpartition(":")[2]]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        asyncio.run(eventually(lambda: process.poll() is not None or "# the worker" in log.read_text(), 60, message="it is open"))
        assert process.poll() is None, log.read_text()
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


def test_what_the_service_says_first_can_be_done(hello: str, tmp_path: Path) -> None:
    """An order, and the same one again; there is no page to open."""
    said = (tmp_path / "hello.log").read_text()
    [command] = re.findall(r"^  (curl .*?)\n\n", said, re.MULTILINE | re.DOTALL)
    first, again = (subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout for _ in range(2))
    assert first.startswith("HTTP/1.1 201 Created")
    assert "idempotent-replayed: true" in again
    assert first.splitlines()[-1] == again.splitlines()[-1]
    assert "docs/guides/durable-routes-tutorial.md" in said
    assert "open:" not in said


def test_every_command_of_the_tutorial_prints_what_it_shows(hello: str) -> None:
    """R9, R18, R20, S19, S22, T2: 201, its replay with the markers, 422 for another body, 202, and a resume behind 0.3."""
    console, commands = Console(shown="localhost:8080", meant=hello), list(exchanges(TUTORIAL))
    assert len(commands) >= 10
    for exchange in commands:
        printed, shown = console.run(exchange)
        # The name of a status is Python's, and changed with 3.13.
        assert printed.replace(HTTPStatus(422).phrase, "Unprocessable Entity") == shown, exchange.command


def test_the_tutorial_goes_through_what_the_contract_promises() -> None:
    """Whoever shortens the page notices."""
    shown = "\n".join(exchange.printed for exchange in exchanges(TUTORIAL))
    statuses = re.findall(r"^HTTP/1.1 (\d+)", shown, re.MULTILINE)
    assert statuses == ["201", "201", "422", "202", "201"]
    assert re.search(r"^retry-after: 1\n(?:.+\n)*location: /operations/", shown, re.MULTILINE)
    resumed = next(exchange for exchange in exchanges(TUTORIAL) if "Last-Event-ID: 0.3" in exchange.command)
    frames = resumed.printed.removeprefix("retry: 1000\n\n")
    assert frames == 'event: progress\ndata: {"token":"world"}\nid: 0.4\n\nevent: result\ndata: {"answer":"Hello world"}'


def test_what_is_killed_by_hand_is_started_again(hello: str, tmp_path: Path) -> None:
    log = tmp_path / "hello.log"
    process_ids = re.findall(r"kill -9 (\d+)    # the (?:server|worker)", log.read_text())
    assert len(process_ids) == 2
    headers = {"Authorization": "Bearer ada", "Idempotency-Key": "k-1"}
    first = httpx.post(f"http://{hello}/orders", headers=headers, json={"item": "lamp"})
    for process_id in process_ids:
        os.kill(int(process_id), signal.SIGKILL)
    asyncio.run(eventually(lambda: log.read_text().count("was killed and is started again") == 2, 60))
    second = httpx.post(f"http://{hello}/orders", headers=headers, json={"item": "lamp"})
    assert (first.status_code, second.status_code, second.content) == (201, 201, first.content)
    assert second.headers["idempotent-replayed"] == "true"


def test_the_tutorial_shows_the_service_as_it_is() -> None:
    [block] = PYTHON_BLOCK.findall(TUTORIAL.read_text())
    assert block == (ROOT / "examples" / "durable_hello" / "app.py").read_text()
