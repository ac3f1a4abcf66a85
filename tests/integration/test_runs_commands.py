"""``fencepost runs`` as operators use it: on runs with a past, under their own role, with names and reasons."""

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from fencepost.errors import ConfigurationError
from tests.support.commands import Command, user_of
from tests.support.runs import Runs, new_key

BY_ANA = ("--tenant", "acme", "--actor", "ana", "--reason", "customer withdrew")


@pytest.fixture
async def runs(database_url: str) -> AsyncIterator[Runs]:
    connection = await asyncpg.connect(database_url)
    yield Runs(connection, "worker-a")
    await connection.close()


@pytest.fixture
def command(database_url: str) -> Command:
    return Command(database_url)


async def troubled_run(runs: Runs) -> uuid.UUID:
    """A run that was retried, lost its lease, was given back, and was cancelled under its worker."""
    other = runs.by("worker-b")
    run = await runs.accept(key=new_key(), max_attempts=5)
    held = await runs.claim_one()
    await runs.renew(held)
    await runs.fail(held, delay=timedelta(seconds=8), error_code="provider_timeout")
    await runs.make_ready(run)
    await other.claim_one()
    await runs.expire_lease(run)
    await runs.release(await runs.claim_one())
    held = await other.claim_one()
    await runs.cancel(run, reason="customer withdrew")
    await other.release(held)
    return run


async def dead_run(runs: Runs) -> uuid.UUID:
    run = await runs.accept(max_attempts=1)
    await runs.fail(await runs.claim_one())
    return run


async def audit(runs: Runs) -> list[dict[str, Any]]:
    return [dict(row) for row in await runs.connection.fetch("SELECT actor, command, reason FROM fencepost.audit ORDER BY id")]


async def everything(runs: Runs) -> list[Any]:
    """All rows that a command could have changed."""
    tables = ("runs", "jobs", "run_events", "job_attempts", "job_replays", "audit")
    return [await runs.connection.fetch(f"SELECT * FROM fencepost.{table} ORDER BY 1, 2, 3") for table in tables]


async def test_show_tells_the_story_of_a_run_that_was_retried_lost_its_lease_and_was_cancelled(
    runs: Runs, command: Command
) -> None:
    told = await command.json("runs", "show", await troubled_run(runs))
    story = [(entry["what"], entry.get("attempt"), entry.get("worker")) for entry in told["timeline"]]
    assert story == [
        ("accepted", None, None),
        ("claimed", 1, "worker-a"),
        ("renewed", 1, "worker-a"),
        ("failed", 1, "worker-a"),
        ("claimed", 2, "worker-b"),
        ("lost", 2, "worker-b"),
        ("claimed", 3, "worker-a"),
        ("released", 3, "worker-a"),
        ("claimed", 3, "worker-b"),
        ("cancel asked", None, None),
        ("stopped", 3, "worker-b"),
        ("run ended", None, None),
    ]
    failed, asked = told["timeline"][3], told["timeline"][9]
    assert (failed["error_class"], failed["error_code"], failed["decision"]) == ("retryable", "provider_timeout", "retry")
    assert failed["retry_delay"] == 8
    assert (asked["actor"], asked["reason"]) == ("ana", "customer withdrew")
    assert told["timeline"][0]["key_bound"]
    assert (told["run"]["state"], told["run"]["job_state"], told["run"]["lease_generation"]) == ("cancelled", "cancelled", 4)
    assert told["complete"]


async def test_the_story_is_readable_in_80_columns(runs: Runs, database_url: str) -> None:
    run = await troubled_run(runs)
    code, output = await Command(database_url, columns=80)("runs", "show", run)
    assert code == 0
    assert max(len(line) for line in output.splitlines()) <= 80
    assert f"Run {run} of tenant acme" in output
    flat = " ".join(output.split())
    places = [
        flat.index(words)
        for words in (
            "attempts 2 of 5 used; generation 4", "accepted with an idempotency key",
            "failed attempt 1: retryable, provider_timeout",
            "lost attempt 2: the lease of worker-b ran out; retry at once", "released attempt 3 given back by worker-a",
            "cancel asked by ana: customer withdrew", "stopped attempt 3: worker-b obeyed the cancellation",
            "run ended cancelled, decided by the cancellation",
        )
    ]  # fmt: skip
    assert places == sorted(places)


