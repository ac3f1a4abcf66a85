"""``fencepost dead-letters`` as operators use it: what was given up and why; a redrive or a discard with a name and a reason."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from consumer_sdk import Message, MessageContext, MessageHandlers, Terminal
from tests.support.commands import Command, user_of
from tests.support.consumers import Stage, stage
from tests.support.topics import TopicFactory
from tests.support.waiting import eventually

pytestmark = pytest.mark.services

BY_ANA: Final = ("--actor", "ana", "--reason", "mended")
SECRET: Final = "sk-live-0123456789"


@pytest.fixture
async def made(database_url: str, kafka: str, topic: TopicFactory) -> AsyncIterator[Stage]:
    async with stage(database_url, kafka, topic) as one:
        yield one


@pytest.fixture
async def command(database_url: str) -> AsyncIterator[Command]:
    """With the operator's role and no other."""
    async with user_of("fencepost_operator", database_url) as url:
        yield Command(url)


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
    assert (await command("dead-letters", "show", uuid.uuid4()))[0] == 1


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
