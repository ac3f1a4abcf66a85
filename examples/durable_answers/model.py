"""A stand-in for a language model: it says the same to everybody, token by token, at the pace of one."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Final

__all__ = ["PACE", "PARAGRAPHS", "answer_to", "tokens"]

#: Environment: seconds that a token takes.
PACE: Final = "ANSWERS_TOKEN_SECONDS"
_DEFAULT_PACE: Final = "0.08"
_TOKEN: Final = re.compile(r"\S+\s*")

PARAGRAPHS: Final = (
    "You asked: {prompt} Here is the long answer, and you may pull any plug you like while it is being written. "
    "Every sentence that is finished is stored before you see it in black. The grey words are live: nobody keeps them. "
    "When their sentence is done, it takes their place. ",
    "Kill the server and the worker goes on writing, since neither knows the other. "
    "The page asks again with the same key and the last id that it has seen. "
    "A new server reads the rest from the database, and not one sentence comes twice. "
    "Cut the line, close the lid, reload the page: it is the same question with the same key. ",
    "Kill the worker in the middle of a paragraph and another one takes the run over when its lease has run out. "
    "It calls the model again for the unfinished paragraph only. The finished ones are kept with the run. "
    "Two calls of a model give two texts, so the page is told to begin anew and never glues two halves together. ",
    "At the end the run has one result, and whoever sends this key again gets exactly that. "
    "It is the text that you have been reading, byte for byte. Nothing was lost, and nothing was said twice.",
)


def answer_to(prompt: str) -> str:
    """All that the model says."""
    return "".join(PARAGRAPHS).format(prompt=prompt)


async def tokens(prompt: str, paragraph: int) -> AsyncIterator[str]:
    """A paragraph, as the model says it."""
    seconds = float(os.environ.get(PACE, _DEFAULT_PACE))
    for token in _TOKEN.findall(PARAGRAPHS[paragraph].format(prompt=prompt)):
        await asyncio.sleep(seconds)
        yield token
