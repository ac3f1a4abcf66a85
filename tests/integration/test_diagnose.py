"""``fencepost diagnose``: a healthy system is found healthy, and each thing that must not be is seeded by hand and found."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from consumer_sdk.duplicates import why_apart
from consumer_sdk.inspection import smallest_id, time_of
from consumer_sdk.stuck_leases import clock_finding, plan_finding, vacuum_finding
from fencepost.errors import ConfigurationError
from fencepost.statements import load_statements
from tests.support.commands import Command, user_of
from tests.support.runs import Held, Runs, new_key

DUPLICATES = ("diagnose", "duplicates", "--tenant", "acme")
DOUBLE = ("diagnose", "double-completion")
STUCK = ("diagnose", "stuck-leases")
REPAIR = (*STUCK, "--repair", "--actor", "ana", "--reason", "workers are down")


@pytest.fixture
async def runs(database_url: str) -> AsyncIterator[Runs]:
    connection = await asyncpg.connect(database_url)
    yield Runs(connection, "worker-a")
    await connection.close()


@pytest.fixture
def command(database_url: str) -> Command:
    return Command(database_url)


async def verdicts(command: Command, *arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings by their look."""
    return {finding["look"]: finding for finding in await command.json(*arguments, code=code)}


def failed(findings: dict[str, dict[str, Any]]) -> set[str]:
    return {look for look, finding in findings.items() if finding["verdict"] == "fail"}


def run_ids(finding: dict[str, Any]) -> list[str]:
    return [row["run_id"] for row in finding["rows"]]


async def all_kinds_of_runs(runs: Runs) -> None:
    """Completed, failed, cancelled twice over, replayed, retried, lost, given back, waiting: all by the worker's statements."""
    other = runs.by("worker-b")
    await runs.accept(key=new_key(), data=b"1")
    await runs.complete(await runs.claim_one())
    dead = await runs.accept(max_attempts=1, data=b"2")
    await runs.fail(await runs.claim_one())
    await runs.replay(dead)
    await runs.complete(await runs.claim_one())
    troubled = await runs.accept(max_attempts=5, data=b"3")
    await runs.fail(await runs.claim_one())
    await other.claim_one()
    await runs.expire_lease(troubled)
    await runs.release(await runs.claim_one())
    held = await other.claim_one()
    await other.renew(held)
    await other.complete(held)
    lost = await runs.accept(data=b"4")
    await runs.claim_one()
    await runs.expire_lease(lost)
    await runs.reap()
    cancelled = await runs.claim_one()
    await runs.cancel(cancelled.run_id)
    await runs.release(cancelled)
    await runs.cancel(await runs.accept(data=b"5"))
    expired = await runs.accept(data=b"6")
    await runs.claim_one()
    await runs.expire_lease(expired)
    await runs.cancel(expired)
    await runs.accept(delay=timedelta(hours=1), data=b"7")
    await runs.accept(workflow="held", data=b"8")
    await runs.claim_one(workflow="held")


@pytest.mark.parametrize("investigation", [DUPLICATES, DOUBLE, STUCK], ids=lambda words: words[1])
async def test_what_the_statements_do_breaks_no_rule(investigation: tuple[str, ...], runs: Runs, command: Command) -> None:
    await all_kinds_of_runs(runs)
    findings = await verdicts(command, *investigation)
    assert failed(findings) == set()
    code, output = await command(*investigation)
    assert code == 0
    assert "Broken" not in output


@pytest.mark.parametrize("investigation", [DUPLICATES, DOUBLE, STUCK], ids=lambda words: words[1])
async def test_an_operator_may_investigate(investigation: tuple[str, ...], runs: Runs, database_url: str) -> None:
    await all_kinds_of_runs(runs)
    async with user_of("fencepost_operator", database_url) as url:
        code, output = await Command(url, columns=80)(*investigation)
    assert code == 0, output


# Double completion: a completed run that worker-a lost and worker-b completed, then broken by hand.

