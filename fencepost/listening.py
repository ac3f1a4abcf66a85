"""A LISTEN connection that stays: opened anew when it ends, probed because a cut one says nothing.

What it hears is only a hint. Whoever uses it polls as well, so every loss here (connection, notification) costs one poll.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

import asyncpg
import structlog

from fencepost.database import connecting
from fencepost.errors import TransientError

__all__ = ["Listener"]

_log = structlog.get_logger(__name__)

_CONNECT_SECONDS: Final = 10
_PROBE_SECONDS: Final = 15.0
_PROBE_ANSWER_SECONDS: Final = 5
_RECONNECT_SECONDS: Final = 1.0


class Listener:
    """``heard`` maps channels to what takes a notification's payload. ``changed`` is told when the connection is up (True) and
    when it has ended: what happened while nobody listened is to be looked for at the first."""

    def __init__(
        self, database_url: str, *, role: str, heard: Mapping[str, Callable[[str], None]], changed: Callable[[bool], None]
    ) -> None:
        self._database_url = database_url
        self._role = role
        self._heard = heard
        self._changed = changed
        self._connection: asyncpg.Connection | None = None
        changed(False)

    @property
    def up(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    async def run(self) -> None:
        """Keep listening until cancelled."""
        while True:
            try:
                await self._listen()
            except TransientError as error:
                _log.warning("listen_lost", error=str(error))
            finally:
                self._hang_up()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self) -> None:
        async with connecting(role=self._role):
            connection = await asyncpg.connect(
                self._database_url, timeout=_CONNECT_SECONDS, server_settings={"application_name": "fencepost-listen"}
            )
        self._connection = connection
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                for channel in self._heard:
                    await connection.add_listener(channel, self._on_notification)
            self._changed(True)
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_SECONDS):
                        await ended.wait()
                if not ended.is_set():
                    await connection.fetchval("SELECT 1", timeout=_PROBE_ANSWER_SECONDS)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
            raise TransientError(f"listen: {type(error).__name__}: {error}") from error

    def _on_notification(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        self._heard[channel](str(payload))

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._changed(False)
        if connection is not None:
            connection.terminate()
