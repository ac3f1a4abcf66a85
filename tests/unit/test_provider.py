"""The demo's payment provider: every mood of it, what a client makes of each, and that its book outlives it.

Each mood is had by a share of 1. What a failure means is asked of the classification that the ledger asks.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from consumer_sdk import Absent, Ambiguous, Applied, Effect
from consumer_sdk.classification import Kind, classify, proven
from demo.provider import Moods, Provider, ProviderServer, Temper, Wanted
from demo.provider_book import Book, Charge
from demo.provider_client import ProviderClient, ProviderError
from fencepost.devservices import free_port
from fencepost.devservices.processes import Watchdog
from tests.support.waiting import eventually

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENT_SECONDS: Final = 20.0

Serve = Callable[..., ProviderClient]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serves a provider: ``client = serve(moods=Moods(hang=1), forget_keys=True)``."""
    with contextlib.ExitStack() as stack:

        def start(*, timeout_seconds: float = PATIENT_SECONDS, **temper: Any) -> ProviderClient:
            book = Book(tmp_path / "book")
            stack.callback(book.close)
            server = ProviderServer(0, Provider(book, Temper(**{"delay_seconds": 0.0, **temper})))
            server.daemon_threads = True
            server.block_on_close = False  # a test does not wait for who hangs
            stack.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return ProviderClient(server.server_address[1], timeout_seconds=timeout_seconds)

        yield start


def effect(key: str = "fp_1", *, token: int = 7) -> Effect:
    return Effect(key=key, fencing_token=token, operation="provider.charge", sends=1)


async def charge(client: ProviderClient, key: str = "fp_1", *, order: str = "o-1", amount: int = 100) -> dict[str, Any]:
    made = (await client.charge(effect(key), order=order, amount=amount)).result
    assert isinstance(made, dict)
    return made


