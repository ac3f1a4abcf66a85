"""The help of every command reads well in the usual terminal and in a wide one, and its examples can be pasted."""

import itertools
from collections.abc import Iterator
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

from fencepost.cli import app

_MARGIN: Final = 1  # that Typer leaves on each side


def command_paths(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from command_paths(command, (*path, name))
        else:
            yield (*path, name)


PATHS: Final = sorted(command_paths(typer.main.get_command(app())))


def help_of(path: tuple[str, ...], columns: int) -> list[str]:
    """The lines below the usage and above the tables of options."""
    result = CliRunner().invoke(app(), [*path, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    text = result.output.split("╭")[0]
    return [line[_MARGIN:].rstrip() for line in text.splitlines()][3:]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_a_paragraph_of_the_help_fills_its_lines(path: tuple[str, ...], columns: int) -> None:
    for line, after in itertools.pairwise(help_of(path, columns)):
        if line and after and not after.startswith(" "):
            assert len(f"{line} {after.split()[0]}") > columns - 2 * _MARGIN, line


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_an_example_of_the_help_is_one_command_that_can_be_pasted(path: tuple[str, ...]) -> None:
    lines = help_of(path, 80)
    heading = next(number for number, line in enumerate(lines) if line in ("Example:", "Examples:"))
    examples = "\n".join(lines[heading + 1 :]).strip("\n").split("\n\n")
    for example in examples:
        command, *more = example.replace("\\\n", "").splitlines()
        assert not more, example
        assert command.startswith("  "), example
        assert f"fencepost {' '.join(path)}" in command