VIOLATIONS = {
    "no terminal event": ("terminal events", "DELETE FROM fencepost.run_events WHERE type = 'run_completed'"),
    "two terminal events": (
        "terminal events",
        "DROP INDEX fencepost.run_events_terminal_key; UPDATE fencepost.runs SET event_sequence = 3; "
        "INSERT INTO fencepost.run_events SELECT run_id, tenant_id, 3, 'run_cancelled' FROM fencepost.runs",
    ),
    "terminal event of another state": (
        "terminal events", "UPDATE fencepost.run_events SET type = 'run_cancelled' WHERE type = 'run_completed'"
    ),
    "terminal event of a run that goes on": (
        "terminal events", "UPDATE fencepost.runs SET state = 'running', finished_at = NULL, output = NULL"
    ),
    "first event gone": ("event gaps", "DELETE FROM fencepost.run_events WHERE sequence = 1"),
    "sequence drawn and not used": ("event gaps", "UPDATE fencepost.runs SET event_sequence = 3"),
    "sequence used twice over": ("event gaps", "UPDATE fencepost.run_events SET sequence = 7 WHERE sequence = 2"),
    "two completed attempts": (
        "completions", "UPDATE fencepost.job_attempts SET outcome = 'completed', error_code = NULL WHERE generation = 1"
    ),
    "no completed attempt": ("completions", "UPDATE fencepost.job_attempts SET outcome = 'released' WHERE outcome = 'completed'"),
    "completed under an old generation": ("completions", "UPDATE fencepost.jobs SET lease_generation = 3"),
    "completed attempt of a dead job": (
        "completions", "UPDATE fencepost.jobs SET state = 'dead', dead_reason = 'x'"
    ),
    "ended under an old generation": ("fences", "UPDATE fencepost.run_events SET fencing_token = 1 WHERE sequence = 2"),
    "completed under none": ("fences", "UPDATE fencepost.run_events SET fencing_token = NULL WHERE sequence = 2"),
    "job in another state": ("alignment", "UPDATE fencepost.jobs SET state = 'queued', finished_at = NULL"),
    "no job": ("alignment", "DELETE FROM fencepost.jobs"),
    "late write": (
        "late writes",
        "UPDATE fencepost.job_attempts SET outcome = 'failed', finished_at = clock_timestamp() + interval '1 second' "
        "WHERE generation = 1",
    ),
    "attempt left open": (
        "late writes",
        "UPDATE fencepost.job_attempts SET outcome = NULL, finished_at = NULL, error_code = NULL WHERE generation = 1",
    ),
    "index gone": ("guards", "DROP INDEX fencepost.run_events_terminal_key"),
    "constraint gone": ("guards", "ALTER TABLE fencepost.jobs DROP CONSTRAINT jobs_state_check"),
    "trigger off": ("guards", "ALTER TABLE fencepost.run_events DISABLE TRIGGER publish"),
}  # fmt: skip


async def contested_run(runs: Runs) -> uuid.UUID:
    run = await runs.accept()
    await runs.claim_one()
    await runs.expire_lease(run)
    other = runs.by("worker-b")
    await other.complete(await other.claim_one())
    return run


@pytest.mark.parametrize("violation", VIOLATIONS)
async def test_a_broken_rule_is_found(violation: str, runs: Runs, command: Command) -> None:
    look, by_hand = VIOLATIONS[violation]
    run = await contested_run(runs)
    assert failed(await verdicts(command, *DOUBLE, "--run", run)) == set()
    await runs.connection.execute("SET session_replication_role = replica")
    await runs.connection.execute(by_hand)
    for scope in ((), ("--run", run), ("--tenant", "acme")):
        findings = await verdicts(command, *DOUBLE, *scope, code=1)
        assert look in failed(findings)
        if look != "guards":
            assert run_ids(findings[look]) == [str(run)]
    if look != "guards":
        assert look not in failed(await verdicts(command, *DOUBLE, "--tenant", "other", code=int("DROP" in by_hand)))
    code, output = await command(*DOUBLE)
    assert code == 1
    assert "Broken" in output
    assert "Proven" not in output


