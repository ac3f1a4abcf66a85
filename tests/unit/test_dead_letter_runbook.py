"""The runbook on dead letters, where it repeats the code: commands with their options, reasons, bounds."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from consumer_sdk.dead_letter_batches import BATCH, OUTCOMES
from consumer_sdk.dead_letter_changes import MOST_LETTERS
from consumer_sdk.dead_letters_command import dead_letters
from consumer_sdk.delivery import DEAD_REASONS

PAGE: Final = (Path(__file__).parents[2] / "docs" / "runbooks" / "dead-letters.md").read_text()
COMMANDS: Final = re.findall(r"^\$ fencepost dead-letters (\w+)(.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_every_command_of_the_runbook_is_one_that_is_there(name: str, words: str) -> None:
    group: Any = typer.main.get_command(dead_letters)
    with group.commands[name].make_context(name, shlex.split(words)) as context:
        assert context.params


def test_the_runbook_shows_every_command_and_names_every_filter() -> None:
    group: Any = typer.main.get_command(dead_letters)
    assert {name for name, _ in COMMANDS} == set(group.commands)
    options = {option for parameter in group.commands["summary"].params for option in parameter.opts}
    assert {option for option in options if f"`{option}`" not in PAGE} <= {"--database-url", "--limit", "--state"}


def test_the_runbook_has_a_row_for_every_reason_and_a_word_for_every_outcome() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert [row for row in rows if row in DEAD_REASONS] == list(DEAD_REASONS)
    assert all(f"`{outcome}`" in PAGE for outcomes in OUTCOMES.values() for outcome in outcomes)


def test_the_runbook_gives_the_bounds() -> None:
    assert f"at most {MOST_LETTERS:,} letters" in PAGE
    assert f"each {BATCH} letters" in PAGE
