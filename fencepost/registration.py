"""What is checked when a handler is registered, whatever it handles."""

import inspect
import math
import re
from typing import Any, Final, Protocol, runtime_checkable

from fencepost.errors import ConfigurationError
from fencepost.retry import Retry

__all__ = ["WORKFLOW", "InputModel", "check_function", "check_model_and_retry", "check_seconds"]

#: A workflow's name, as acceptance takes it.
WORKFLOW: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_MOST_SECONDS: Final = 366 * 86_400.0


@runtime_checkable
class InputModel(Protocol):
    """A pydantic model class, as far as it is needed here."""

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Any: ...


def check_model_and_retry(what: str, model: object, retry: object) -> None:
    """Refuse a model that reads no JSON, and a policy that is none."""
    if model is not None and not isinstance(model, InputModel):
        raise ConfigurationError(f"{what}: model must be a pydantic model class, or None for plain JSON")
    if not isinstance(retry, Retry | None):
        raise ConfigurationError(f"{what}: retry must be a consumer_sdk.Retry, or None for the default")


def check_function(what: str, function: object, takes: str, arguments: int) -> None:
    """Refuse what is no coroutine function of so many arguments."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{what} must be an `async def` function")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        raise ConfigurationError(f"{what} must take {takes}, and nothing else without a default") from None


def check_seconds(name: str, seconds: float | None) -> None:
    """Refuse a time limit that cannot work."""
    if seconds is None:
        return
    if not math.isfinite(seconds) or not 0.001 <= seconds <= _MOST_SECONDS:
        raise ConfigurationError(f"{name} must be from 0.001 to {_MOST_SECONDS:g} (366 days), or None for no limit")