async def test_a_window_leaves_out_older_runs(runs: Runs, command: Command) -> None:
    old = smallest_id(datetime.now(UTC) - timedelta(hours=3))
    await runs.accept(run_id=old)
    await runs.connection.execute("UPDATE fencepost.runs SET event_sequence = 9")
    assert failed(await verdicts(command, *DOUBLE, "--since-hours", 4, code=1)) == {"event gaps"}
    findings = await verdicts(command, *DOUBLE, "--since-hours", 2)
    assert failed(findings) == set()
    assert findings["scope"]["verdict"] == "warn"


async def test_nothing_is_said_of_runs_that_nobody_looked_at(command: Command) -> None:
    assert [(found["look"], found["verdict"]) for found in await command.json(*DUPLICATES)] == [("scope", "warn")]
    for words in (DUPLICATES, DOUBLE):
        code, output = await command(*words)
        assert code == 0
        assert output.endswith("No run was looked at, so this says nothing about any.\n")


async def test_in_a_pipe_nothing_is_wrapped_and_at_a_terminal_everything_is(runs: Runs, command: Command) -> None:
    await contested_run(runs.by("worker-of-a-machine-with-a-very-long-name/7d232936f9838e86"))
    _, piped = await command(*DOUBLE, COLUMNS="")
    assert "worker-of-a-machine-with-a-very-long-name/7d232936f9838e86" in piped
    assert "ok    guards: the constraints and indexes that refuse a second ending are in force\n" in piped
    _, wrapped = await command(*DOUBLE, COLUMNS="80")
    assert max(len(line.rstrip()) for line in wrapped.splitlines()[:-1]) <= 80


@pytest.mark.parametrize("words", [DOUBLE, (*DOUBLE, "--tenant", "acme"), DUPLICATES], ids=" ".join)
async def test_an_unknown_run_is_not_said_to_be_well(words: tuple[str, ...], runs: Runs, command: Command) -> None:
    theirs = await runs.accept(tenant="theirs")
    answers = {run: await command(*words, "--run", run) for run in (uuid.uuid4(), theirs)}
    assert answers.popitem()[1][0] == (0 if words == DOUBLE else 1)
    assert [code for code, _ in answers.values()] == [1]


async def test_workers_that_lose_leases_are_named(runs: Runs, command: Command) -> None:
    await contested_run(runs)
    findings = await verdicts(command, *DOUBLE)
    assert findings["lost leases"]["rows"] == [{"worker": "worker-a", "attempts": 1, "lost": 1, "lost_after_renewal": 0}]
    assert findings["generations"]["rows"][0]["completed_by"] == "worker-b"


# Duplicates.


async def test_runs_of_one_input_under_different_keys_are_found_with_a_reason(runs: Runs, command: Command) -> None:
    keys = [new_key(), new_key()]
    twins = [await runs.accept(key=key, data=b"pay 4711") for key in keys]
    await runs.accept(key=new_key(), data=b"pay 4712")
    await runs.accept(tenant="other", key=new_key(), data=b"pay 4711")
    findings = await verdicts(command, *DUPLICATES)
    assert run_ids(findings["identical inputs"]) == [str(run) for run in twins]
    assert [row["fingerprint"] for row in findings["keys"]["rows"]] == [key.fingerprint.hex()[:8] for key in keys]
    assert "another scope" in findings["keys"]["next"]
    assert run_ids((await verdicts(command, *DUPLICATES, "--run", twins[0]))["identical inputs"]) == [str(run) for run in twins]
    for output in (json.dumps(findings), (await command(*DUPLICATES))[1]):
        assert "pay" not in output
        for key in keys:
            assert key.fingerprint.hex()[:10] not in output
            assert key.key_hash.hex()[:8] not in output


