"""The relay as a process: what ends it, and what is only logged."""

import asyncio

from relay.app import Relay
from relay.settings import load_settings


def relay() -> Relay:
    return Relay(load_settings({"database_url": "postgresql://db/app", "kafka_bootstrap_servers": "kafka:9092"}))


async def test_a_callback_that_fails_ends_the_process() -> None:
    """It has left a step undone that nothing would ever notice: a lane that is held, and stands still."""
    it = relay()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(it._on_loop_error)

    loop.call_soon(lambda: 1 // 0)

    assert isinstance(await asyncio.wait_for(it._fault, 10), ZeroDivisionError)


async def test_an_outcome_that_a_library_forgot_to_look_at_is_only_logged() -> None:
    it = relay()
    it._on_loop_error(asyncio.get_running_loop(), {"message": "never retrieved", "exception": OSError("gone"), "future": None})
    assert not it._fault.done()
