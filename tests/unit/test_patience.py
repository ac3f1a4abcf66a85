"""A write is done again while that may help, whatever form it is given in."""

import math
from collections.abc import Awaitable, Callable

import pytest

from consumer_sdk.patience import patiently
from fencepost.clock import lease_clock
from fencepost.errors import TransientError


class Flaky:
    """Fails so many times, and then answers."""

    def __init__(self, failures: int) -> None:
        self.left = failures

    async def write(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise TransientError("the database is away")
        return "written"


@pytest.mark.parametrize("failures", [0, 1, 2])
@pytest.mark.parametrize("form", [lambda one: one.write, lambda one: lambda: one.write()], ids=["method", "lambda"])  # noqa: PLW0108 - a lambda is what is tested
async def test_the_answer_is_that_of_the_try_that_came_through(
    form: Callable[[Flaky], Callable[[], Awaitable[str]]], failures: int
) -> None:
    told: list[int] = []
    assert await patiently(form(Flaky(failures)), until=math.inf, failed=lambda: told.append(1)) == "written"
    assert len(told) == failures


async def test_what_never_comes_through_is_told_when_the_time_is_over() -> None:
    told: list[int] = []
    with pytest.raises(TransientError):
        await patiently(Flaky(1_000).write, until=lease_clock(), failed=lambda: told.append(1))
    assert len(told) == 2