async def test_a_replay_is_no_duplicate_of_its_original(runs: Runs, command: Command) -> None:
    dead = await runs.accept(max_attempts=1, data=b"once")
    await runs.fail(await runs.claim_one())
    _, new = await runs.replay(dead)
    assert (await verdicts(command, *DUPLICATES))["identical inputs"]["verdict"] == "ok"
    await runs.accept(data=b"once")
    findings = await verdicts(command, *DUPLICATES)
    assert len(findings["identical inputs"]["rows"]) == 3
    assert findings["replays"]["rows"] == [{"run_id": str(new), "actor": "ana", "reason": "test", "replay_of": str(dead)}]


async def test_runs_that_were_executed_more_than_once_are_named(runs: Runs, command: Command) -> None:
    first = await runs.accept(data=b"twice")
    await runs.accept(data=b"twice", workflow="report", delay=timedelta(hours=1))
    await runs.claim_one()
    await runs.expire_lease(first)
    await runs.complete(await runs.claim_one())
    findings = await verdicts(command, *DUPLICATES)
    assert findings["attempts"]["rows"] == [{"run_id": str(first), "attempts": 2, "generations": 2, "lost": 1}]


@pytest.mark.parametrize("alone", [True, False], ids=["by its id", "in the window"])
async def test_a_run_that_was_executed_twice_is_named_though_no_other_is_like_it(alone: bool, runs: Runs, command: Command) -> None:
    await runs.accept(data=b"another", workflow="other")
    run = await runs.accept(data=b"alone")
    await runs.claim_one()
    await runs.expire_lease(run)
    await runs.complete(await runs.claim_one())
    findings = await verdicts(command, *DUPLICATES, *(("--run", run) if alone else ()))
    assert findings["identical inputs"]["verdict"] == "ok"
    assert findings["attempts"]["verdict"] == "warn"
    assert findings["attempts"]["rows"] == [{"run_id": str(run), "attempts": 2, "generations": 2, "lost": 1}]
    assert (await command(*DUPLICATES))[1].endswith("Look at the warnings: attempts.\n")


@pytest.mark.parametrize("named", ["the dead run", "its replay", "none"])
async def test_a_replay_is_named_though_no_other_run_is_like_it(named: str, runs: Runs, command: Command) -> None:
    dead = await runs.accept(max_attempts=1, data=b"alone")
    await runs.fail(await runs.claim_one())
    _, new = await runs.replay(dead)
    run = {"the dead run": ("--run", dead), "its replay": ("--run", new), "none": ()}[named]
    findings = await verdicts(command, *DUPLICATES, *run)
    assert findings["identical inputs"]["verdict"] == "ok"
    assert findings["replays"]["verdict"] == "warn"
    assert findings["replays"]["rows"] == [{"run_id": str(new), "actor": "ana", "reason": "test", "replay_of": str(dead)}]


async def test_one_run_is_judged_without_the_attempts_and_replays_of_others(runs: Runs, command: Command) -> None:
    dead = await runs.accept(max_attempts=1, data=b"other")
    await runs.fail(await runs.claim_one())
    await runs.replay(dead)
    await runs.release(await runs.claim_one())
    await runs.complete(await runs.claim_one())
    run = await runs.accept(data=b"alone")
    findings = await verdicts(command, *DUPLICATES, "--run", run)
    assert [findings[look]["verdict"] for look in ("attempts", "replays", "effects")] == ["ok", "ok", "ok"]
    assert findings["scope"]["says"].startswith("this run, its lineage, and those of its input;")


