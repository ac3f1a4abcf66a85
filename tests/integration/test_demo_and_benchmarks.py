"""The demo's and the benchmarks' counting: each counter must be able to fail, and each number is what its name says.

Three benchmarks run in a tiny size: a side that does not work any more fails here, not in the next measurement.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import asyncpg
import psycopg
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import run_backlog
from benchmarks.acceptance import acceptance
from benchmarks.consumer import consumer
from benchmarks.consuming import must_be_whole
from benchmarks.jobs import jobs
from benchmarks.lab import BenchmarkFailed, Lab
from benchmarks.measure import Mark, delays_ms, growth, rate_between_marks, ratios, rounded, spread, summary_ms
from benchmarks.order_messages import SCHEMA
from benchmarks.poll import buffers_of
from benchmarks.report import Report
from benchmarks.workers.acceptors import WAYS
from benchmarks.writers import Window as WritersWindow
from benchmarks.writers import neighbours
from demo import command
from demo.audit import Audit, Commit, Event, Reading, Window, audit, latencies_ms, percentile
from demo.audit import summary_ms as audit_summary_ms
from demo.payments_audit import Completion, Evidence, LedgerRow, Order, PaymentsAudit, audit_payments
from demo.provider_book import Charge
from demo.scenario import Result
from fencepost.devservices import Services
from fencepost.devservices.processes import Watchdog

JSON_KEYS: Final = (
    "committed", "published", "lost", "rolled_back_published", "out_of_order", "duplicates", "rate_per_second", "latency_ms",
)  # fmt: skip

#: Of the payments, counted from the provider's own book.
PAYMENT_KEYS: Final = {"orders", "charged_once", "charged_twice", "completed_once", "unknown_left", "reconciled"}
ALL_PAID: Final = audit_payments(
    Evidence(
        orders=[Order("o-1", 5, "paid", "c-1")],
        charges=[Charge(charge="c-1", key="k-1", order="o-1", amount=5, token=1)],
        declined=set(),
        repeats=0,
        ledger=[LedgerRow("k-1", "succeeded")],
        completions=[Completion("e-1", "o-1", "paid", "c-1")],
    )
)

FIRST = Event("id-1", "order-1", 1)
SECOND = Event("id-2", "order-1", 2)
OTHER = Event("id-3", "order-2", 1)
GHOST = Event("id-4", "order-1", 3)


def commits(*events: Event) -> list[Commit]:
    return [Commit(event, 100.0 + place) for place, event in enumerate(events)]


def readings(*events: Event) -> list[Reading]:
    return [Reading(event, 100.5 + place) for place, event in enumerate(events)]


def found(*read: Event) -> Audit:
    """What the audit says of two keys' three committed events and a rolled back one, when these were read."""
    return audit(commits(FIRST, SECOND, OTHER), {GHOST}, readings(*read))


def test_a_clean_run_keeps_every_promise() -> None:
    clean = found(FIRST, OTHER, SECOND)

    assert clean == Audit(committed=3, published=3, lost=0, rolled_back=1, rolled_back_published=0, out_of_order=0, duplicates=0)
    assert clean.kept


def test_a_lost_event_is_counted() -> None:
    lossy = found(FIRST, OTHER)

    assert (lossy.lost, lossy.published, lossy.kept) == (1, 2, False)


def test_a_published_rollback_is_counted() -> None:
    haunted = found(FIRST, OTHER, SECOND, GHOST)

    assert (haunted.rolled_back_published, haunted.published, haunted.kept) == (1, 3, False)


def test_a_record_that_no_writer_knows_is_counted_as_uncommitted() -> None:
    assert found(FIRST, OTHER, SECOND, Event("id-9", "order-9", 1)).rolled_back_published == 1


def test_a_key_out_of_order_is_counted() -> None:
    swapped = found(SECOND, FIRST, OTHER)

    assert (swapped.out_of_order, swapped.kept) == (1, False)


