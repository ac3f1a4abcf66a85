"""What is opened when it is first asked for."""

import asyncio

import pytest

from consumer_sdk import late as module
from consumer_sdk.late import Late


class Pool:
    closed = 0

    async def close(self) -> None:
        self.closed += 1


async def test_it_is_opened_once_however_many_ask_and_closed_once() -> None:
    opened: list[Pool] = []

    async def open_it() -> Pool:
        opened.append(Pool())
        await asyncio.sleep(0)
        return opened[-1]

    late = Late(open_it)
    assert opened == []
    found = await asyncio.gather(*(late.opened() for _ in range(5)))
    await late.close()
    assert set(found) == set(opened)
    assert [pool.closed for pool in opened] == [1]


async def test_whoever_asks_after_a_failure_opens_it_anew() -> None:
    failures = [OSError("away")]

    async def open_it() -> Pool:
        if failures:
            raise failures.pop()
        return Pool()

    late = Late(open_it)
    with pytest.raises(OSError, match="away"):
        await late.opened()
    assert isinstance(await late.opened(), Pool)


async def test_what_is_being_opened_at_the_stop_is_closed() -> None:
    going, pool = asyncio.Event(), Pool()

    async def open_it() -> Pool:
        await going.wait()
        return pool

    late = Late(open_it)
    asking = asyncio.create_task(late.opened())
    await asyncio.sleep(0)
    closing = asyncio.create_task(late.close())
    await asyncio.sleep(0)
    going.set()
    await asyncio.wait([asking, closing])
    assert pool.closed == 1


async def test_a_stop_does_not_wait_for_what_takes_long_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.01)

    async def open_it() -> Pool:
        await asyncio.Event().wait()
        raise AssertionError

    late = Late(open_it)
    asking = asyncio.create_task(late.opened())
    await asyncio.sleep(0)
    await late.close()
    assert not asking.done()
    asking.cancel()
    await asyncio.wait([asking])
