"""Redrives and discards of many dead letters: what is said before, what is done, by whom at once, and where it is cut short."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest
from typer.testing import CliRunner, Result

from consumer_sdk import Message, MessageContext, MessageHandlers, Terminal
from consumer_sdk.dead_letter_batches import Answers, Change, change_letters
from consumer_sdk.inspection import inspecting
from fencepost.cli import app
from fencepost.errors import TransientError
from tests.support.commands import Command, user_of
from tests.support.consumers import Ping, stage
from tests.support.dead_letters import bury, states
from tests.support.tcp_proxy import TcpProxy
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

BY_ANA: Final = ("--actor", "ana", "--reason", "mended")
ROOT: Final = Path(__file__).parents[2]

Connection = asyncpg.Connection


@pytest.fixture
async def database(database_url: str) -> AsyncIterator["Connection[Any]"]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def operator_url(database_url: str) -> AsyncIterator[str]:
    """With the operator's role and no other."""
    async with user_of("fencepost_operator", database_url) as url:
        yield url


@pytest.fixture
def command(operator_url: str) -> Command:
    return Command(operator_url)


async def said(database_url: str, *words: object, typed: str | None = None) -> Result:
    """The command with somebody at the keyboard."""
    environment = {"FENCEPOST_DATABASE_URL": database_url, "COLUMNS": "200"}
    arguments = ["dead-letters", *map(str, words)]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app(), arguments, env=environment, input=typed))


async def audited(database: "Connection[Any]") -> list[tuple[str, str]]:
    """Ids and commands, in the order in which they were done."""
    rows = await database.fetch("SELECT detail ->> 'dead_letter_id' AS id, command FROM fencepost.audit ORDER BY id")
    return [(row["id"], row["command"]) for row in rows]