def test_two_events_with_one_version_of_a_key_are_out_of_order() -> None:
    twin = replace_version(SECOND, 1)

    assert audit(commits(FIRST, twin), set(), readings(FIRST, twin)).out_of_order == 1


def test_a_duplicate_is_counted_and_breaks_no_promise() -> None:
    repeated = found(FIRST, OTHER, SECOND, FIRST, SECOND, SECOND)

    assert (repeated.duplicates, repeated.out_of_order, repeated.kept) == (3, 0, True)


def test_a_record_with_another_version_than_was_written_is_lost_and_uncommitted() -> None:
    altered = found(FIRST, OTHER, replace_version(SECOND, 7))

    assert (altered.lost, altered.rolled_back_published) == (1, 1)


def test_keys_are_not_ordered_among_one_another() -> None:
    assert found(OTHER, FIRST, SECOND).out_of_order == 0


def test_contradicting_books_are_refused() -> None:
    with pytest.raises(ValueError, match="as committed and as rolled back"):
        audit(commits(FIRST), {FIRST}, [])


def replace_version(event: Event, version: int) -> Event:
    return event._replace(version=version)


def test_latency_counts_commits_of_the_window_until_their_first_reading() -> None:
    received_at = {FIRST: 100.004, SECOND: 101.25, OTHER: 109.0}

    assert latencies_ms(commits(FIRST, SECOND, OTHER), received_at, Window(100.0, 102.0)) == pytest.approx([4.0, 250.0])


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]

    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([], 0.5)) == (50.0, 99.0, None)
    assert audit_summary_ms([3.0]) == {"p50": 3.0, "p99": 3.0}


def demo_exit_code(monkeypatch: pytest.MonkeyPatch, outcome: Audit, payments: PaymentsAudit = ALL_PAID) -> int:
    result = Result(
        audit=outcome, rate_per_second=1.0, latency_ms={"p50": 1.0}, latency_ms_during_takeover={"p50": 2.0}, payments=payments
    )
    monkeypatch.setattr(command, "_run", lambda *_args, **_options: result)
    root = typer.Typer()
    root.callback()(lambda: None)
    command.register(root)
    return CliRunner().invoke(root, ["demo"]).exit_code