async def failure(client: ProviderClient, **request: Any) -> Exception:
    """What the client raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the tests look at
        await charge(client, **request)
    assert isinstance(caught.value, Exception)
    return caught.value


async def orders_charged(client: ProviderClient) -> list[str]:
    return [made["order"] for made in (await client.book())["charges"]]


# -- in a good mood ------------------------------------------------------------------------------------------------------


async def test_a_charge_is_in_the_book_with_its_key_amount_and_token(serve: Serve) -> None:
    client = serve()

    applied = await client.charge(effect("fp_1", token=7), order="o-1", amount=100)

    made = {"charge": "ch_000001", "key": "fp_1", "order": "o-1", "amount": 100, "token": 7}
    assert applied == Applied(made, reference="ch_000001")
    assert await client.book() == {"charges": [made], "declined": [], "repeats": 0}


async def test_the_same_key_and_body_get_the_same_charge_again_and_are_counted(serve: Serve) -> None:
    client = serve()

    assert await charge(client) == await charge(client)
    assert await orders_charged(client) == ["o-1"]
    assert (await client.book())["repeats"] == 1


@pytest.mark.parametrize("other", [{"order": "o-2"}, {"amount": 101}])
async def test_the_same_key_with_another_body_is_refused(serve: Serve, other: dict[str, Any]) -> None:
    client = serve()
    await charge(client)

    error = await failure(client, **other)

    assert (classify(error).code, proven(error)) == ("http_422", "terminal")
    assert await orders_charged(client) == ["o-1"]


async def test_a_provider_that_forgets_keys_charges_whatever_reaches_it(serve: Serve) -> None:
    client = serve(forget_keys=True)

    first, second = await charge(client), await charge(client)

    assert (first["charge"], second["charge"]) == ("ch_000001", "ch_000002")
    assert await orders_charged(client) == ["o-1", "o-1"]
    assert (await client.book())["repeats"] == 1
    assert await client.status("fp_1") == first


async def test_the_status_endpoint_reconciles(serve: Serve) -> None:
    client = serve()
    made = await charge(client, "fp_1")

    assert await client.charge_state(effect("fp_1")) == Applied(made, reference=made["charge"])
    assert await client.charge_state(effect("fp_2")) == Absent()


# -- in its moods --------------------------------------------------------------------------------------------------------

MOODS: Final[tuple[tuple[str, bool, str, Kind, str | None], ...]] = (
    # mood, whether it charged, code, what is proven, Retry-After
    ("fail_before", False, "http_500", "ambiguous", None),
    ("fail_after", True, "http_500", "ambiguous", None),
    ("hang_up", True, "connection_lost", "ambiguous", None),
    ("too_many", False, "http_429", "retryable", "3"),
    ("unavailable", False, "http_503", "retryable", "3"),
    ("declined", False, "http_402", "terminal", None),
)


@pytest.mark.parametrize(("mood", "charged", "code", "kind", "retry_after"), MOODS, ids=[row[0] for row in MOODS])
async def test_a_mood_charges_or_not_and_its_failure_says_what_is_proven(
    serve: Serve, mood: str, charged: bool, code: str, kind: Kind, retry_after: str | None
) -> None:
    client = serve(moods=Moods(**{mood: 1.0}), retry_after_seconds=3)

    error = await failure(client)

    assert (classify(error).code, proven(error), classify(error).retry_after) == (code, kind, retry_after)
    assert await orders_charged(client) == (["o-1"] if charged else [])
    assert (await client.status("fp_1") is not None) == charged


async def test_it_hangs_after_it_has_charged_and_the_time_out_proves_nothing(serve: Serve) -> None:
    client = serve(moods=Moods(hang=1.0), hang_seconds=PATIENT_SECONDS * 10)
    calling = asyncio.create_task(failure(client))

    await eventually(lambda: client.status("fp_1"), message="the order is charged")
    assert not calling.done()

    impatient = ProviderClient(client.port, timeout_seconds=0.2)
    error = await failure(impatient, key="fp_2", order="o-2")
    assert (type(error), proven(error)) == (TimeoutError, "ambiguous")
    calling.cancel()
    await asyncio.wait([calling])


async def test_a_call_that_is_cancelled_by_its_caller_stays_cancelled(serve: Serve) -> None:
    client = serve(moods=Moods(hang=1.0), hang_seconds=PATIENT_SECONDS * 10)

    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.2):
            await charge(client)
    assert proven(caught.value) == "ambiguous"


async def test_a_declined_order_stays_declined_whatever_key_it_comes_under(serve: Serve) -> None:
    client = serve(moods=Moods(declined=0.5))
    orders = [f"o-{number}" for number in range(40)]

    async def accepted(turn: str) -> list[str]:
        for order in orders:
            with contextlib.suppress(ProviderError):
                await charge(client, f"{turn}/{order}", order=order)
        return sorted({made["order"] for made in (await client.book())["charges"] if made["key"].startswith(turn)})

    first = await accepted("first")
    assert 0 < len(first) < len(orders)
    assert await accepted("second") == first
    assert (await client.book())["declined"] == sorted(set(orders) - set(first))


async def test_the_dice_of_a_seed_are_the_same_whatever_comes_between(serve: Serve) -> None:
    moods = Moods(fail_before=0.25, fail_after=0.25, too_many=0.25)

    async def codes(client: ProviderClient, orders: list[str]) -> dict[str, str]:
        found = {}
        for order in orders:
            try:
                await charge(client, f"fp_{order}", order=order)
                found[order] = "charged"
            except ProviderError as error:
                found[order] = str(error.status)
        return found

    orders = [f"o-{number}" for number in range(24)]
    one = await codes(serve(moods=moods, seed=5), orders)
    assert await codes(serve(moods=moods, seed=5), orders[::-1]) == one
    assert await codes(serve(moods=moods, seed=6), orders) != one
    assert set(one.values()) == {"charged", "500", "429"}


@pytest.mark.parametrize(("before", "status"), [(0.0, 408), (float("inf"), 200)], ids=["too late", "in time"])
def test_a_request_is_not_charged_after_the_time_that_it_names(tmp_path: Path, before: float, status: int) -> None:
    """A frozen process may hold a request for long; what it says of its time bounds how long it is in flight."""
    book = Book(tmp_path / "book")

    answer = Provider(book, Temper(delay_seconds=0.0)).charge(Wanted("fp_1", 7, "o-1", 100, before))

    assert answer is not None
    assert (answer.status, len(book.charges)) == (status, status == 200)
    book.close()


@pytest.mark.parametrize(
    "moods", [{"hang": -0.1}, {"declined": 1.1}, {"hang": 0.6, "hang_up": 0.6}], ids=["negative", "over one", "together over one"]
)
def test_shares_that_cannot_be_are_refused(moods: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        Moods(**moods)


# -- what nobody answers -------------------------------------------------------------------------------------------------


async def test_a_refused_connection_sent_nothing() -> None:
    error = await failure(ProviderClient(free_port(), timeout_seconds=PATIENT_SECONDS))

    assert (classify(error).code, proven(error)) == ("not_connected", "retryable")


ANSWERS: Final = (
    (b"", "connection_lost"),
    (b"HTTP/1.0 200", "unreadable_answer"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{}", "unreadable_answer"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n{", "unreadable_answer"),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", "unreadable_answer"),
    (b"HTTP/1.0 404", "unreadable_answer"),
    (b"no HTTP at all", "unreadable_answer"),
)


@pytest.mark.parametrize(("answer", "code"), ANSWERS)
async def test_an_answer_that_is_cut_off_or_none_proves_nothing(answer: bytes, code: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        error = await failure(ProviderClient(server.sockets[0].getsockname()[1], timeout_seconds=PATIENT_SECONDS))

    assert isinstance(error, Ambiguous)
    assert (error.code, proven(error)) == (code, "ambiguous")


async def test_what_is_no_charge_is_refused(serve: Serve) -> None:
    client = serve()

    for request in ({"key": ""}, {"amount": 0}, {"amount": -1}):
        error = await failure(client, **request)
        assert (classify(error).code, proven(error)) == ("http_400", "terminal")
    assert await orders_charged(client) == []


async def test_errors_quote_neither_key_nor_order(serve: Serve) -> None:
    error = await failure(serve(moods=Moods(fail_after=1.0)), key="fp_secret", order="o-secret")

    assert "secret" not in str(error) + repr(error)


# -- its book ------------------------------------------------------------------------------------------------------------


def test_a_book_is_read_back_whole_and_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    made = book.charge(key="fp_1", order="o-1", amount=100, token=1)
    book.decline("o-2")
    book.receive("fp_1")
    book.receive("fp_2")
    before = book.as_json()
    book.close()
    with (tmp_path / "book").open("ab") as file:
        file.write(b'{"charge": {"ch')

    again = Book(tmp_path / "book")
    assert again.as_json() == before == {"charges": [made._asdict()], "declined": ["o-2"], "repeats": 1}
    second = again.charge(key="fp_2", order="o-3", amount=5, token=1)
    again.close()

    last = Book(tmp_path / "book")
    assert last.charges == [made, second] == [made, Charge("ch_000002", "fp_2", "o-3", 5, 1)]
    last.close()


async def test_a_provider_that_is_killed_knows_afterwards_what_it_answered_for(tmp_path: Path, watchdog: Watchdog) -> None:
    port = free_port()
    client = ProviderClient(port, timeout_seconds=PATIENT_SECONDS)
    made: list[str] = []
    for turn in range(2):
        with running_provider(port, tmp_path / "book", watchdog) as process:
            await eventually(lambda: answers(client), PATIENT_SECONDS, message="the provider answers")
            calls = [asyncio.create_task(charge(client, f"fp_{turn}_{number}", order=f"o-{turn}-{number}")) for number in range(20)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            process.wait()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert done
            made += [outcome["charge"] for outcome in outcomes if isinstance(outcome, dict)]

    with running_provider(port, tmp_path / "book", watchdog):
        await eventually(lambda: answers(client), PATIENT_SECONDS, message="the provider answers")
        kept = [one["charge"] for one in (await client.book())["charges"]]
    assert len(set(kept)) == len(kept)
    assert set(made) <= set(kept)


@contextlib.contextmanager
def running_provider(port: int, book: Path, watchdog: Watchdog) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "demo.provider", str(port), "--book", str(book), "--seed", "3", "--delay-seconds", "0.05"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        watchdog.guard(process.pid, signal.SIGKILL)
        yield process
    finally:
        process.kill()
        process.wait()
        watchdog.release(process.pid)


async def answers(client: ProviderClient) -> bool:
    try:
        return bool(await client.book())
    except (OSError, Ambiguous):
        return False