async def started(database_url: str, *words: object) -> asyncio.subprocess.Process:
    """The command as a process of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fencepost", "dead-letters", *map(str, words), cwd=ROOT,
        env={**os.environ, "FENCEPOST_DATABASE_URL": database_url}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


# What is said before


async def test_a_dry_run_of_a_filter_says_how_many_and_changes_nothing(database: "Connection[Any]", command: Command) -> None:
    first, *_ = await bury(database, 7, error_code="bad_iban")
    await bury(database, 2, reason="ambiguous", error_code="bad_iban")
    await bury(database, 1)
    code, output = await command("dead-letters", "redrive", "--error-code", "bad_iban", *BY_ANA, "--dry-run")
    assert code == 1, "two of them would be refused"
    assert "Dead letters that fit: 9; nothing was changed" in output
    assert "would be: redriving 7, ambiguous 2" in output
    assert str(first) in output
    assert len(re.findall(r"^[0-9a-f-]{36}", output, re.MULTILINE)) == 5
    assert (await command("dead-letters", "discard", "--error-code", "bad_iban", *BY_ANA, "--dry-run"))[0] == 0
    assert await states(database) == {"dead": 10}
    assert await audited(database) == []


@pytest.mark.parametrize("typed", ["", "y\n", "4\n", "33\n", None])
async def test_a_filter_is_not_obeyed_before_its_number_is_typed(
    database: "Connection[Any]", operator_url: str, typed: str | None
) -> None:
    await bury(database, 3)
    result = await said(operator_url, "discard", "--consumer", "payments", *BY_ANA, typed=typed)
    assert (result.exit_code, result.exception is None or isinstance(result.exception, SystemExit)) == (1, True)
    assert "not confirmed; nothing was changed" in result.output
    assert await states(database) == {"dead": 3}


async def test_the_number_typed_is_the_number_done(database: "Connection[Any]", operator_url: str) -> None:
    await bury(database, 3)
    result = await said(operator_url, "discard", "--consumer", "payments", *BY_ANA, "--json", typed="3\n")
    assert result.exit_code == 0
    assert "Dead letters that fit: 3. Type 3 to discard them" in result.stderr
    assert json.loads(result.stdout)["outcomes"] == {"discarded": 3, "not_dead": 0, "changed": 0, "not_found": 0}
    assert await states(database) == {"discarded": 3}


async def test_neither_nothing_nor_two_things_at_once_can_be_meant(database: "Connection[Any]", command: Command) -> None:
    (one,) = await bury(database)
    for words in (
        (),
        (one, "--consumer", "payments"),
        (one, "--after", one),
        (one, one, "--at-most", 1),
        ("--after", one),
        ("--older-than", "soon"),
    ):
        for verb in ("redrive", "discard"):
            assert (await command("dead-letters", verb, *words, *BY_ANA, "--yes"))[0] == 2, (verb, words)
    assert await states(database) == {"dead": 1}


async def test_where_none_fits_nothing_is_asked_and_nothing_is_wrong(database: "Connection[Any]", command: Command) -> None:
    await bury(database, state="discarded")
    code, output = await command("dead-letters", "redrive", "--consumer", "payments", *BY_ANA)
    assert (code, output) == (0, "No dead letter fits; nothing was changed.\n")
    told = await command.json("dead-letters", "redrive", "--consumer", "payments", *BY_ANA)
    assert (told["found"], told["letters"], sum(told["outcomes"].values())) == (0, [], 0)
    assert await command("dead-letters", "list") == (0, "No dead letter fits.\n")
    assert await command("dead-letters", "summary") == (0, "No dead letter fits.\n")
    assert await command.json("dead-letters", "summary") == {"letters": 0, "groups": 0, "largest": []}


# What is done


async def test_every_letter_of_many_batches_is_redriven_and_audited_once(database: "Connection[Any]", command: Command) -> None:
    meant = await bury(database, 1_203, error_code="bad_iban")
    await bury(database, 5)
    told = await command.json("dead-letters", "redrive", "--error-code", "bad_iban", *BY_ANA, "--yes")
    assert told["outcomes"] == {"redriving": 1_203, "not_dead": 0, "changed": 0, "ambiguous": 0, "not_found": 0}
    assert (told["found"], told["more"], told["not_asked"], told["dry_run"]) == (1_203, False, 0, False)
    assert told["letters"][0] == {"dead_letter_id": str(meant[0]), "outcome": "redriving", "letter_state": "redriving"}
    assert await audited(database) == [(str(one), "dead-letters redrive") for one in meant]
    assert await states(database) == {"dead": 5, "redriving": 1_203}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"consumer": "mails"}, ("--consumer", "mails")),
        ({"tenant_id": "acme"}, ("--tenant", "acme")),
        ({"topic": "refunds"}, ("--topic", "refunds")),
        ({"event_type": "order.voided"}, ("--event-type", "order.voided")),
        ({"reason": "invalid_payload"}, ("--dead-reason", "invalid_payload")),
        ({"error_class": "builtins.KeyError"}, ("--error-class", "builtins.KeyError")),
        ({"error_code": "odd ' code"}, ("--error-code", "odd ' code")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_a_filter_means_what_it_lists(
    database: "Connection[Any]", command: Command, parts: dict[str, Any], words: tuple[str, str]
) -> None:
    """The same words choose the same letters for a list, a summary and a change."""
    await bury(database, 3, tenant_id=parts.get("tenant_id", "globex")[::-1])
    meant = [str(one) for one in await bury(database, 2, **dict[str, Any](tenant_id="globex") | parts)]
    assert [row["dead_letter_id"] for row in await command.json("dead-letters", "list", *words)] == meant
    assert (await command.json("dead-letters", "summary", *words))["letters"] == 2
    told = await command.json("dead-letters", "discard", *words, *BY_ANA, "--yes")
    assert [one["dead_letter_id"] for one in told["letters"]] == meant
    assert await states(database) == {"dead": 3, "discarded": 2}


async def test_an_empty_tenant_means_messages_without_one(database: "Connection[Any]", command: Command) -> None:
    (bare,) = await bury(database, tenant_id="")
    await bury(database, tenant_id="acme")
    told = await command.json("dead-letters", "discard", "--tenant", "", *BY_ANA, "--yes")
    assert [one["dead_letter_id"] for one in told["letters"]] == [str(bare)]
    code, output = await command("dead-letters", "show", bare)
    assert (code, "of tenant (none)" in output) == (0, True)


async def test_at_most_takes_the_oldest_and_says_that_there_are_more(database: "Connection[Any]", command: Command) -> None:
    meant = await bury(database, 5)
    told = await command.json("dead-letters", "redrive", "--consumer", "payments", "--at-most", 2, *BY_ANA, "--yes")
    assert ([one["dead_letter_id"] for one in told["letters"]], told["more"]) == ([str(one) for one in meant[:2]], True)
    code, output = await command(
        "dead-letters", "redrive", "--consumer", "payments", "--after", meant[2], "--at-most", 1, *BY_ANA, "--yes"
    )
    assert (code, "Dead letters that fit: 1 and more" in output) == (0, True)
    assert await states(database, meant[:2]) == {"redriving": 2}
    assert await states(database, meant[3:4]) == {"redriving": 1}


async def test_ids_are_answered_one_by_one_in_the_order_given(database: "Connection[Any]", command: Command) -> None:
    (dead,), (over,) = await bury(database), await bury(database, state="redriven")
    (ambiguous,) = await bury(database, reason="ambiguous")
    missing = UUID(int=5)
    code, output = await command("dead-letters", "redrive", ambiguous, missing, over, dead, dead, *BY_ANA)
    assert code == 1
    lines = output.splitlines()
    assert [line[:36] for line in lines[:4]] == [str(one) for one in (ambiguous, missing, over, dead)]
    assert lines[4] == "redriving 1, not dead 1, ambiguous 1, not found 1"
    assert await audited(database) == [(str(dead), "dead-letters redrive")]


async def test_ambiguous_ones_of_a_filter_are_left_unless_somebody_has_looked(
    database: "Connection[Any]", command: Command
) -> None:
    ambiguous = await bury(database, 2, reason="ambiguous")
    await bury(database, 2)
    code, output = await command("dead-letters", "redrive", "--consumer", "payments", *BY_ANA, "--yes")
    assert code == 1
    assert "redriving 2, ambiguous 2" in output
    assert all(f"{one}  an effect may have happened" in output for one in ambiguous)
    told = await command.json("dead-letters", "redrive", "--dead-reason", "ambiguous", "--effects-checked", *BY_ANA, "--yes")
    assert told["outcomes"]["redriving"] == 2
    shown = await command.json("dead-letters", "show", ambiguous[0])
    assert [row["effects_checked"] for row in shown["history"]] == [True]


async def test_an_actor_that_the_audit_cannot_hold_changes_nothing(database: "Connection[Any]", command: Command) -> None:
    await bury(database, 3)
    for actor, reason in (("x" * 257, "why"), ("ana", "y" * 2_001), (" ", "why"), ("ana", "")):
        words = ("--consumer", "payments", "--yes", "--actor", actor, "--reason", reason)
        assert (await command("dead-letters", "redrive", *words))[0] == 2
    assert await states(database) == {"dead": 3}


# Others at the same time


async def test_two_operators_at_once_redrive_each_letter_once(
    database: "Connection[Any]", database_url: str, operator_url: str
) -> None:
    """Both have read the same list when a lock holds them up in its first batch; neither waits for the other for ever."""
    meant = await bury(database, 1_400)
    blocker = await asyncpg.connect(database_url)
    transaction = blocker.transaction()
    await transaction.start()
    await blocker.execute("SELECT FROM fencepost.dead_letters WHERE dead_letter_id = $1 FOR UPDATE", meant[200])
    words = ("redrive", "--consumer", "payments", *BY_ANA, "--yes", "--json")
    both = [await started(operator_url, *words) for _ in range(2)]

    async def both_wait() -> bool:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return bool(await database.fetchval(waiting) == 2)

    await eventually(both_wait, 30)
    await transaction.rollback()
    await blocker.close()
    told = [json.loads((await asyncio.wait_for(one.communicate(), 30))[0]) for one in both]
    assert [one["found"] for one in told] == [1_400, 1_400]
    assert sum(one["outcomes"]["redriving"] for one in told) == 1_400
    assert all(one["outcomes"]["redriving"] + one["outcomes"]["not_dead"] == 1_400 for one in told)
    assert sorted(one for one, _ in await audited(database)) == [str(one) for one in meant]


async def test_a_letter_that_a_handler_holds_is_answered_at_once(
    database: "Connection[Any]", database_url: str, command: Command
) -> None:
    """A handler's transaction has its letter locked for as long as it works; the operator is told, and does not wait for it."""
    (held,) = await bury(database, state="redriving")
    meant = await bury(database, 2)
    handler = await asyncpg.connect(database_url)
    async with handler.transaction(), asyncio.timeout(10):
        await handler.execute("SELECT FROM fencepost.dead_letters WHERE dead_letter_id = $1 FOR UPDATE", held)
        told = await command.json("dead-letters", "redrive", held, *meant, *BY_ANA, code=1)
    await handler.close()
    assert told["outcomes"] == {"redriving": 2, "not_dead": 1, "changed": 0, "ambiguous": 0, "not_found": 0}


