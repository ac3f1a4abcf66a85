"""The ledger of a process, opened when the first effect is asked for: most handlers have none."""

from collections.abc import Awaitable, Callable

from consumer_sdk.effect_store import EffectStore
from consumer_sdk.late import Late
from consumer_sdk.ledger import Ledger, ledger_secrets
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.database import Statements
from fencepost.secrets import Secrets

__all__ = ["LateLedger"]


class LateLedger:
    """``open_effects`` opens its statements; ``holder`` is who the rows are written by, ``count`` is told of each effect's outcome.
    ``secrets`` None: the environment's, read then. ``codec``: as of ``Ledger``."""

    def __init__(
        self,
        open_effects: Callable[[], Awaitable[Statements]],
        *,
        holder: str,
        secrets: Secrets | None,
        count: Callable[[str], None],
        codec: PayloadCodec = PLAIN,
    ) -> None:
        self._effects = Late(open_effects)
        self._holder = holder
        self._secrets = secrets
        self._count = count
        self._codec = codec
        self._ledger: Ledger | None = None

    async def opened(self) -> Ledger:
        """The ledger. Raises what opening it raises, each time anew."""
        if self._ledger is None:
            secrets = ledger_secrets(self._secrets)
            store = EffectStore((await self._effects.opened()).fetch, self._holder)
            self._ledger = Ledger(store, secrets, codec=self._codec, count=self._count)
        return self._ledger

    async def close(self) -> None:
        """Close its connections."""
        await self._effects.close()