async def test_versions_and_retention_of_keys_are_shown(runs: Runs, command: Command) -> None:
    await runs.accept(key=new_key(), retention=timedelta(hours=2))
    await runs.accept(key=new_key(), retention=timedelta(hours=4))
    await runs.connection.execute("UPDATE fencepost.idempotency_keys SET expires_at = clock_timestamp() - interval '1 second'"
                                  " WHERE expires_at < clock_timestamp() + interval '3 hours'")  # fmt: skip
    (policy,) = (await verdicts(command, *DUPLICATES, code=1))["key policies"]["rows"]
    assert (policy["key_version"], policy["profile"], policy["keys"], policy["expired"]) == (1, 1, 2, 1)
    assert policy["longest_retention_seconds"] == pytest.approx(4 * 3600, abs=60)
    await runs.connection.execute(load_statements("consumer_sdk", "runs.sql")["expire_keys"].replace("$1", "10"))
    assert "1 keys of the window" in (await verdicts(command, *DUPLICATES))["key policies"]["says"]


@pytest.mark.parametrize(
    "by_hand",
    [
        "DELETE FROM fencepost.jobs",
        "DELETE FROM fencepost.run_events",
        "UPDATE fencepost.run_events SET type = 'run_failed'",
        "UPDATE fencepost.run_events SET created_at = created_at + interval '1 second'",
        "UPDATE fencepost.idempotency_keys SET schema_version = 2",
        "UPDATE fencepost.runs SET topic = 'other'",
    ],
)
async def test_facts_that_were_not_written_together_are_found(by_hand: str, runs: Runs, command: Command) -> None:
    run = await runs.accept(key=new_key())
    assert failed(await verdicts(command, *DUPLICATES)) == set()
    await runs.connection.execute("SET session_replication_role = replica")
    await runs.connection.execute(by_hand)
    findings = await verdicts(command, *DUPLICATES, code=1)
    assert failed(findings) == {"one transaction"}
    assert run_ids(findings["one transaction"]) == [str(run)]


def twin(**values: Any) -> dict[str, Any]:
    row = {"replay_of": None, "key_version": 1, "profile": 1, "schema_version": 1, "fingerprint": "aa"}
    return {**row, "created_at": datetime(2030, 1, 1, tzinfo=UTC), **values}


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([twin(key_version=None), twin(key_version=None)], "none has a key"),
        ([twin(), twin(key_version=None)], "some have no key"),
        ([twin(), twin(key_version=2)], "different versions or profiles"),
        ([twin(), twin(profile=2)], "different versions or profiles"),
        ([twin(), twin(schema_version=2)], "different schema versions"),
        ([twin(), twin(fingerprint="bb")], "different fingerprints"),
        ([twin(), twin(created_at=datetime(2030, 1, 1, 0, 0, 4, tzinfo=UTC))], "4.0 s apart"),
        ([twin(), twin(key_version=None, replay_of=uuid.uuid4()), twin()], "0.0 s apart"),
    ],
)
def test_why_keys_did_not_join_two_runs(group: list[dict[str, Any]], reason: str) -> None:
    assert reason in why_apart(group)


# Stuck leases.


STUCK_STATES = {
    "expired leases": "UPDATE fencepost.jobs SET lease_expires_at = lease_expires_at - interval '5 minutes' WHERE state = 'leased'",
    "far leases": "UPDATE fencepost.jobs SET lease_expires_at = lease_expires_at + interval '30000 s' * 10 WHERE state = 'leased'",
    "deadlines": "UPDATE fencepost.jobs SET deadline_at = clock_timestamp() - interval '5 minutes' WHERE state = 'queued'",
    "unserved workflows": "UPDATE fencepost.jobs SET available_at = available_at - interval '3 hours' WHERE state = 'queued'",
    "indexes": "DROP INDEX fencepost.jobs_leased_idx",
    "vacuum": "ALTER TABLE fencepost.jobs SET (autovacuum_enabled = false)",
}


@pytest.mark.parametrize("look", STUCK_STATES)
async def test_what_is_stuck_is_found(look: str, runs: Runs, command: Command) -> None:
    await runs.accept()
    await runs.claim_one()
    await runs.accept(workflow="nobodys", delay=timedelta(hours=1))
    assert failed(await verdicts(command, *STUCK)) == set()
    await runs.connection.execute(STUCK_STATES[look])
    findings = await verdicts(command, *STUCK, code=1)
    assert failed(findings) == {look}
    assert findings[look]["next"]
    assert "Nothing is" not in (await command(*STUCK))[1]


