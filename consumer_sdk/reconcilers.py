"""Which reconciler asks the provider about which operation, for workers and consumers alike."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from consumer_sdk.effects import Reconciler
from fencepost.errors import ConfigurationError
from fencepost.registration import check_function

__all__ = ["Reconcilers"]

_Reconciler = TypeVar("_Reconciler", bound=Reconciler)


class Reconcilers:
    """The part of a registry that holds reconcilers."""

    def __init__(self) -> None:
        self._reconcilers: dict[str, Reconciler] = {}

    def reconciler(self, operation: str) -> Callable[[_Reconciler], _Reconciler]:
        """Register the decorated coroutine function as the one that asks the provider what became of an effect::

        @handlers.reconciler("stripe.charge")
        async def charge_state(effect: Effect) -> Applied | Absent | None: ...
        """
        if operation in self._reconcilers:
            raise ConfigurationError(f"operation {operation}: has a reconciler already; register each operation once")

        def register(function: _Reconciler) -> _Reconciler:
            check_function(f"operation {operation}: the reconciler", function, "the effect", 1)
            self._reconcilers[operation] = function
            return function

        return register

    @property
    def reconcilers(self) -> Mapping[str, Reconciler]:
        return dict(self._reconcilers)
