"""``fencepost dead-letters`` as operators use it: what was given up and why; a redrive or a discard with a name and a reason."""

import re
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest

from consumer_sdk import Message, MessageContext, MessageHandlers, Terminal
from tests.support.commands import Command, user_of
from tests.support.consumers import Stage, stage
from tests.support.dead_letters import bury
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

BY_ANA: Final = ("--actor", "ana", "--reason", "mended")
SECRET: Final = "sk-live-0123456789"
ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe"


@pytest.fixture
async def made(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as one:
        yield one


@pytest.fixture
async def command(database_url: str) -> AsyncIterator[Command]:
    """With the operator's role and no other."""
    async with user_of("fencepost_operator", database_url) as url:
        yield Command(url)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def dead_letter(made: Stage, app: MessageHandlers, *, messages: int = 1) -> list[str]:
    """Messages that the app gives up; the dead letters' ids."""
    for _ in range(messages):
        await made.send({"n": 1, "token": SECRET}, type="ping", headers={"who": SECRET})
    async with made.running(app):
        await made.until_committed({0: messages})
    return [str(letter["dead_letter_id"]) for letter in await made.dead()]


def failing(*mended: bool) -> MessageHandlers:
    app = MessageHandlers()

    @app.handler("ping", step="fail")
    async def fail(message: Message[Any], context: MessageContext) -> None:
        if not mended:
            raise Terminal("broken")

    return app


async def test_the_list_tells_what_was_given_up_and_nothing_of_it(made: Stage, command: Command) -> None:
    first, second = await dead_letter(made, failing(), messages=2)
    code, output = await command("dead-letters", "list", "--limit", 1)
    assert code == 0
    assert first in output
    assert "rejected" in output
    assert f"--after {first}" in output
    assert SECRET not in output
    (row,) = await command.json("dead-letters", "list", "--after", first, "--consumer", made.topic, "--dead-reason", "rejected")
    assert (row["dead_letter_id"], row["attempts"], row["state"]) == (second, 1, "dead")
    assert await command.json("dead-letters", "list", "--topic", "another") == []


async def ids(command: Command, *words: object) -> list[str]:
    return [row["dead_letter_id"] for row in await command.json("dead-letters", "list", *words)]


@pytest.mark.parametrize("order", [(), ("--newest-first",)], ids=["oldest first", "newest first"])
async def test_pages_are_whole_and_stay_so_while_others_die_and_are_redriven(
    database: "asyncpg.Connection[Any]", command: Command, order: tuple[str, ...]
) -> None:
    """Every letter that waits from the first page to the last is on one of them, once, in order."""
    meant = [str(one) for one in await bury(database, 25, ago=timedelta(hours=1))]
    pages = [await ids(command, "--limit", 10, *order)]
    await database.execute("UPDATE fencepost.dead_letters SET state = 'redriven' WHERE dead_letter_id = $1", uuid.UUID(pages[0][3]))
    newer = [str(one) for one in await bury(database, 2)]
    while pages[-1]:
        pages.append(await ids(command, "--limit", 10, "--after", pages[-1][-1], *order))
    assert [one for page in pages for one in page] == (meant[::-1] if order else [*meant, *newer])


async def test_ages_choose_by_when_a_message_was_given_up(database: "asyncpg.Connection[Any]", command: Command) -> None:
    (old,) = await bury(database, ago=timedelta(days=2))
    (middle,) = await bury(database, ago=timedelta(hours=3))
    (new,) = await bury(database)
    assert await ids(command, "--newer-than", "1h") == [str(new)]
    assert await ids(command, "--older-than", "1d") == [str(old)]
    assert await ids(command, "--older-than", "60min", "--newer-than", "1.5d") == [str(middle)]
    assert (await command("dead-letters", "list", "--newer-than", "yesterday"))[0] == 2


async def test_states_choose_what_is_over_as_well(database: "asyncpg.Connection[Any]", command: Command) -> None:
    known = {state: str((await bury(database, state=state))[0]) for state in ("dead", "redriving", "redriven", "discarded")}
    for state, one in known.items():
        assert await ids(command, "--state", state) == [one]
    assert await ids(command) == [known["dead"], known["redriving"]]
    assert await ids(command, "--state", "all") == list(known.values())


async def test_a_code_that_only_repeats_the_reason_is_not_said_twice(database: "asyncpg.Connection[Any]", command: Command) -> None:
    (repeated,) = await bury(database, reason="invalid_payload", error_code="invalid_payload")
    await bury(database, reason="rejected", error_code="bad_iban")
    for words in (("list",), ("summary",), ("show", repeated)):
        _, output = await command("dead-letters", *words)
        assert output.count("invalid_payload") == 1, output
        assert words[0] == "show" or "rejected: bad_iban" in output


@pytest.mark.parametrize(
    "words", [("show",), ("redrive", *BY_ANA), ("discard", *BY_ANA), ("list", "--after")], ids=lambda it: it[0]
)
async def test_what_is_no_dead_letters_id_is_refused_unquoted_with_where_to_find_one(
    words: tuple[str, ...], database: "asyncpg.Connection[Any]", command: Command
) -> None:
    code, output = await command("dead-letters", *words, "garbage")
    assert code == 2
    assert "must be the id of a dead letter, a UUID; `fencepost dead-letters list` shows them" in output
    assert "garbage" not in output
    (letter,) = await bury(database)
    assert (await command("dead-letters", *words, f" {letter} "))[0] == 0


async def test_the_summary_counts_what_they_have_in_common(database: "asyncpg.Connection[Any]", command: Command) -> None:
    await bury(database, 3, error_code="bad_iban", ago=timedelta(hours=2))
    await bury(database, 1, error_code="bad_iban", state="redriving")
    await bury(database, 2, consumer="mails", event_type=None, reason="undecodable", error_class="KeyError")
    await bury(database, 9, state="discarded")
    told = await command.json("dead-letters", "summary")
    assert (told["letters"], told["groups"]) == (6, 2)
    first, second = told["largest"]
    assert [first[name] for name in ("consumer", "event_type", "reason", "error_code", "letters", "redriving")] == [
        "payments", "order.placed", "rejected", "bad_iban", 4, 1,
    ]  # fmt: skip
    assert first["oldest_at"] < second["oldest_at"] <= first["now"]
    assert (second["event_type"], second["error_class"], second["letters"]) == (None, "KeyError", 2)
    code, output = await command("dead-letters", "summary", "--limit", 1)
    assert (code, output.splitlines()[-1]) == (0, "Dead letters: 6; shown are the largest 1 of 2 groups.")
    assert (await command.json("dead-letters", "summary", "--state", "discarded"))["letters"] == 9


async def test_nothing_of_a_message_reaches_the_terminal_as_a_command(
    database: "asyncpg.Connection[Any]", command: Command
) -> None:
    """Whoever may send a message may choose these bytes, and an operator at three o'clock looks at them."""
    odd = [b"\xff\xfe", ESCAPES.encode(), b"", "ü".encode()]
    (letter,) = await bury(
        database, key=ESCAPES.encode() + b"\xff", payload=ESCAPES.encode(), header_names=odd, header_values=[*odd[1:], None],
        event_type=ESCAPES, run_key=ESCAPES, tenant_id=ESCAPES, consumer=ESCAPES, step=ESCAPES, topic=ESCAPES, error_code=ESCAPES,
        error_class=ESCAPES, reason="ambiguous",
    )  # fmt: skip
    for words in (
        ("list",), ("summary",), ("show", letter), ("show", letter, "--values", "--payload"),
        ("redrive", letter, *BY_ANA), ("redrive", "--consumer", ESCAPES, *BY_ANA, "--dry-run"),
    ):  # fmt: skip
        _, output = await command("dead-letters", *words)
        assert all(character.isprintable() or character == "\n" for character in output), words
    _, output = await command("dead-letters", "show", letter, "--values", "--payload")
    assert r"\xff\xfe" in output
    assert r"\x1b]0;owned\x07" in output


async def test_values_and_payload_are_shown_where_they_are_asked_for_and_are_cut(made: Stage, command: Command) -> None:
    """Of headers, what CloudEvents says of the message is shown in any case."""
    event = await made.send({"token": SECRET, "long": "x" * 9_000}, key=SECRET, headers={"who": "w" * 300 + SECRET})
    async with made.running(failing()):
        await made.until_committed({0: 1})
    (letter,) = [row["dead_letter_id"] for row in await made.dead()]
    code, output = await command("dead-letters", "show", letter)
    assert (code, SECRET in output, event in output) == (0, False, True)
    shown = await command.json("dead-letters", "show", letter)
    assert {one["name"]: one["value"] for one in shown["headers"]}["who"] is None
    assert (shown["key"], shown["payload"]) == (None, None)
    told = await command.json("dead-letters", "show", letter, "--values", "--payload")
    assert told["key"] == SECRET
    assert {one["name"]: one["value"] for one in told["headers"]}["who"] == f"{'w' * 200}… ({300 + len(SECRET)} B)"
    assert told["payload"].startswith(f'{{"token": "{SECRET}"')
    assert len(told["payload"]) < 4_100


async def test_show_tells_the_whole_story_and_what_to_do_next(made: Stage, command: Command) -> None:
    (letter,) = await dead_letter(made, failing())
    code, output = await command("dead-letters", "show", letter)
    assert code == 0
    for part in (f"{made.topic}/0@0", f"{made.topic}/fail", "rejected: broken", "dead since", "effects   none", "ce_type"):
        assert part in output
    assert f"fencepost dead-letters redrive {letter} --actor" in output
    await command("dead-letters", "discard", letter, *BY_ANA)
    code, output = await command("dead-letters", "show", letter)
    assert "dead-letters discard by ana" in output
    assert "given up for good" in output
    assert "redrive 0" not in output


async def test_many_headers_are_told_up_to_a_bound(database: "asyncpg.Connection[Any]", command: Command) -> None:
    names = [f"h{number}".encode() for number in range(130)]
    (letter,) = await bury(database, header_names=names, header_values=[b"1"] * 130)
    _, output = await command("dead-letters", "show", letter)
    assert len(re.findall(r"^h\d+ ", output, re.MULTILINE)) == 100
    assert "and 30 headers more" in output


async def test_show_tells_everything_but_bytes_and_writes_the_payload_where_it_is_told(
    made: Stage, command: Command, tmp_path: Path
) -> None:
    (letter,) = await dead_letter(made, failing())
    target = tmp_path / "payload.bin"
    code, output = await command("dead-letters", "show", letter, "--payload-to", target)
    assert code == 0
    assert "broken" in output
    assert "who" in output
    assert SECRET not in output
    assert SECRET.encode() in target.read_bytes()
    code, output = await command("dead-letters", "show", letter, "--payload-to", target)
    assert code == 2
    assert "File exists" in output
    ended, said = await command("dead-letters", "show", uuid.uuid4())
    assert (ended, "`fencepost dead-letters list --state all`" in said) == (1, True)


async def test_a_redrive_is_asked_for_once_waited_for_and_audited(made: Stage, command: Command) -> None:
    """CONSUME-25. Of two operators one wins, the other is told."""
    (letter,) = await dead_letter(made, failing())
    code, output = await command("dead-letters", "redrive", letter, *BY_ANA, "--dry-run")
    assert (code, "would be redriving" in output) == (0, True)
    assert (await command("dead-letters", "redrive", letter, *BY_ANA))[0] == 0
    code, output = await command("dead-letters", "redrive", letter, *BY_ANA)
    assert code == 1
    assert "it is redriving" in output
    code, output = await command("dead-letters", "redrive", letter, *BY_ANA, "--wait", 0.1)
    assert code == 1
    async with made.running(failing(True)):

        async def redriven() -> bool:
            return [row["state"] for row in await made.dead()] == ["redriven"]

        await eventually(redriven)
    shown = await command.json("dead-letters", "show", letter)
    assert [(row["command"], row["actor"]) for row in shown["history"]] == [("dead-letters redrive", "ana")]


async def test_a_redrive_that_fails_again_is_told(made: Stage, command: Command) -> None:
    (letter,) = await dead_letter(made, failing())
    async with made.running(failing()):
        code, output = await command("dead-letters", "redrive", letter, *BY_ANA, "--wait", 20)
    assert code == 1
    assert "failed again" in output


async def test_an_ambiguous_one_asks_whether_somebody_has_looked(made: Stage, command: Command) -> None:
    (letter,) = await dead_letter(made, failing())
    await made.connection.execute("UPDATE fencepost.dead_letters SET reason = 'ambiguous'")
    code, output = await command("dead-letters", "redrive", letter, *BY_ANA)
    assert (code, "--effects-checked" in output) == (1, True)
    assert (await command("dead-letters", "redrive", letter, *BY_ANA, "--effects-checked"))[0] == 0


async def test_discarded_is_for_good(made: Stage, command: Command) -> None:
    (letter,) = await dead_letter(made, failing())
    assert (await command("dead-letters", "discard", letter, *BY_ANA))[0] == 0
    code, output = await command("dead-letters", "redrive", letter, *BY_ANA)
    assert (code, "it is discarded" in output) == (1, True)
    assert (await command("dead-letters", "discard", uuid.uuid4(), *BY_ANA))[0] == 1
    assert (await command("dead-letters", "discard", letter, "--actor", " ", "--reason", "x"))[0] == 2