async def test_an_attempt_past_its_own_deadline_is_found(runs: Runs, command: Command) -> None:
    await runs.accept()
    await runs.claim_one(attempt_limit=timedelta(seconds=10))
    await runs.connection.execute("UPDATE fencepost.jobs SET attempt_deadline_at = clock_timestamp() - interval '5 minutes'")
    assert failed(await verdicts(command, *STUCK, code=1)) == {"deadlines"}


@pytest.mark.parametrize(
    ("by_hand", "left_to"),
    [
        ("attempts = max_attempts, lease_generation = 9", "reaper: attempts"),
        ("cancel_requested_at = clock_timestamp()", "reaper: cancelled"),
        ("deadline_at = clock_timestamp()", "reaper: deadline"),
        ("deadline_at = NULL", "claim"),
    ],
)
async def test_an_expired_lease_is_shown_with_who_could_take_it(by_hand: str, left_to: str, runs: Runs, command: Command) -> None:
    run = await runs.accept()
    await runs.claim_one()
    await runs.expire_lease(run, by=timedelta(minutes=20))
    await runs.connection.execute(f"UPDATE fencepost.jobs SET {by_hand}")
    findings = await verdicts(command, *STUCK, code=1)
    assert findings["expired leases"]["rows"][0]["left_to"] == left_to
    (counts,) = findings["lease expiry"]["rows"]
    assert (counts["expired_1_min"], counts["expired_10_min"], counts["expired_1_h"]) == (1, 1, 0)


async def test_a_workflow_whose_job_waits_for_minutes_without_a_claim_has_no_worker(runs: Runs, command: Command) -> None:
    await runs.complete(await accepted_and_claimed(runs))
    await runs.connection.execute("UPDATE fencepost.job_attempts SET claimed_at = clock_timestamp() - interval '3 minutes'")
    await runs.accept()
    await runs.connection.execute("UPDATE fencepost.jobs SET available_at = clock_timestamp() - interval '2 minutes'"
                                  " WHERE state = 'queued'")  # fmt: skip
    findings = await verdicts(command, *STUCK, code=1)
    assert findings["unserved workflows"]["rows"] == [{"workflow": "report"}]
    assert (await command(*STUCK))[1].endswith("Broken: unserved workflows. Look at the warnings: ready jobs.\n")
    assert (await verdicts(command, *STUCK, "--unserved-minutes", 5, code=1))["unserved workflows"]["verdict"] == "ok"
    code, output = await command(*STUCK, "--unserved-minutes", 5)
    assert code == 1
    assert output.endswith("Nothing is broken. Look at the warnings: ready jobs.\n")


async def test_a_workflow_that_was_claimed_from_since_its_job_became_ready_has_a_worker(runs: Runs, command: Command) -> None:
    await runs.complete(await accepted_and_claimed(runs))
    await runs.accept()
    await runs.connection.execute("UPDATE fencepost.jobs SET available_at = clock_timestamp() - interval '2 hours'")
    findings = await verdicts(command, *STUCK, code=1)
    assert findings["unserved workflows"]["verdict"] == "ok"
    assert findings["ready jobs"]["verdict"] == "warn"
    assert findings["ready jobs"]["rows"][0]["workflow"] == "report"


async def test_a_workflow_with_a_lease_has_a_worker(runs: Runs, command: Command) -> None:
    held = await accepted_and_claimed(runs)
    await runs.accept()
    await runs.connection.execute("UPDATE fencepost.job_attempts SET claimed_at = clock_timestamp() - interval '3 hours'")
    await runs.connection.execute("UPDATE fencepost.jobs SET available_at = clock_timestamp() - interval '2 hours'")
    assert failed(await verdicts(command, *STUCK, code=1)) == set()
    await runs.complete(held)
    assert failed(await verdicts(command, *STUCK, code=1)) == {"unserved workflows"}


