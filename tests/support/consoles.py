"""The console blocks of a page, run as a reader would run them, and what they print compared with what the page shows.

What differs from run to run, ids and dates, is known by its shape. Where the page shows one id twice, the run must print one twice.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Console", "Exchange", "exchanges"]

_ROOT: Final = Path(__file__).parents[2]
_BLOCK: Final = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_DATE: Final = re.compile(r"^date: .*$", re.MULTILINE)
_VARIES: Final = re.compile(r"/operations/[0-9a-f-]{36}|\bo-[0-9a-f]{8}\b")
_SECONDS: Final = 30


class Exchange(NamedTuple):
    """A command and what the page says that it prints."""

    command: str
    printed: str


def exchanges(page: Path) -> Iterator[Exchange]:
    """Every command of the page's console blocks; a line that ends in a backslash goes on."""
    for block in _BLOCK.findall(page.read_text()):
        command, printed = "", list[str]()
        for line in block.splitlines():
            if command.endswith("\\"):
                command += f"\n{line}"
            elif line.startswith("$ "):
                if command:
                    yield Exchange(command, "\n".join(printed))
                command, printed = line.removeprefix("$ "), []
            else:
                printed.append(line)
        yield Exchange(command, "\n".join(printed))


class Console:
    """Runs a page's commands. ``shown``: what stands on the page for ``meant``, an address or a program."""

    def __init__(self, *, shown: str, meant: str) -> None:
        self._actual = {shown: meant}

    def run(self, exchange: Exchange) -> tuple[str, str]:
        """What the command prints, and what it should by the page."""
        done = subprocess.run(
            ["bash", "-c", self._meant(exchange.command)], capture_output=True, text=True, timeout=_SECONDS, cwd=_ROOT
        )
        assert done.returncode == 0, f"{exchange.command}\n{done.stderr}"
        printed, shown = _plain(done.stdout), _plain(exchange.printed)
        for name, actual in zip(_VARIES.findall(shown), _VARIES.findall(printed), strict=False):
            self._actual.setdefault(name, actual)
        return printed, self._meant(shown)

    def _meant(self, text: str) -> str:
        for shown, actual in self._actual.items():
            text = text.replace(shown, actual)
        return text


def _plain(text: str) -> str:
    return _DATE.sub("date: …", text.replace("\r", "")).strip("\n")
