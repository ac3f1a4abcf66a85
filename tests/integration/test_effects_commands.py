"""``fencepost effects`` as operators use it: what is open, what is known of it, and a decision with a name and a reason."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk.classification import Terminal
from consumer_sdk.effects import CallLimits
from fencepost.errors import ConfigurationError, EffectFailed, EffectUnknown
from tests.support.commands import Command, user_of
from tests.support.effects import Bench, Wanted, opened
from tests.support.waiting import eventually

BY_ANA: Final = ("--actor", "ana", "--reason", "asked the provider")
SECRET: Final = "sk-live-0123456789"


@pytest.fixture
async def bench(database_url: str) -> AsyncIterator[Bench]:
    async with opened(database_url) as bench:
        yield bench


@pytest.fixture
def command(database_url: str) -> Command:
    return Command(database_url)


async def unknown(bench: Bench, wanted: Wanted | None = None, *, minutes: float = 5) -> Wanted:
    """An effect that took place and whose answer was lost so long ago."""
    wanted = wanted or await bench.run()
    bench.provider.after.append(TimeoutError())
    with pytest.raises(EffectUnknown):
        await bench.once(wanted)
    await bench.pass_time(minutes=minutes)
    return wanted


def named(wanted: Wanted) -> tuple[str, str]:
    return wanted.key.tenant_id, wanted.key.run_key


async def audit(bench: Bench) -> list[dict[str, Any]]:
    rows = await bench.connection.fetch("SELECT actor, command, reason, detail FROM fencepost.audit ORDER BY id")
    return [{**dict(row), "detail": json.loads(row["detail"])} for row in rows]


async def test_the_list_shows_what_waits_for_somebody_oldest_first(bench: Bench, command: Command) -> None:
    """LEDGER-15: unknown, and sent past its time; not what is done, reserved or still out."""
    await bench.once(await bench.message())
    first, second = await unknown(bench), await unknown(bench, await bench.message(tenant_id="globex"))
    bench.provider.before.append(asyncio.Event())
    bench.provider.reached.clear()
    calling = asyncio.create_task(bench.once(await bench.message()))
    await bench.provider.reached.wait()

    assert [row["run_key"] for row in await command.json("effects", "list")] == [first.key.run_key, second.key.run_key]
    assert [row["run_key"] for row in await command.json("effects", "list", "--tenant", "globex")] == [second.key.run_key]
    assert len(await command.json("effects", "list", "--limit", 1)) == 1
    assert [row["state"] for row in await command.json("effects", "list", "--state", "succeeded")] == ["succeeded"]
    assert [row["state"] for row in await command.json("effects", "list", "--state", "sent")] == ["sent"]
    await bench.pass_time(minutes=1)
    assert [row["state"] for row in await command.json("effects", "list")] == ["unknown", "unknown", "sent"]
    calling.cancel()
    await asyncio.wait([calling])
    code, output = await command("effects", "list")
    assert code == 0
    assert first.key.run_key in output
    assert "card.charge" in output


async def test_show_tells_what_is_known_and_neither_result_nor_request(bench: Bench, command: Command) -> None:
    wanted = await bench.run()

    async def call(_effect: object) -> object:
        return {"receipt": SECRET}

    await bench.once(wanted, request={"card": SECRET}, call=call)
    (told,) = await command.json("effects", "show", *named(wanted))
    assert (told["state"], told["sends"], told["result_bytes"]) == ("succeeded", 1, len(f'{{"receipt":"{SECRET}"}}'))
    assert told["provider_key"].startswith("fp_")
    for form in ((), ("--json",)):
        _, output = await command("effects", "show", *named(wanted), *form)
        assert SECRET not in output
        assert told["provider_key"] in output
        assert (await bench.row(wanted))["fingerprint"].hex()[:8] not in output


async def test_show_finds_the_effects_of_a_lineage_by_any_of_its_runs(bench: Bench, command: Command) -> None:
    wanted = await bench.run()
    bench.provider.before.append(Terminal("declined"))
    with pytest.raises(EffectFailed):
        await bench.once(wanted)
    assert wanted.fence.run_id is not None
    await bench.connection.execute(
        "UPDATE fencepost.jobs SET lease_expires_at = clock_timestamp() WHERE run_id = $1", wanted.fence.run_id
    )
    await bench.runs.fail(await bench.runs.claim_one(), delay=None, reason="not_retryable")
    _, replay = await bench.runs.replay(wanted.fence.run_id)
    (told,) = await command.json("effects", "show", "acme", replay)
    assert (told["run_key"], told["error_code"]) == (wanted.key.run_key, "declined")


async def test_an_empty_list_says_so_and_is_json_where_json_was_asked_for(bench: Bench, command: Command) -> None:
    assert await command("effects", "list") == (0, "No effect is open.\n")
    assert await command("effects", "list", "--state", "failed") == (0, "No effect fits.\n")
    assert await command.json("effects", "list") == []


async def test_blanks_that_were_pasted_along_are_no_part_of_a_run(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    tenant, run_key = named(wanted)
    (told,) = await command.json("effects", "show", tenant, f" {run_key} ")
    assert told["run_key"] == run_key


async def test_what_is_not_there_or_another_tenants_is_told_alike(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    for tenant, run_key in (("acme", "nothing"), ("acme", uuid.uuid4()), ("globex", wanted.key.run_key)):
        code, output = await command("effects", "show", tenant, run_key)
        assert (code, "has no effects" in output, "`fencepost effects list`" in output) == (1, True, True)
        assert str(run_key) not in output
        code, _ = await command("effects", "resolve", tenant, run_key, "--as", "absent", "--generation", 1, *BY_ANA)
        assert code == 1
    assert await audit(bench) == []


async def test_applied_gives_the_handler_what_the_operator_found(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    told = await command.json(
        "effects", "resolve", *named(wanted), "--as", "applied", "--result", ' {"receipt": "ü"} ', "--reference", "ch_1",
        "--generation", 1, *BY_ANA,
    )  # fmt: skip
    assert (told["outcome"], told["effect_state"], told["effect_generation"]) == ("resolved", "applied", 2)
    assert await bench.once(wanted) == {"receipt": "ü"}
    assert (await bench.row(wanted))["provider_reference"] == "ch_1"
    assert len(bench.provider.book) == 1


async def test_absent_lets_it_be_sent_again_even_after_the_key_was_too_old(bench: Bench, command: Command) -> None:
    """A person's word begins the key's retention anew."""
    limits = CallLimits(key_retention_seconds=1000)
    for days in (0.0, 10.0):
        wanted = await unknown(bench, minutes=5 + days * 1440)
        bench.provider.book.clear()
        await command.json("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, *BY_ANA)
        assert (await bench.once(wanted, limits=limits))["token"] == 3
        assert len(bench.provider.book) == 1


async def test_an_absent_effect_that_is_too_old_to_be_sent_again_waits_for_a_person(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench, minutes=60)
    bench.provider.book.clear()
    limits = CallLimits(key_retention_seconds=1000)
    with pytest.raises(EffectUnknown, match="too old"):
        await bench.once(wanted, limits=limits, reconciler=bench.provider.state)
    assert await bench.state(wanted) == "absent"
    await command.json("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 2, *BY_ANA)
    assert (await bench.once(wanted, limits=limits))["receipt"] == 1


async def test_disputed_is_for_good(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    await command.json("effects", "resolve", *named(wanted), "--as", "disputed", "--generation", 1, *BY_ANA)
    with pytest.raises(EffectFailed, match="disputed"):
        await bench.once(wanted, reconciler=bench.provider.state)
    assert bench.provider.asked == []


async def test_each_resolution_leaves_one_audit_row_with_before_and_after(bench: Bench, command: Command) -> None:
    """SEC-10."""
    wanted = await unknown(bench)
    await command.json("effects", "resolve", *named(wanted), "--as", "disputed", "--generation", 1, *BY_ANA)
    (row,) = await audit(bench)
    assert (row["actor"], row["command"], row["reason"]) == ("ana", "effects resolve", "asked the provider")
    assert (row["detail"]["before"], row["detail"]["after"], row["detail"]["generation"]) == ("unknown", "disputed", 2)
    assert row["detail"]["run_key"] == wanted.key.run_key


async def test_an_effect_of_a_message_without_a_tenant_is_shown_and_resolved(bench: Bench, command: Command) -> None:
    """Its tenant is the empty text, which the list shows as a shell takes it."""
    wanted, others = await unknown(bench, await bench.message(tenant_id="")), await unknown(bench)
    _, output = await command("effects", "list")
    (line,) = [line for line in output.splitlines() if line.startswith(wanted.key.run_key)]
    assert " ''  " in line
    assert [row["run_key"] for row in await command.json("effects", "list", "--tenant", "")] == [wanted.key.run_key]
    (told,) = await command.json("effects", "show", *named(wanted))
    assert (told["tenant_id"], told["state"]) == ("", "unknown")
    code, output = await command("effects", "show", *named(wanted))
    assert (code, "of tenant ''" in output) == (0, True)
    await command.json("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, *BY_ANA)
    assert (await bench.state(wanted), await bench.state(others)) == ("absent", "unknown")
    code, output = await command("effects", "show", "  ", wanted.key.run_key)
    assert (code, "must say something" in output) == (2, True)


async def test_what_names_an_effect_can_be_pasted(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench, await bench.message(tenant_id="two words"))
    _, output = await command("effects", "list")
    assert "'two words'" in output
    assert await command.json("effects", "show", *named(wanted))


async def test_of_two_operators_at_once_one_wins_and_one_is_told(bench: Bench, command: Command, database_url: str) -> None:
    """LEDGER-15: the second waits for the first one's commit, and is told what it finds."""
    wanted = await unknown(bench)
    call = "SELECT outcome FROM fencepost.resolve_effect($1, $2, 0, 'order', 0, 'card.charge', 1, $3, NULL, NULL, $4, 'r')"
    other = await asyncpg.connect(database_url)
    transaction = bench.connection.transaction()
    await transaction.start()
    assert await bench.connection.fetchval(call, *named(wanted), "applied", "ana") == "resolved"
    second = asyncio.create_task(other.fetchval(call, *named(wanted), "absent", "bo"))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = $1"

    async def waits() -> bool:
        return bool(await bench.connection.fetchval(waiting, other.get_server_pid()))

    await eventually(waits, message="the second operator waits")
    await transaction.commit()
    assert await second == "changed"
    await other.close()
    code, output = await command("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, *BY_ANA)
    assert (code, "has generation 2 and not 1" in output) == (1, True)
    assert [row["actor"] for row in await audit(bench)] == ["ana"]


async def test_a_dry_run_says_the_same_and_changes_nothing(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    before = await bench.row(wanted)
    code, output = await command("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, "--dry-run", *BY_ANA)
    assert (code, output.strip()) == (0, "Would be absent, generation 2.")
    assert await bench.row(wanted) == before
    assert await audit(bench) == []


async def test_what_is_not_open_cannot_be_resolved(bench: Bench, command: Command) -> None:
    """What is done, and a call that is still out."""
    done = await bench.message()
    await bench.once(done)
    bench.provider.before.append(asyncio.Event())
    bench.provider.reached.clear()
    out = await bench.message()
    calling = asyncio.create_task(bench.once(out))
    await bench.provider.reached.wait()
    for wanted in (done, out):
        code, output = await command("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, *BY_ANA)
        assert (code, "nothing to resolve" in output) == (1, True)
    calling.cancel()
    await asyncio.wait([calling])
    assert await audit(bench) == []


async def test_among_several_effects_one_has_to_be_named(bench: Bench, command: Command) -> None:
    first = await unknown(bench)
    second = await unknown(bench, Wanted(key=first.key._replace(operation="card.refund", occurrence=2), fence=first.fence))
    resolve = ("effects", "resolve", *named(first), "--as", "disputed", "--generation", 1, *BY_ANA)
    code, output = await command(*resolve)
    assert (code, "--operation" in output) == (2, True)
    assert (await command(*resolve, "--operation", "nothing"))[0] == 1
    assert (await command(*resolve, "--occurrence", 2, "--operation", "card.refund"))[0] == 0
    states = {row["operation"]: row["state"] for row in await bench.rows(second)}
    assert states == {"card.charge": "unknown", "card.refund": "disputed"}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--as", "applied", "--result", "{"), ("--as", "applied", "--result", "NaN"), ("--as", "absent", "--result", "1"),
        ("--as", "applied", "--result", json.dumps("x" * 1_000_000)), ("--as", "applied", "--reference", "x" * 201),
        ("--as", "succeeded"), ("--as", "absent", "--actor", " "), ("--as", "absent", "--reason", ""),
        ("--as", "absent", "--generation", 0), ("--as", "absent", "--actor", "a" * 5000),
    ],
    ids=lambda wrong: " ".join(str(word)[:12] for word in wrong),
)  # fmt: skip
async def test_what_cannot_be_recorded_is_refused_and_changes_nothing(
    bench: Bench, command: Command, wrong: tuple[object, ...]
) -> None:
    """SEC-10."""
    wanted = await unknown(bench)
    before = await bench.row(wanted)
    code, _ = await command("effects", "resolve", *named(wanted), "--generation", 1, *BY_ANA, *wrong)
    assert code == 2
    assert await bench.row(wanted) == before
    assert await audit(bench) == []


@pytest.mark.parametrize("left_out", ["--actor", "--reason", "--generation", "--as"])
async def test_nothing_is_resolved_without_a_name_a_reason_and_what_was_looked_at(
    bench: Bench, command: Command, left_out: str
) -> None:
    wanted = await unknown(bench)
    options = {"--as": "absent", "--generation": 1, "--actor": "ana", "--reason": "r"}
    words = [word for name, value in options.items() if name != left_out for word in (name, value)]
    code, output = await command("effects", "resolve", *named(wanted), *words)
    assert (code, left_out in output) == (2, True)


async def test_the_commands_need_the_operators_role_and_no_more(bench: Bench, database_url: str) -> None:
    """SEC-10."""
    wanted = await unknown(bench)
    resolve = ("effects", "resolve", *named(wanted), "--as", "absent", "--generation", 1, *BY_ANA)
    for role in ("fencepost_producer", "fencepost_consumer"):
        async with user_of(role, database_url) as url:
            with pytest.raises(ConfigurationError, match="fencepost_operator"):
                await Command(url)(*resolve)
    async with user_of("fencepost_operator", database_url) as url:
        assert len(await Command(url).json("effects", "list")) == 1
        assert (await Command(url)(*resolve))[0] == 0


async def test_the_function_itself_refuses_what_the_command_would_not_ask(bench: Bench) -> None:
    wanted = await unknown(bench)
    call = "SELECT outcome FROM fencepost.resolve_effect($1, $2, 0, 'order', 0, 'card.charge', $3, $4, $5, NULL, 'ana', $6)"
    for generation, resolution, result, reason in ((1, "succeeded", None, "r"), (1, "absent", b"1", "r"), (1, None, None, "r"),
                                                   (1, "absent", None, None), (1, "absent", None, " ")):  # fmt: skip
        with pytest.raises(asyncpg.CheckViolationError):
            await bench.connection.execute(call, *named(wanted), generation, resolution, result, reason)
    assert await bench.connection.fetchval(call, *named(wanted), None, "absent", None, "r") == "changed"
    assert await bench.state(wanted) == "unknown"


async def test_the_story_of_a_run_tells_its_effects(bench: Bench, command: Command) -> None:
    wanted = await unknown(bench)
    told = await command.json("runs", "show", wanted.fence.run_id)
    texts = [entry["text"] for entry in told["timeline"] if entry["what"] == "effect"]
    assert texts == ["card.charge: reserved", "card.charge: sent; its answer is not known"]
    await bench.once(wanted, reconciler=bench.provider.state)
    told = await command.json("runs", "show", wanted.fence.run_id)
    effects = [entry for entry in told["timeline"] if entry["what"] == "effect"]
    assert [entry["text"] for entry in effects] == ["card.charge: reserved", "card.charge: sent", "card.charge: applied"]
    assert (effects[-1]["operation"], effects[-1]["state"], effects[-1]["sends"]) == ("card.charge", "applied", 1)
    code, output = await command("runs", "show", wanted.fence.run_id)
    assert (code, "card.charge: applied" in output) == (0, True)


async def test_an_investigation_of_duplicates_shows_what_the_runs_did_outside(bench: Bench, command: Command) -> None:
    first, second = await unknown(bench), await bench.run()
    await bench.once(second)
    findings = await command.json("diagnose", "duplicates", "--tenant", "acme")
    (effects,) = [finding for finding in findings if finding["look"] == "effects"]
    assert effects["verdict"] == "warn"
    assert [(row["run_key"], row["state"], row["sends"]) for row in effects["rows"]] == [
        (first.key.run_key, "unknown", 1), (second.key.run_key, "succeeded", 1),
    ]  # fmt: skip
    assert all(len(row["provider_key"]) == 11 for row in effects["rows"])