async def accepted_and_claimed(runs: Runs) -> Held:
    await runs.accept()
    return await runs.claim_one()


async def test_who_blocks_the_jobs_table_is_named(runs: Runs, command: Command, database_url: str) -> None:
    run = await runs.accept()
    lock = "SELECT FROM fencepost.jobs WHERE run_id = $1 FOR UPDATE"
    waiter = await asyncpg.connect(database_url)
    async with runs.connection.transaction():
        await runs.connection.execute(lock, run)
        waiting = asyncio.create_task(waiter.execute(lock, run))
        findings: dict[str, Any] = {}
        while not findings.get("lock waiters", {}).get("rows"):
            findings = await verdicts(command, *STUCK)
    await waiting
    await waiter.close()
    (row,) = findings["lock waiters"]["rows"]
    assert row["blocked_by"] == str(runs.connection.get_server_pid())


async def test_a_long_transaction_at_the_jobs_table_is_named(runs: Runs, database_url: str) -> None:
    look = load_statements("consumer_sdk", "inspection.sql")["long_transactions"].replace("interval '1 minute'", "interval '0'")
    other = await asyncpg.connect(database_url)
    async with runs.connection.transaction():
        await runs.connection.execute("SELECT FROM fencepost.jobs")
        rows = await other.fetch(look, 20)
    await other.close()
    assert [(row["pid"], row["touches_jobs"]) for row in rows] == [(runs.connection.get_server_pid(), True)]


def test_a_clock_that_is_off_is_said() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert clock_finding(now, now + timedelta(seconds=1)).verdict == "ok"
    assert clock_finding(now, now + timedelta(minutes=9)).verdict == "warn"


async def test_a_claim_that_reads_a_whole_large_table_is_said(runs: Runs) -> None:
    look = load_statements("consumer_sdk", "inspection.sql")["claim_plan"]
    assert plan_finding(await runs.connection.fetchval(look), 20_000).verdict == "ok"
    await runs.connection.execute("DROP INDEX fencepost.jobs_leased_idx")
    explained = await runs.connection.fetchval(look)
    assert plan_finding(explained, 20_000).verdict == "fail"
    assert plan_finding(explained, 20).verdict == "ok"


def test_dead_rows_that_pile_up_are_said() -> None:
    row = {"live_rows": 1_000, "dead_rows": 40_000, "vacuumed_ago_seconds": 60.0, "analyzed_ago_seconds": None, "enabled": True}
    assert vacuum_finding([row]).verdict == "ok"
    assert vacuum_finding([{**row, "dead_rows": 400_000}]).verdict == "warn"
    assert vacuum_finding([{**row, "enabled": False}]).verdict == "fail"
    assert vacuum_finding([]).verdict == "warn"


# Repair.


async def expired_jobs(runs: Runs, count: int) -> None:
    for number in range(count):
        await runs.accept(max_attempts=1 + number % 2)
    await runs.claim(count)
    await runs.connection.execute("UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() - interval '1 hour'")