async def test_a_letter_that_died_anew_since_it_was_listed_is_left(database: "Connection[Any]", operator_url: str) -> None:
    """Another redrove it meanwhile, and it is ambiguous now: what this operator has checked is not what has happened since."""
    (one,) = await bury(database, reason="ambiguous")
    answers: Answers = {}
    async with inspecting(operator_url) as inspector:
        listed = await inspector.rows("find_dead_letters", [one])
        await database.execute("UPDATE fencepost.dead_letters SET redrives = 1, changed_at = clock_timestamp()")
        change = Change(verb="redrive", actor="ana", reason="looked", effects_checked=True)
        await change_letters(inspector, listed, change, rate=None, stopping=asyncio.Event(), told=answers.update)
    assert answers == {one: {"outcome": "changed", "letter_state": "dead"}}
    assert await audited(database) == []


async def test_a_consumer_at_work_handles_what_is_redriven_beside_what_arrives(
    database_url: str, kafka: str, topic: TopicFactory, operator_url: str
) -> None:
    """Each once; --wait sees the end of each."""
    mended, app_of = asyncio.Event(), MessageHandlers()

    @app_of.handler("ping", model=Ping, step="write")
    async def write(message: Message[Ping], context: MessageContext) -> None:
        if message.value.n < 20 and not mended.is_set():
            raise Terminal("broken")
        async with context.transaction() as connection:
            await connection.execute("INSERT INTO seen VALUES ($1, $2)", message.event_id, message.value.n)

    async with stage(database_url, kafka, topic) as made:
        for number in range(20):
            await made.send({"n": number})
        async with made.running(app_of):
            await made.until_committed({0: 20})
            mended.set()
            words = ("redrive", "--consumer", made.topic, "--rate", 15, "--wait", 60, *BY_ANA, "--yes", "--json")
            redriving = await started(operator_url, *words)
            for number in range(20, 40):
                await made.send({"n": number})
            out, _ = await asyncio.wait_for(redriving.communicate(), 90)
            await made.until_committed({0: 40})
        assert [one["letter_state"] for one in json.loads(out)["letters"]] == ["redriven"] * 20
        assert sorted(await made.seen()) == list(range(40))