@pytest.mark.parametrize("counter", ["lost", "rolled_back_published", "out_of_order"])
def test_the_demo_fails_when_a_promise_was_broken(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    clean = found(FIRST, OTHER, SECOND)

    assert demo_exit_code(monkeypatch, replace(clean, **{counter: 1})) == 1
    assert demo_exit_code(monkeypatch, replace(clean, duplicates=5)) == 0


@pytest.mark.parametrize("counter", ["charged_twice", "uncharged", "completed_twice", "unknown_left", "repeats"])
def test_the_demo_fails_when_an_order_was_not_charged_and_ended_once(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    clean = found(FIRST, OTHER, SECOND)

    assert demo_exit_code(monkeypatch, clean, replace(ALL_PAID, **{counter: 1})) == 1
    assert demo_exit_code(monkeypatch, clean) == 0


def test_the_demo_s_json_has_the_promised_keys() -> None:
    result = Result(
        audit=found(FIRST, OTHER, SECOND),
        rate_per_second=1.0,
        latency_ms={"p50": 1.0, "p99": 2.0},
        latency_ms_during_takeover={},
        payments=ALL_PAID,
    )

    assert tuple(result.as_json())[: len(JSON_KEYS)] == JSON_KEYS
    assert set(result.as_json()) >= PAYMENT_KEYS | {"latency_ms_during_takeover"}


def test_a_rate_leaves_out_the_first_mark_and_what_led_to_it() -> None:
    marks = [Mark(10.0, 500), Mark(10.0, 500), Mark(11.0, 300), Mark(12.0, 300)]

    assert rate_between_marks(marks) == pytest.approx(300)


def test_a_rate_of_one_moment_is_refused() -> None:
    with pytest.raises(ValueError, match="two moments"):
        rate_between_marks([Mark(10.0, 500)])


def test_a_message_that_never_arrived_fails_the_latency() -> None:
    assert delays_ms({"a": 1.0}, {"a": 1.004, "b": 3.0}) == pytest.approx([4.0])
    with pytest.raises(ValueError, match="1 of 2 messages never reached"):
        delays_ms({"a": 1.0, "b": 1.0}, {"a": 1.004})


def test_each_repeat_is_compared_with_the_baseline_of_the_same_repeat() -> None:
    assert ratios([80.0, 90.0], [100.0, 180.0]) == [0.8, 0.5]
    assert spread([0.5, 0.8, 0.6]) == {"min": 0.5, "median": 0.6, "max": 0.8}
    assert growth(110.0, 100.0) == pytest.approx(0.1)


def test_numbers_keep_three_digits() -> None:
    assert [rounded(value) for value in (0.0, 0.012345, 1.2345, 123.45, 123456.7)] == [0.0, 0.0123, 1.23, 123.0, 123457.0]
    assert summary_ms([1.0, 2.0, 3.0]) == {"p50": 2.0, "p99": 3.0, "count": 3}


def test_a_window_with_a_relay_is_compared_with_the_windows_beside_it() -> None:
    windows = [WritersWindow(commits_per_second=float(number), database_us=None) for number in range(5)]

    pairs = [[(a.commits_per_second, b.commits_per_second) for a, b in neighbours(windows, place, 2)] for place in (0, 1)]
    assert pairs == [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]


def test_buffers_are_those_found_and_those_read() -> None:
    assert buffers_of({"Shared Hit Blocks": 40, "Shared Read Blocks": 8}) == 48


def test_a_report_s_json_has_the_promised_shape() -> None:
    report = Report(
        benchmark="drain", machine={"cores": 2}, figures={"rows": 5, "ours": {"ms": 1.23456}}, ratios={"x": [1.0, 2.0, 4.0]}
    )

    assert report.as_json() == {
        "benchmark": "drain",
        "machine": {"cores": 2},
        "figures": {"rows": 5, "ours": {"ms": 1.23}},
        "ratios": {"x": {"min": 1.0, "median": 2.0, "max": 4.0}},
    }


@pytest.fixture
def lab(services: Services, tmp_path: Path, watchdog: Watchdog) -> Lab:
    """A bench on the run's services, whose processes it does not look at."""
    return Lab(Services("given", services.database_url, services.bootstrap_servers), tmp_path, watchdog)


WRITTEN: Final = {
    "runs": "tenant_id, workflow, workflow_version, topic, state, version, event_sequence, root_run_id = run_id AS root, "
    "octet_length(input) AS input_bytes, convert_from(input, 'UTF8')::jsonb AS input",
    "jobs": "tenant_id, workflow, state, max_attempts, attempts, available_at <= clock_timestamp() AS ready",
    "run_events": "tenant_id, sequence, type, detail",
    "idempotency_keys": "key_version, tenant_id, octet_length(fingerprint) AS fingerprint, fingerprint_profile, schema_version, "
    "expires_at - created_at BETWEEN interval '23:59:59' AND interval '24:00:01' AS for_a_day",
    "outbox": "topic, event_type, content_type, tenant_id, key = convert_to(run_id, 'UTF8') AS keyed_by_run, "
    "convert_from(payload, 'UTF8')::jsonb - 'run_id' - 'occurred_at' AS payload",
}


async def rows_written_by(way: str, address: str) -> dict[str, list[dict[str, Any]]]:
    connection = await asyncpg.connect(address)
    if way != "accept":
        await connection.execute("ALTER TABLE fencepost.run_events DISABLE TRIGGER publish")
    await WAYS[way](connection, "x" * 189)
    found = {name: await connection.fetch(f"SELECT {columns} FROM fencepost.{name}") for name, columns in WRITTEN.items()}
    await connection.close()
    return {name: [dict(row) for row in rows] for name, rows in found.items()}


@pytest.mark.parametrize("way", ["bare", "single_statement"])
async def test_the_bare_inserts_write_the_same_rows_as_an_acceptance(
    services: Services, database_url: str, shared_services: Any, way: str
) -> None:
    other = services.create_database(shared_services.template_url)

    accepted, bare = await rows_written_by("accept", database_url), await rows_written_by(way, other)

    services.drop_database(other)
    assert all(len(rows) == 1 for rows in accepted.values())
    assert bare == accepted


def test_the_acceptance_benchmark_reports_each_way_and_both_ratios(lab: Lab) -> None:
    found = acceptance(lab, repeats=1, seconds=0.3).as_json()

    assert set(found["ratios"]) == {"vs_bare_insert", "vs_bare_single_statement"}
    assert all(found["figures"][way]["commits_per_second"] > 0 for way in WAYS)
    assert found["figures"]["replay"]["wal_bytes_per_commit"] < found["figures"]["bare"]["wal_bytes_per_commit"]


def test_the_jobs_benchmark_reports_both_workers_and_what_a_claim_costs(lab: Lab) -> None:
    found = jobs(lab, repeats=1, rows=300, history=200, claims=4).as_json()

    claims = {f"{name}_vs_empty" for name in ("long_history", "long_history_unanalysed", "many_tenants")}
    assert set(found["ratios"]) == {"vs_procrastinate", *claims}
    workers: list[Mapping[str, Any]] = [
        found["figures"][name] for name in ("fencepost_concurrency_200", "fencepost_concurrency_10", "procrastinate")
    ]
    assert all(worker["jobs_per_second"] > 0 for worker in workers)


def test_a_worker_that_left_a_job_out_fails_the_jobs_benchmark(database_url: str) -> None:
    run_backlog.accept_runs(database_url, 3)

    with psycopg.connect(database_url, autocommit=True) as connection:
        assert not run_backlog.is_done(connection)
        with pytest.raises(BenchmarkFailed, match="0 attempts were completed for 3 jobs"):
            run_backlog.jobs_per_second(connection, 3)


_SIDES_OF_CONSUMER = ("batched", "redelivery", "one_by_one", "by_hand", "bare", "bare_pooled", "bare_domain_only")


def test_the_consumer_benchmark_reports_each_side_its_ratios_and_the_memory(lab: Lab) -> None:
    found = consumer(lab, repeats=1, rows=500, large_rows=12, seconds=0.3, concurrency=3).as_json()

    assert set(found["ratios"]) == {
        "one_by_one_vs_bare_commits", "one_by_one_vs_pooled_commits", "one_by_one_vs_by_hand", "batched_vs_one_by_one",
        "redelivery_vs_first",
    }  # fmt: skip
    figures = found["figures"]
    sides = [figures[name] for name in _SIDES_OF_CONSUMER]
    assert all(side["messages_per_second"] > 0 for side in sides)
    assert all(side["wal_bytes_per_message"] > 0 for side in sides)  # of the whole server, where other tests write as well
    assert all(figures["memory"][f"payload_{size}_bytes"]["peak_rss_mib"] > 20 for size in (200, 1_000_000))


@pytest.mark.parametrize(("handled", "recorded"), [(["a"], ["a", "b"]), (["a", "a"], ["a", "b"]), (["a", "b"], ["a"])])
def test_a_consumer_that_left_a_message_out_or_handled_one_twice_fails_its_benchmark(
    database_url: str, handled: list[str], recorded: list[str]
) -> None:
    ledger = """
    INSERT INTO fencepost.effects (run_key, tenant_id, iteration, step, occurrence, operation, state, holder, finished_at)
    SELECT one, '', 0, 'bench/store', 0, 'fencepost.message', 'succeeded', 'test', now() FROM unnest(%s::text[]) AS one
    """
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO orders (event_id, order_id, amount) SELECT one, '', 1 FROM unnest(%s::text[]) AS one", [handled]
        )
        connection.execute(ledger, [recorded])

    with pytest.raises(BenchmarkFailed, match="for 2 messages"):
        must_be_whole(database_url, 2)
