"""A ledger in memory, for tests of code that makes effects happen once."""

from collections.abc import Callable
from typing import Final

from consumer_sdk.effect_store import EffectStore
from consumer_sdk.ledger import Ledger
from consumer_sdk.testing.memory_effects import MemoryEffects
from fencepost.codec import PLAIN, PayloadCodec
from fencepost.secrets import Secrets

__all__ = ["TEST_SECRETS", "memory_ledger"]

#: Known to everybody, so good for nothing but tests.
TEST_SECRETS: Final = Secrets({1: b"known to everybody, so good for nothing but tests"}, write=[1])


def memory_ledger(
    effects: MemoryEffects,
    *,
    holder: str = "test",
    secrets: Secrets = TEST_SECRETS,
    codec: PayloadCodec = PLAIN,
    count: Callable[[str], None] = lambda _: None,
) -> Ledger:
    """The ledger of one holder. Two of them over the same ``effects`` are two processes at one database."""
    return Ledger(EffectStore(effects.fetch, holder), secrets, codec=codec, count=count)