async def test_show_says_how_long_a_lease_runs_and_how_long_it_has_been_over(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    await runs.claim_one(lease=timedelta(minutes=10))
    _, output = await command("runs", "show", run)
    assert "worker-a, runs out in 10 min" in output
    await runs.expire_lease(run, by=timedelta(minutes=3))
    _, output = await command("runs", "show", run)
    assert "worker-a, ran out 3 min ago" in output
    assert "diagnose stuck-leases" in output


async def test_show_says_when_the_next_attempt_is_due_and_when_the_deadline_is(runs: Runs, command: Command) -> None:
    run = await runs.accept(delay=timedelta(minutes=30), deadline=timedelta(hours=5))
    _, output = await command("runs", "show", run)
    assert "attempt in 30 min" in output
    assert "in 5 h" in output
    await runs.make_ready(run)
    _, output = await command("runs", "show", run)
    assert "ready since" in output


async def test_neither_input_nor_output_nor_key_is_shown(runs: Runs, command: Command) -> None:
    key = new_key()
    run = await runs.accept(key=key, data=b'{"card":"4711secret"}')
    await runs.complete(await runs.claim_one(), output=b"secret-answer")
    await runs.connection.execute('UPDATE fencepost.run_events SET detail = detail || \'{"note": "secret"}\'')
    for arguments in (("runs", "show", run), ("runs", "show", run, "--json"), ("runs", "list", "--json")):
        _, output = await command(*arguments)
        assert "secret" not in output
        assert key.key_hash.hex()[:8] not in output
        assert key.fingerprint.hex()[:8] not in output
    told = await command.json("runs", "show", run)
    assert (told["run"]["input_bytes"], told["run"]["output_bytes"]) == (21, 13)


async def test_a_key_past_its_retention_is_no_longer_said_to_be_bound(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    told = await command.json("runs", "show", run)
    assert not told["timeline"][0]["key_bound"]


async def test_a_terminal_is_not_obeyed_by_what_people_wrote(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    await runs.cancel(run, reason="\x1b[2Jgone [bold]x[/bold]")
    _, output = await command("runs", "show", run)
    assert "\x1b" not in output
    assert "gone [bold]x[/bold]" in output


async def test_long_names_are_broken_into_lines_and_never_cut(runs: Runs, database_url: str) -> None:
    tenant, workflow = "t" * 97, "w" * 89
    run = await runs.accept(tenant=tenant, workflow=workflow)
    narrow = Command(database_url, columns=80)
    _, listed = await narrow("runs", "list")
    below_the_heading = listed.partition("─\n")[2]
    assert str(run) in listed
    assert (below_the_heading.count("t"), below_the_heading.count("w")) == (97, 89)
    _, shown = await narrow("runs", "show", run)
    assert tenant in "".join(shown.split())
    assert workflow in "".join(shown.split())


async def test_in_a_pipe_ids_and_names_are_whole(runs: Runs, command: Command) -> None:
    tenant, workflow = "t" * 97, "w" * 89
    run = await runs.accept(tenant=tenant, workflow=workflow, max_attempts=1)
    await runs.fail(await runs.claim_one(workflow=workflow), reason="ambiguous", delay=None, error_code="timeout")
    _, listed = await command("runs", "list", COLUMNS="")
    (line,) = [line for line in listed.splitlines() if str(run) in line]
    assert {tenant, workflow} <= set(line.split())
    assert "failed: ambiguous, timeout" in line


async def test_show_finds_a_run_by_its_id_alone_if_one_tenant_has_it(runs: Runs, command: Command) -> None:
    run = await runs.accept(tenant="one")
    assert (await command.json("runs", "show", run))["run"]["tenant_id"] == "one"
    await runs.accept(tenant="two", run_id=run)
    code, output = await command("runs", "show", run)
    assert code == 2
    assert "several tenants" in output
    assert (await command.json("runs", "show", run, "--tenant", "two"))["run"]["tenant_id"] == "two"


@pytest.mark.parametrize(
    "words", [("show",), ("cancel", *BY_ANA), ("resume", *BY_ANA), ("replay", *BY_ANA)], ids=lambda words: words[0]
)
async def test_what_is_no_runs_id_is_refused_with_where_to_find_one(words: tuple[str, ...], runs: Runs, command: Command) -> None:
    """And unquoted where it may be a client's key. A monitor's id and many a key are UUIDs, as a run's id is."""
    name, *rest = words
    for pasted in ("customer-4711/order-1", "01a2297b-0198-7227-a94b-e181bb24ee3"):
        code, output = await command("runs", name, *rest, "--", pasted)
        assert code == 2
        assert "must be the id of a run, a UUID; `fencepost runs list` shows them" in output
        assert pasted not in output
    code, output = await command("runs", name, uuid.uuid4(), *rest)
    assert code == 1
    assert "`fencepost runs list` shows the ids of runs; a key is none, nor is the id in a Location" in output


async def test_blanks_that_were_pasted_along_are_no_part_of_an_id(runs: Runs, command: Command) -> None:
    run = await dead_run(runs)
    assert (await command("runs", "show", f" {run} "))[0] == 0


async def test_an_empty_list_says_so_and_is_json_where_json_was_asked_for(runs: Runs, command: Command) -> None:
    assert await command("runs", "list") == (0, "No run fits.\n")
    assert await command.json("runs", "list") == []


@pytest.mark.parametrize("words", [("show",), ("cancel",), ("replay",)], ids=" ".join)
async def test_another_tenants_run_does_not_exist(words: tuple[str, ...], runs: Runs, command: Command) -> None:
    """SEC-4"""
    theirs, random = await dead_run(runs), uuid.uuid4()
    before = await everything(runs)
    named = ("--tenant", "mallory") if words == ("show",) else ("--tenant", "mallory", *BY_ANA[2:])
    answers = [await command("runs", *words, run, *named) for run in (theirs, random)]
    assert [code for code, _ in answers] == [1, 1]
    assert answers[0][1].replace(str(theirs), "") == answers[1][1].replace(str(random), "")
    assert await everything(runs) == before


async def test_cancel_ends_a_queued_run_at_once_and_says_why_afterwards(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    code, output = await command("runs", "cancel", run, *BY_ANA)
    assert (code, await runs.state(run)) == (0, ("cancelled", "cancelled"))
    assert "Cancelled" in output
    assert await audit(runs) == [{"actor": "ana", "command": "runs cancel", "reason": "customer withdrew"}]
    _, output = await command("runs", "show", run)
    assert "cancelled by ana: customer withdrew" in output


async def test_cancel_tells_the_worker_of_a_leased_run(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    held = await runs.claim_one()
    answer = await command.json("runs", "cancel", run, *BY_ANA)
    assert (answer["outcome"], await runs.state(run)) == ("requested", ("running", "leased"))
    assert not await runs.complete(held)


async def test_cancel_says_no_to_a_run_that_has_ended_or_changed(runs: Runs, command: Command) -> None:
    run = await runs.accept()
    code, output = await command("runs", "cancel", run, *BY_ANA, "--expected-version", 7)
    assert (code, output) == (1, "fencepost: the run has version 1 and not 7; nothing was changed\n")
    await runs.complete(await runs.claim_one())
    code, output = await command("runs", "cancel", run, *BY_ANA)
    assert (code, output) == (1, "fencepost: the run is already completed\n")
    assert await audit(runs) == []


async def test_a_dry_run_gives_the_answer_and_changes_nothing(runs: Runs, command: Command) -> None:
    queued, dead = await runs.accept(workflow="other"), await dead_run(runs)
    before = await everything(runs)
    assert "Would be" in (await command("runs", "cancel", queued, *BY_ANA, "--dry-run"))[1]
    assert "Would be replayed" in (await command("runs", "replay", dead, *BY_ANA, "--dry-run"))[1]
    assert (await command.json("runs", "cancel", queued, *BY_ANA, "--dry-run"))["outcome"] == "cancelled"
    assert (await command.json("runs", "replay", dead, *BY_ANA, "--dry-run"))["outcome"] == "replayed"
    assert (await command("runs", "cancel", dead, *BY_ANA, "--dry-run"))[0] == 1
    assert await everything(runs) == before


async def test_replay_of_dead_work_is_a_new_run_and_leaves_the_old_one_as_it_is(runs: Runs, command: Command) -> None:
    """JOB-31"""
    dead = await runs.accept(max_attempts=3)
    for _ in range(3):
        await runs.fail(await runs.claim_one())
    before = await runs.state(dead), await runs.events(dead), await runs.attempts(dead)
    answer = await command.json("runs", "replay", dead, *BY_ANA)
    assert (await runs.state(dead), await runs.events(dead), await runs.attempts(dead)) == before
    assert len(before[2]) == 3
    new = uuid.UUID(answer["new_run_id"])
    assert (await runs.claim_one()).generation == 1
    assert (await command.json("runs", "show", new))["run"]["replay_of"] == str(dead)
    told = await command.json("runs", "show", dead)
    assert told["run"]["replayed_as"] == str(new)
    assert (told["timeline"][-1]["what"], told["timeline"][-1]["actor"]) == ("replayed", "ana")
    assert (await audit(runs))[0]["command"] == "runs replay"


async def test_replay_says_no_where_it_must(runs: Runs, command: Command) -> None:
    async def refused(run: uuid.UUID, *more: object, **environment: str) -> str:
        code, output = await command("runs", "replay", run, *BY_ANA, *more, **environment)
        assert code == 1, output
        return output

    completed = await runs.accept()
    await runs.complete(await runs.claim_one())
    assert "did not fail" in await refused(completed)

    dead = await dead_run(runs)
    await runs.connection.execute("UPDATE fencepost.runs SET created_at = created_at - interval '2 hours' WHERE run_id = $1", dead)
    assert "ledger" in await refused(dead, "--ledger-retention-hours", 1)
    assert "ledger" in await refused(dead, FENCEPOST_LEDGER_RETENTION_HOURS="1")
    assert "ledger" in await refused(dead, FENCEPOST_LEDGER_RETENTION_DAYS="0.05")
    assert "ledger" in await refused(dead, FENCEPOST_LEDGER_RETENTION_DAYS="0", FENCEPOST_LEDGER_RETENTION_HOURS="1")
    answer = await command.json("runs", "replay", dead, *BY_ANA)
    assert answer["new_run_id"] in await refused(dead)

    await runs.connection.execute("UPDATE fencepost.jobs SET max_attempts = 1 WHERE state = 'queued'")
    await runs.fail(await runs.claim_one())
    assert "replayed 1 times" in await refused(uuid.UUID(answer["new_run_id"]), "--limit", 1)


async def test_a_replay_is_not_allowed_beyond_what_the_ledger_remembers(runs: Runs, command: Command) -> None:
    """Hours that are longer than the days after which effects are deleted: the replay could act twice."""
    dead = await dead_run(runs)
    for environment in (
        {"FENCEPOST_LEDGER_RETENTION_HOURS": "721"},
        {"FENCEPOST_LEDGER_RETENTION_HOURS": "49", "FENCEPOST_LEDGER_RETENTION_DAYS": "2"},
    ):
        code, output = await command("runs", "replay", dead, *BY_ANA, **environment)
        assert code == 2
        assert "FENCEPOST_LEDGER_RETENTION_DAYS" in output
    assert await audit(runs) == []
    settings = {"FENCEPOST_LEDGER_RETENTION_HOURS": "48", "FENCEPOST_LEDGER_RETENTION_DAYS": "2"}
    code, output = await command("runs", "replay", dead, *BY_ANA, **settings)
    assert code == 0, output


async def test_a_ledger_that_never_forgets_allows_the_replay_of_an_old_run(runs: Runs, command: Command) -> None:
    dead = await dead_run(runs)
    await runs.connection.execute("UPDATE fencepost.runs SET created_at = created_at - interval '5 years' WHERE run_id = $1", dead)
    code, _ = await command("runs", "replay", dead, *BY_ANA)
    assert code == 1
    code, output = await command("runs", "replay", dead, *BY_ANA, FENCEPOST_LEDGER_RETENTION_DAYS="0")
    assert code == 0, output


async def ambiguous_run(runs: Runs) -> uuid.UUID:
    run = await runs.accept()
    await runs.fail(await runs.claim_one(), reason="ambiguous", delay=None, error_class="ambiguous", error_code="timeout")
    return run


async def test_an_ambiguous_run_is_not_replayed_until_somebody_knows_what_it_did(runs: Runs, command: Command) -> None:
    dead = await ambiguous_run(runs)
    before = await everything(runs)
    for more in ((), ("--dry-run",)):
        code, output = await command("runs", "replay", dead, *BY_ANA, *more)
        assert code == 1
        assert "may have acted" in output
        assert "--effects-checked" in output
        assert await everything(runs) == before
    code, output = await command("runs", "replay", dead, *BY_ANA, "--effects-checked", "--dry-run")
    assert (code, output) == (0, "Would be replayed, as replay 1 of at most 3 of its lineage.\n")
    assert await everything(runs) == before
    await command.json("runs", "replay", dead, *BY_ANA, "--effects-checked")
    assert [row["reason"] for row in await audit(runs)] == ["customer withdrew; effects checked"]


async def test_show_says_of_dead_work_that_may_have_acted_what_comes_before_a_replay(runs: Runs, command: Command) -> None:
    first = await dead_run(runs)
    _, told = await command("runs", "show", first)
    assert "find out" not in told
    _, dead = await runs.replay(first)
    await runs.fail(await runs.claim_one(), reason="ambiguous", delay=None, error_code="timeout")
    _, told = await command("runs", "show", dead)
    assert told.index("First find out what it did") < told.index(f"fencepost effects show acme {first}")
    assert told.index("First find out what it did") < told.index(f"runs replay {dead} --tenant acme --effects-checked")


@pytest.mark.parametrize("how", ["lost", "stopped"])
async def test_show_says_of_dead_work_whose_attempt_was_cut_short_that_it_may_have_acted(
    how: str, runs: Runs, command: Command
) -> None:
    run = await runs.accept(max_attempts=1)
    held = await runs.claim_one()
    if how == "lost":
        await runs.expire_lease(run)
        await runs.reap()
    else:
        await runs.fail(held, error_code="attempt_deadline")
    _, told = await command("runs", "show", run)
    assert told.index("an attempt was cut short") < told.index(f"runs replay {run} --tenant acme --actor")


@pytest.mark.parametrize("word", ["cancel", "replay"])
@pytest.mark.parametrize(
    "named",
    [
        ("--reason", "x"),
        ("--actor", "ana"),
        ("--actor", " ", "--reason", "x"),
        ("--actor", "ana", "--reason", ""),
        ("--actor", "ana", "--reason", "x" * 2001),
        ("--actor", "a\udcffb", "--reason", "x"),
    ],
    ids=["no actor", "no reason", "blank actor", "blank reason", "long reason", "not UTF-8"],
)
async def test_a_change_without_actor_and_reason_is_refused(
    word: str, named: tuple[str, ...], runs: Runs, command: Command
) -> None:
    """SEC-10"""
    dead = await dead_run(runs)
    before = await everything(runs)
    code, _ = await command("runs", word, dead, "--tenant", "acme", *named)
    assert code == 2
    assert await everything(runs) == before


async def test_list_shows_the_newest_runs_first_and_filters(runs: Runs, command: Command) -> None:
    dead = await dead_run(runs)
    others = [await runs.accept(tenant="other", workflow="mail") for _ in range(3)]

    async def listed(*filters: object) -> list[str]:
        return [row["run_id"] for row in await command.json("runs", "list", *filters)]

    assert await listed() == [str(run) for run in (*others[::-1], dead)]
    assert await listed("--limit", 1) == [str(others[-1])]
    assert (
        await listed("--state", "failed") == await listed("--tenant", "acme") == await listed("--workflow", "report") == [str(dead)]
    )
    assert await listed("--tenant", "acme", "--workflow", "mail") == []
    code, output = await Command(command.database_url, columns=80)("runs", "list")
    assert code == 0
    assert all(str(run) in output for run in others)
    assert (await command("runs", "list", "--state", "nonsense"))[0] == 2


async def test_the_operators_role_is_enough_and_gives_no_other_right(runs: Runs, database_url: str) -> None:
    queued, dead = await runs.accept(workflow="other"), await dead_run(runs)
    async with user_of("fencepost_operator", database_url) as url:
        command = Command(url)
        assert (await command("runs", "list"))[0] == 0
        assert (await command("runs", "show", dead))[0] == 0
        assert (await command("runs", "cancel", queued, *BY_ANA))[0] == 0
        assert (await command("runs", "replay", dead, *BY_ANA))[0] == 0
        connection = await asyncpg.connect(url)
        for statement in (
            "UPDATE fencepost.jobs SET attempts = 0", "UPDATE fencepost.runs SET state = 'failed'",
            "DELETE FROM fencepost.run_events",
            "DELETE FROM fencepost.job_attempts", "DELETE FROM fencepost.audit", "INSERT INTO fencepost.job_replays DEFAULT VALUES",
            "UPDATE fencepost.idempotency_keys SET run_id = NULL",
        ):  # fmt: skip
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
        await connection.close()


@pytest.mark.parametrize("role", ["fencepost_producer", "fencepost_consumer", "fencepost_relay"])
async def test_replay_is_refused_to_other_roles(role: str, runs: Runs, database_url: str) -> None:
    """SEC-10"""
    dead = await dead_run(runs)
    before = await everything(runs)
    async with user_of(role, database_url) as url:
        with pytest.raises(ConfigurationError, match="grant fencepost_operator"):
            await Command(url)("runs", "replay", dead, *BY_ANA)
    assert await everything(runs) == before
