"""Outside effects of runs, through a worker: what a handler's ``once`` does over retries, lost leases, replays and operators.

The provider keeps a book and knows no idempotency keys: what reaches it twice stands twice in it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from json import loads
from typing import Any, Final
from uuid import UUID

import asyncpg
import pytest

from consumer_sdk import (
    Ambiguous,
    CallLimits,
    EffectFailed,
    EffectUnknown,
    Handlers,
    Retry,
    Retryable,
    RunContext,
    Terminal,
    Worker,
    load_worker_settings,
)  # fmt: skip
from consumer_sdk.effects import Absent, Applied, Effect
from fencepost.errors import ConfigurationError, TransientError
from tests.support.commands import Command
from tests.support.effects import CHARGE, Bench, opened
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import eventually

SOON: Final = Retry(base_seconds=0.05, cap_seconds=0.05, jitter="none")
QUICK: Final = {"worker_http_port": 0, "worker_poll_interval_ms": 50, "worker_stop_grace_seconds": 1}
#: Absence counts right after the call.
HASTY: Final = CallLimits(timeout_seconds=0.2, in_flight_seconds=0.001)
END_SECONDS: Final = 10.0

Handle = Callable[[RunContext, Any], Any]


class Shop:
    """Runs, workers that execute them with one handler, and a provider that is charged."""

    def __init__(self, database_url: str, bench: Bench) -> None:
        self.database_url = database_url
        self.bench = bench
        self.runs = bench.runs
        self.provider = bench.provider
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def work(self, handler: Handle, *, reconciler: Any = None, retry: Retry = SOON) -> Worker:
        handlers = Handlers()
        handlers.handler(self.runs.workflow, retry=retry)(handler)
        if reconciler is not None:
            handlers.reconciler(CHARGE)(reconciler)
        settings = load_worker_settings(QUICK | {"database_url": self.database_url})
        worker = Worker(handlers, settings, secrets=self.bench.secrets)
        self._running[worker] = asyncio.create_task(worker.run())
        return worker

    async def stop(self, worker: Worker) -> None:
        worker.stop()
        async with asyncio.timeout(END_SECONDS):
            await self._running.pop(worker)

    async def ends(self, worker: Worker) -> None:
        """Wait until the worker has ended by itself; raises what it ended by."""
        async with asyncio.timeout(END_SECONDS):
            await self._running.pop(worker)

    async def close(self) -> None:
        for worker in list(self._running):
            with contextlib.suppress(Exception):
                await self.stop(worker)

    async def accept(self, **options: Any) -> UUID:
        return await self.runs.accept(data=b'{"amount": 10}', **{"max_attempts": 20, **options})

    async def reaches(self, run_id: UUID, state: str) -> None:
        async def reached() -> bool:
            return (await self.runs.state(run_id))[0] == state

        await eventually(reached, message=f"the run is {state}")

    async def effect(self, run_id: UUID) -> dict[str, Any]:
        """The only row of the lineage that the run began."""
        rows = await self.bench.connection.fetch("SELECT * FROM fencepost.effects WHERE run_key = $1", str(run_id))
        assert len(rows) == 1
        return dict(rows[0])

    async def output(self, run_id: UUID) -> Any:
        return loads(await self.bench.connection.fetchval("SELECT output FROM fencepost.runs WHERE run_id = $1", run_id))

    async def died(self, run_id: UUID) -> dict[str, Any]:
        await self.reaches(run_id, "failed")
        row = await self.bench.connection.fetchrow("SELECT * FROM fencepost.jobs WHERE run_id = $1", run_id)
        assert row is not None
        return dict(row)


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Shop]:
    async with opened(database_url) as bench:
        shop = Shop(database_url, bench)
        yield shop
        await shop.close()


def charging(shop: Shop, *then: Any, limits: CallLimits = HASTY) -> Handle:
    """Charges, then meets the errors of ``then``, one an attempt; afterwards its receipt is the output."""
    errors: Iterator[Any] = iter(then)

    async def order(context: RunContext, value: Any) -> object:
        receipt = await context.once(CHARGE, request=value, call=shop.provider.charge, limits=limits)
        error = next(errors, None)
        if error is not None:
            raise error
        return receipt

    return order


@pytest.mark.parametrize("then", [RuntimeError(), Retryable("busy"), TransientError("x"), KeyError("x")], ids=repr)
async def test_a_retry_gets_the_receipt_of_the_first_attempt(shop: Shop, then: Exception) -> None:
    """LEDGER-1, LEDGER-14: whatever the handler raised after its effect."""
    await shop.work(charging(shop, then, then))
    run = await shop.accept()
    await shop.reaches(run, "completed")

    assert await shop.output(run) == {"receipt": 1, "token": 1}
    assert len(await shop.runs.attempts(run)) == 3
    assert (await shop.effect(run))["state"] == "succeeded"
    assert len(shop.provider.book) == 1


@pytest.mark.parametrize("then", [Terminal("no_stock"), Ambiguous("who_knows"), TimeoutError()], ids=repr)
async def test_a_replay_of_a_dead_run_gets_the_receipt_too(shop: Shop, then: Exception) -> None:
    """LEDGER-8, LEDGER-11, LEDGER-14: twice at once, the run is replayed once, and nothing is charged again."""
    await shop.work(charging(shop, then))
    run = await shop.accept()
    await shop.died(run)
    outcomes = [await shop.runs.replay(run) for _ in range(2)]
    assert [outcome for outcome, _ in outcomes] == ["replayed", "already_replayed"]
    replay = outcomes[0][1]
    assert replay is not None
    await shop.reaches(replay, "completed")

    assert await shop.output(replay) == {"receipt": 1, "token": 1}
    assert (await shop.effect(run))["sends"] == 1
    assert len(shop.provider.book) == 1


async def test_a_worker_that_died_after_sending_leaves_an_effect_that_nobody_repeats(shop: Shop) -> None:
    """LEDGER-2, LEDGER-15: unknown, not failed and not free, however many attempts follow."""
    gate = asyncio.Event()
    shop.provider.after.append(gate)
    run = await shop.accept(max_attempts=4)
    dead = await shop.work(charging(shop, limits=CallLimits()))
    await asyncio.wait_for(shop.provider.reached.wait(), END_SECONDS)
    task = shop._running.pop(dead)
    task.cancel()  # the hard stop: nothing is given back
    await asyncio.wait([task])
    assert (await shop.effect(run))["state"] == "sent"
    await shop.runs.expire_lease(run)
    await shop.bench.pass_time(minutes=1)
    await shop.work(charging(shop))

    assert (await shop.died(run))["last_error_code"] == "effect_unknown"
    assert (await shop.effect(run))["state"] == "unknown"
    assert len(shop.provider.book) == 1


async def test_an_effect_found_at_the_provider_goes_on_with_what_was_found(shop: Shop) -> None:
    """LEDGER-3, LEDGER-12: delivered, then timed out; the reconciler finds it, nothing is sent again."""
    shop.provider.after.append(asyncio.Event())
    worker = await shop.work(charging(shop), reconciler=shop.provider.state)
    run = await shop.accept()
    await shop.reaches(run, "completed")

    assert await shop.output(run) == {"receipt": "found"}
    effect = await shop.effect(run)
    assert (effect["state"], effect["provider_reference"], effect["sends"]) == ("applied", "ch_1", 1)
    assert len(shop.provider.calls) == len(shop.provider.book) == 1
    counted = {
        outcome: worker._metrics.registry.get_sample_value("fencepost_effects_total", {"outcome": outcome})
        for outcome in ("succeeded", "replayed", "failed", "absent", "unknown", "reconciled", "mismatch")
    }  # fmt: skip
    assert {outcome: count for outcome, count in counted.items() if count} == {"unknown": 1, "reconciled": 1, "replayed": 1}


async def test_an_effect_proven_absent_is_sent_once_more_with_the_same_key(shop: Shop) -> None:
    """LEDGER-4."""
    shop.provider.before.append(TimeoutError())
    asked: list[Effect] = []

    async def reconciler(effect: Effect) -> Applied | Absent | None:
        asked.append(effect)
        return None if len(asked) == 1 else await shop.provider.state(effect)

    await shop.work(charging(shop), reconciler=reconciler)
    run = await shop.accept()
    await shop.bench.pass_time(seconds=1)
    await shop.reaches(run, "completed")

    first, second = shop.provider.calls
    effect = await shop.effect(run)
    assert first.key == second.key == effect["provider_key"]
    assert first.fencing_token < second.fencing_token == effect["generation"]
    assert (effect["state"], effect["sends"]) == ("succeeded", 2)
    assert len(shop.provider.book) == 1
    assert len(asked) >= 2


async def test_absence_that_was_seen_too_early_delays_the_next_attempt_until_it_counts(shop: Shop) -> None:
    """Attempts are not spent on questions whose answer cannot count yet."""
    shop.provider.before.append(TimeoutError())
    limits = CallLimits(timeout_seconds=1, in_flight_seconds=100)
    await shop.work(charging(shop, limits=limits), reconciler=shop.provider.state, retry=Retry(base_seconds=0.05, cap_seconds=300))
    run = await shop.accept()

    async def asked() -> bool:
        return len(await shop.runs.attempts(run)) == 2 and (await shop.runs.state(run))[1] == "queued"

    await eventually(asked, message="the second attempt has asked")
    wait = await shop.bench.connection.fetchval(
        "SELECT extract(epoch FROM available_at - clock_timestamp()) FROM fencepost.jobs WHERE run_id = $1", run
    )
    assert 90 < wait <= 102
    await shop.bench.pass_time(seconds=102)
    await shop.runs.make_ready(run)
    await shop.reaches(run, "completed")
    assert len(shop.provider.book) == 1


async def test_a_refusal_is_the_answer_of_every_attempt_and_of_a_replay(shop: Shop) -> None:
    """LEDGER-5."""
    shop.provider.before.append(Terminal("card_declined"))
    await shop.work(charging(shop))
    run = await shop.accept()
    job = await shop.died(run)
    assert (job["last_error_code"], job["dead_reason"]) == ("card_declined", "not_retryable")
    _, replay = await shop.runs.replay(run)
    assert replay is not None
    assert (await shop.died(replay))["last_error_code"] == "card_declined"

    effect = await shop.effect(run)
    assert (effect["state"], effect["error_code"]) == ("failed", "card_declined")
    assert len(shop.provider.calls) == 1


async def test_a_handler_may_go_on_after_a_refusal(shop: Shop) -> None:
    shop.provider.before.append(Terminal("card_declined"))

    async def order(context: RunContext, value: Any) -> object:
        try:
            await context.once(CHARGE, request=value, call=shop.provider.charge)
        except EffectFailed as refused:
            return {"ask_for_another_card": refused.code}
        return None

    await shop.work(order)
    run = await shop.accept()
    await shop.reaches(run, "completed")
    assert await shop.output(run) == {"ask_for_another_card": "card_declined"}


async def test_a_reservation_left_behind_is_taken_over_at_once_and_called_once(shop: Shop) -> None:
    """LEDGER-9: no `unknown`, and no waiting: the later lease proves that nobody holds it."""
    run = await shop.accept()
    held = await shop.runs.claim_one()
    await shop.bench.connection.execute(
        "INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, run_id, run_generation,"
        " holder, held_until, fingerprint, fingerprint_version, provider_key) VALUES"
        " ($1, 'acme', 0, $2, 0, $3, 'reserved', $4, $5, 'w1', clock_timestamp() + interval '1 hour', $6, 1, 'fp_1')",
        str(run), shop.runs.workflow, CHARGE, run, held.generation, await fingerprint(shop),
    )  # fmt: skip
    await shop.runs.expire_lease(run)
    await shop.work(charging(shop))
    await shop.reaches(run, "completed")

    effect = await shop.effect(run)
    assert (effect["state"], effect["generation"], effect["run_generation"], effect["sends"]) == ("succeeded", 2, 2, 1)
    assert [(call.key, call.fencing_token) for call in shop.provider.calls] == [("fp_1", 2)]


async def test_a_call_that_waits_for_a_silent_connection_to_close_does_not_hold_its_run(shop: Shop) -> None:
    """The network falls silent under a call that closes its connection as asyncpg's users do: that waits for the server's word, is
    cancelled, and waits on. The lease is renewed all the while, so nobody else would take the run over either."""
    closing: list[asyncio.Task[Any]] = []

    async with TcpProxy(shop.database_url) as proxy:

        async def charge(effect: Effect) -> object:
            connection = await asyncpg.connect(proxy.url)
            try:
                if effect.sends == 1:
                    task = asyncio.current_task()
                    assert task is not None
                    closing.append(task)
                    proxy.silence()
                await connection.fetchval("SELECT 1")
                return await shop.provider.charge(effect)
            finally:
                await connection.close()

        async def order(context: RunContext, value: Any) -> object:
            return await context.once(CHARGE, request=value, call=charge, limits=HASTY)

        async def state(effect: Effect) -> Applied | Absent:
            return Applied() if effect.key in shop.provider.book else Absent()

        await shop.work(order, reconciler=state)
        run = await shop.accept()
        await shop.reaches(run, "completed")

    assert [call.done() for call in closing] == [True]  # a second cancellation has got it out
    assert [attempt["outcome"] for attempt in await shop.runs.attempts(run)][-1] == "completed"
    effect = await shop.effect(run)
    assert (effect["state"], effect["sends"]) == ("succeeded", 2)
    assert len(shop.provider.book) == 1


async def fingerprint(shop: Shop) -> bytes:
    """Of the request that these handlers make, as a ledger stores it."""
    wanted = await shop.bench.message(operation=CHARGE)
    await shop.bench.once(wanted, request={"amount": 10})
    row = await shop.bench.row(wanted)
    shop.provider.book.clear()
    shop.provider.calls.clear()
    return bytes(row["fingerprint"])


async def test_changed_code_under_a_run_is_told_and_repeats_nothing(shop: Shop) -> None:
    """LEDGER-6."""
    attempts = iter(({"amount": 10}, {"amount": 11}))

    async def order(context: RunContext, _value: Any) -> object:
        await context.once(CHARGE, request=next(attempts), call=shop.provider.charge)
        raise Retryable("later")

    await shop.work(order)
    run = await shop.accept()
    assert (await shop.died(run))["last_error_code"] == "effect_mismatch"
    assert (await shop.effect(run))["state"] == "succeeded"
    assert len(shop.provider.book) == 1


async def test_steps_and_occurrences_are_effects_of_their_own(shop: Shop) -> None:
    """X5."""

    async def order(context: RunContext, value: Any) -> object:
        call, both = shop.provider.charge, {"request": value, "call": shop.provider.charge}
        for _ in range(2):
            for number in range(3):
                await context.once(CHARGE, request=[value, number], call=call, step="instalment", occurrence=number)
            await context.once(CHARGE, step="fee", **both)
            await context.once("card.refund", step="fee", **both)
        return len(shop.provider.book)

    await shop.work(order)
    run = await shop.accept()
    await shop.reaches(run, "completed")
    assert await shop.output(run) == len(set(shop.provider.book)) == 5


async def test_an_operators_word_lets_a_run_go_on(shop: Shop) -> None:
    """LEDGER-15: without a reconciler the effect is listed; resolved with actor and reason, the replay goes on with the result."""
    shop.provider.after.append(TimeoutError())
    await shop.work(charging(shop))
    run = await shop.accept(max_attempts=2)
    await shop.died(run)
    await shop.bench.pass_time(minutes=1)
    command = Command(shop.database_url)
    (listed,) = await command.json("effects", "list")
    assert (listed["run_key"], listed["operation"], listed["state"]) == (str(run), CHARGE, "unknown")
    await command.json(
        "effects", "resolve", "acme", run, "--as", "applied", "--result", '{"receipt": "by hand"}', "--reference", "ch_9",
        "--generation", listed["generation"], "--actor", "ana", "--reason", "found in the dashboard",
    )  # fmt: skip
    _, replay = await shop.runs.replay(run)
    assert replay is not None
    await shop.reaches(replay, "completed")

    assert await shop.output(replay) == {"receipt": "by hand"}
    assert len(shop.provider.book) == 1
    assert await command.json("effects", "list") == []
    assert await shop.bench.connection.fetchval("SELECT count(*) FROM fencepost.audit WHERE command = 'effects resolve'") == 1


async def test_two_attempts_of_one_run_at_once_charge_once(shop: Shop) -> None:
    """LEDGER-16, LEDGER-7: the first holder is paused in its call; the second waits, asks, and goes on with what is there."""
    gate = asyncio.Event()
    shop.provider.after.append(gate)
    limits = CallLimits(timeout_seconds=60, in_flight_seconds=0.001)
    await shop.work(charging(shop, limits=limits), reconciler=shop.provider.state)
    run = await shop.accept()
    await asyncio.wait_for(shop.provider.reached.wait(), END_SECONDS)
    await shop.bench.connection.execute(  # as if the first worker had been frozen past its lease
        "UPDATE fencepost.jobs SET lease_owner = 'other', lease_expires_at = clock_timestamp() - interval '1 s' WHERE run_id = $1",
        run,
    )
    await shop.work(charging(shop, limits=limits), reconciler=shop.provider.state)

    async def claimed_again() -> bool:
        return len(await shop.runs.attempts(run)) == 2

    await eventually(claimed_again, message="another attempt has begun")
    await shop.bench.pass_time(seconds=66)
    await shop.reaches(run, "completed")
    gate.set()
    assert await shop.output(run) == {"receipt": "found"}
    assert (await shop.effect(run))["state"] == "applied"
    assert len(shop.provider.calls) == len(shop.provider.book) == 1


async def test_the_token_in_the_users_own_update_lets_no_older_holder_write(shop: Shop) -> None:
    """LEDGER-17: 7 after 8 changes nothing, 8 and 9 do; the tokens of one effect never go back."""
    connection = shop.bench.connection
    await connection.execute("CREATE TABLE public.cards (token bigint NOT NULL)")
    await connection.execute("INSERT INTO public.cards VALUES (0)")
    written: list[tuple[int, str]] = []

    async def call(effect: Effect) -> object:
        done = await connection.execute("UPDATE public.cards SET token = $1 WHERE token <= $1", effect.fencing_token)
        written.append((effect.fencing_token, done))
        if len(written) < 3:
            raise Retryable("busy")
        return None

    async def order(context: RunContext, value: Any) -> None:
        await context.once(CHARGE, request=value, call=call)

    await shop.work(order)
    run = await shop.accept()
    await shop.reaches(run, "completed")
    assert written == [(1, "UPDATE 1"), (2, "UPDATE 1"), (3, "UPDATE 1")]
    assert await connection.execute("UPDATE public.cards SET token = $1 WHERE token <= $1", 2) == "UPDATE 0"


async def test_in_one_transaction_everything_is_there_once_or_not_at_all(shop: Shop) -> None:
    """LEDGER-10: a domain row and the completion commit together; after a take-over neither does."""
    connection = shop.bench.connection
    await connection.execute("CREATE TABLE public.credits (run_id text); GRANT ALL ON public.credits TO PUBLIC")
    lost = asyncio.Event()

    async def order(context: RunContext, _value: Any) -> None:
        async with context.transaction() as own:
            await own.execute("INSERT INTO public.credits VALUES ($1)", str(context.run_id))
            if not lost.is_set():
                lost.set()
                await shop.runs.expire_lease(context.run_id)
            await context.complete({"by": context.fencing_token})

    await shop.work(order)
    run = await shop.accept()
    await shop.reaches(run, "completed")
    assert await shop.output(run) == {"by": 2}
    assert await connection.fetchval("SELECT count(*) FROM public.credits") == 1
    assert [kind for _, kind in await shop.runs.events(run)].count("run_completed") == 1


async def test_no_call_is_made_while_a_transaction_is_open(shop: Shop) -> None:
    """It would hold the transaction for as long as a provider takes."""

    async def handler(context: RunContext, _value: Any) -> None:
        async with context.transaction():
            await context.once(CHARGE, request=1, call=shop.provider.charge)

    run_id = await shop.accept()
    await shop.work(handler)
    await shop.reaches(run_id, "failed")

    assert shop.provider.book == []
    assert await shop.bench.connection.fetchval("SELECT count(*) FROM fencepost.effects") == 0


async def test_a_worker_with_reconcilers_and_no_secrets_does_not_start(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)
    handlers = Handlers()

    @handlers.handler("report")
    async def report(_context: RunContext, _value: Any) -> None:
        return None

    @handlers.reconciler(CHARGE)
    async def ask(_effect: Effect) -> None:
        return None

    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_SECRETS"):
        Worker(handlers, load_worker_settings(QUICK | {"database_url": shop.database_url}))


async def test_an_effect_without_secrets_ends_the_worker_and_costs_no_run(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_IDEMPOTENCY_SECRETS", raising=False)
    shop.bench.secrets = None  # type: ignore[assignment]
    worker = await shop.work(charging(shop))
    run = await shop.accept()
    with pytest.raises(ConfigurationError, match="FENCEPOST_IDEMPOTENCY_SECRETS is required"):
        await shop.ends(worker)
    assert (await shop.runs.state(run))[0] == "running"
    assert shop.provider.calls == []


async def test_no_request_and_no_result_of_an_effect_is_in_logs_or_errors(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "sk-live-0123456789"

    async def order(context: RunContext, _value: Any) -> None:
        async def call(_effect: Effect) -> object:
            raise KeyError(secret)

        with contextlib.suppress(EffectUnknown):
            await context.once(CHARGE, request={"card": secret}, call=call)
        await context.once(CHARGE, request={"card": secret, "amount": 1}, call=call)

    await shop.work(order)
    run = await shop.accept()
    await shop.died(run)
    assert secret not in str(await shop.effect(run))
    assert secret not in str(await shop.runs.attempts(run))
    captured = capsys.readouterr()
    assert secret not in captured.out + captured.err


async def test_the_operator_sees_the_rows_under_a_role_of_its_own(shop: Shop) -> None:
    await shop.work(charging(shop))
    run = await shop.accept()
    await shop.reaches(run, "completed")
    await shop.bench.connection.execute("SET ROLE fencepost_operator")
    assert await shop.bench.connection.fetchval("SELECT count(*) FROM fencepost.effects") == 1
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await shop.bench.connection.execute("UPDATE fencepost.effects SET state = 'absent'")
    await shop.bench.connection.execute("RESET ROLE")