async def test_waiting_says_which_of_them_failed_again(
    database_url: str, kafka: str, topic: TopicFactory, operator_url: str
) -> None:
    app_of, mended = MessageHandlers(), asyncio.Event()

    @app_of.handler("ping", model=Ping, step="note")
    async def note(message: Message[Ping], _context: MessageContext) -> None:
        if message.value.n == 1 or not mended.is_set():
            raise Terminal("broken")

    async with stage(database_url, kafka, topic) as made:
        for number in range(3):
            await made.send({"n": number})
        async with made.running(app_of):
            await made.until_committed({0: 3})
            letters = await made.dead()
            mended.set()
            process = await started(operator_url, "redrive", "--consumer", made.topic, "--wait", 60, *BY_ANA, "--yes")
            output = (await asyncio.wait_for(process.communicate(), 90))[0].decode()
    assert process.returncode == 1
    assert f"{letters[1]['dead_letter_id']}  failed again" in output
    assert "redriving 3\nnow: redriven 2, dead 1" in output


# Cut short


async def until_begun(database: "Connection[Any]") -> None:
    async def begun() -> bool:
        return (await states(database)).get("redriving", 0) > 0

    await eventually(begun, 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_between_batches_and_the_same_command_goes_on(
    database: "Connection[Any]", operator_url: str, command: Command, number: signal.Signals
) -> None:
    meant = await bury(database, 900)
    words = ("redrive", "--consumer", "payments", *BY_ANA, "--yes")
    process = await started(operator_url, *words, "--rate", 100, "--json")
    await until_begun(database)
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    told = json.loads(out)
    done = told["outcomes"]["redriving"]
    assert process.returncode == 1
    assert 0 < done < 900
    assert (told["not_asked"], len(told["letters"])) == (900 - done, done)
    assert await states(database, meant[:done]) == {"redriving": done}
    assert await states(database, meant[done:]) == {"dead": 900 - done}
    assert f"--after {meant[done - 1]}" in err.decode()
    assert (await command.json("dead-letters", *words))["outcomes"]["redriving"] == 900 - done
    assert [one for one, _ in await audited(database)] == [str(one) for one in meant]


async def test_a_killed_redrive_has_done_whole_batches_and_the_next_one_does_the_rest(
    database: "Connection[Any]", operator_url: str, command: Command
) -> None:
    meant = await bury(database, 900)
    words = ("redrive", "--consumer", "payments", *BY_ANA, "--yes")
    process = await started(operator_url, *words, "--rate", 100)
    await until_begun(database)
    process.kill()
    await asyncio.wait_for(process.communicate(), 30)

    async def gone() -> bool:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1"
        return bool(await database.fetchval(sessions, urlsplit(operator_url).username) == 0)

    await eventually(gone)
    done = (await states(database))["redriving"]
    assert (done % 100, len(await audited(database))) == (0, done)
    assert (await command.json("dead-letters", *words))["outcomes"]["redriving"] == 900 - done
    assert [one for one, _ in await audited(database)] == [str(one) for one in meant]


async def test_a_database_that_goes_away_is_told_with_how_far_it_came(database: "Connection[Any]", database_url: str) -> None:
    await bury(database, 300)
    async with TcpProxy(database_url) as proxy:
        words = ("redrive", "--consumer", "payments", *BY_ANA, "--yes", "--rate", 100)
        running = asyncio.create_task(said(proxy.url, *words))
        await until_begun(database)
        await proxy.refuse()
        result = await running
    assert isinstance(result.exception, TransientError)
    assert re.search(r"^[12]00 of 300; the batch in hand is whole or was not done", result.output, re.MULTILINE)
    done = (await states(database))["redriving"]
    assert len(await audited(database)) == done < 300