async def test_repair_does_what_the_reaper_does_in_audited_batches(runs: Runs, command: Command) -> None:
    await expired_jobs(runs, 130)
    assert await command.json(*REPAIR, "--dry-run") == {"dry_run": True, "queued": 65, "dead": 65, "cancelled": 0}
    assert await runs.connection.fetchval("SELECT count(*) FROM fencepost.jobs WHERE state = 'leased'") == 130
    assert await runs.connection.fetchval("SELECT count(*) FROM fencepost.audit") == 0

    assert await command.json(*REPAIR) == {"dry_run": False, "queued": 65, "dead": 65, "cancelled": 0}
    audit = await runs.connection.fetch("SELECT * FROM fencepost.audit ORDER BY id")
    assert [(row["actor"], row["command"], row["reason"]) for row in audit] == [
        ("ana", "diagnose stuck-leases --repair", "workers are down")
    ] * 2
    jobs = [job for row in audit for job in json.loads(row["detail"])["jobs"]]
    assert len({job["run_id"] for job in jobs}) == 130
    assert {(job["state"], job["reason"]) for job in jobs} == {("queued", None), ("dead", "attempts_exhausted")}
    assert failed(await verdicts(command, *DOUBLE)) == set()
    assert failed(await verdicts(command, *STUCK)) == set()

    assert await command(*REPAIR) == (0, "Done: nothing to repair.\n")
    assert await runs.connection.fetchval("SELECT count(*) FROM fencepost.audit") == 2


async def test_a_lease_that_reaches_too_far_is_ended_on_demand_and_its_holder_is_fenced(runs: Runs, command: Command) -> None:
    near, far = await runs.accept(), await runs.accept()
    kept, lost = await runs.claim(2)
    assert (kept.run_id, lost.run_id) == (near, far)
    await runs.expire_lease(far, by=timedelta(days=-30))
    assert (await command(*REPAIR))[1] == "Done: nothing to repair.\n"
    assert (await command(*REPAIR, "--far-leases", "--dry-run"))[1] == "Would be: 1 queued.\n"
    assert await runs.state(far) == ("running", "leased")
    assert (await command(*REPAIR, "--far-leases"))[1] == "Done: 1 queued.\n"
    assert await runs.state(far) == ("running", "queued")
    assert not await runs.complete(lost)
    assert await runs.complete(kept)
    assert json.loads(await runs.connection.fetchval("SELECT detail FROM fencepost.audit"))["far_leases_ended"] == [str(far)]


async def test_repair_leaves_alone_who_holds_a_lease(runs: Runs, command: Command) -> None:
    await runs.accept()
    held = await runs.claim_one()
    await command(*REPAIR)
    assert await runs.complete(held)


@pytest.mark.parametrize(
    "words",
    [
        (*STUCK, "--repair"),
        (*STUCK, "--repair", "--actor", "ana"),
        (*STUCK, "--repair", "--reason", "x"),
        (*STUCK, "--repair", "--actor", " ", "--reason", "x"),
        (*STUCK, "--actor", "ana"),
        (*STUCK, "--dry-run"),
        (*STUCK, "--far-leases"),
    ],
    ids=lambda words: " ".join(words[2:]),
)
async def test_repair_without_actor_and_reason_is_refused(words: tuple[str, ...], runs: Runs, command: Command) -> None:
    """SEC-10"""
    await expired_jobs(runs, 1)
    assert (await command(*words))[0] == 2
    assert await runs.connection.fetchval("SELECT state FROM fencepost.jobs") == "leased"


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["repair", "dry run"])
@pytest.mark.parametrize("role", ["fencepost_operator", "fencepost_consumer", "fencepost_producer"])
async def test_repair_and_its_rehearsal_are_refused_to_who_may_not_audit_it(
    role: str, more: tuple[str, ...], runs: Runs, database_url: str
) -> None:
    """SEC-10"""
    await expired_jobs(runs, 1)
    async with user_of(role, database_url) as url:
        with pytest.raises(ConfigurationError, match="run the repair as the role that owns the schema: --database-url") as refused:
            await Command(url)(*REPAIR, *more)
    assert "grant" not in str(refused.value)
    assert await runs.connection.fetchval("SELECT state FROM fencepost.jobs") == "leased"


def test_the_smallest_id_of_a_time_is_a_uuid7_of_that_time() -> None:
    at = datetime(2030, 5, 17, 12, 30, 0, 123_000, tzinfo=UTC)
    assert time_of(smallest_id(at)) == at
    assert smallest_id(at) < smallest_id(at + timedelta(milliseconds=1))
    assert time_of(uuid.uuid4()) is None
