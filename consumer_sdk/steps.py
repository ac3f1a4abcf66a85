"""The words of memoised steps: what identifies one, what is kept of it, and how its arguments and its result are read.

A step is found again by its name and by how often the name came before; what must be alike then are its arguments. They are kept as
an HMAC of their canonical JSON, so that a copy of the table tells nobody what they were.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic import BaseModel, TypeAdapter

from consumer_sdk.jobs import JobKey
from fencepost.canonical_json import canonical_json
from fencepost.errors import InvalidCommand
from fencepost.finite import finite_json
from fencepost.secrets import Secrets, joined

__all__ = [
    "MAX_RESULT_BYTES", "KeptStep", "StepKey", "StepRecord", "Timer", "canonical_arguments", "decoded_result", "encoded_result",
    "step_fingerprint",
]  # fmt: skip

#: What the ledger holds of one result, the codec's bytes.
MAX_RESULT_BYTES: Final = 1_000_000
_DOMAIN: Final = b"fencepost step arguments"
_MOST_KNOWN_FUNCTIONS: Final = 1_000

StepFunction = Callable[..., Awaitable[Any]]


class StepKey(NamedTuple):
    """The identity of a step: first run of the lineage, tenant, iteration, name, and how often the name came before."""

    run_key: str
    tenant_id: str
    iteration: int
    step: str
    occurrence: int


class KeptStep(NamedTuple):
    """What is kept of a step. ``fingerprint`` is its arguments', made with a version of the secret."""

    fingerprint: bytes
    fingerprint_version: int
    result: bytes | None


class StepRecord(NamedTuple):
    """A step that returned, under a lease."""

    job: JobKey
    key: StepKey
    kept: KeptStep


class Timer(NamedTuple):
    """A timer as it was set first. ``seconds_left`` is negative when it has gone off, by the database's clock."""

    fingerprint: bytes
    fingerprint_version: int
    seconds_left: float


def step_fingerprint(secrets: Secrets, version: int, canonical: bytes) -> bytes:
    """What arguments are compared by."""
    return secrets.digest(version, joined(_DOMAIN, canonical))


def canonical_arguments(arguments: Sequence[object]) -> bytes:
    """The one form of a step's arguments. Raises ``InvalidJson`` for what has none: a set, bytes, an object of one's own."""
    return canonical_json([_plain(argument) for argument in arguments])


def encoded_result(name: str, function: StepFunction, result: object) -> tuple[bytes, object]:
    """A step's result as JSON, by the function's return annotation, and as it will be read: the first attempt goes on with what the
    next ones will. Raises ``InvalidCommand`` that names the step and no value."""
    adapter = _result_of(function)
    try:
        payload = finite_json(adapter, result, round_trip=True, warnings="error")
        return payload, adapter.validate_json(payload)
    except Exception:  # noqa: BLE001 - a boundary: models and serializers are the author's
        limit = "must be what the function's return annotation says, and a value that JSON can hold"
        raise InvalidCommand(f"result of step {name}", limit, "return a plain value or a pydantic model") from None


def decoded_result(function: StepFunction, payload: bytes) -> object:
    """A kept result as the function would have returned it. Raises ``ValueError`` (pydantic's among them) if it does not fit."""
    return _result_of(function).validate_json(payload)


def _result_of(function: StepFunction) -> "TypeAdapter[Any]":
    """By the underlying function: a bound method is another object at each access."""
    return _adapter_of(getattr(function, "__func__", function))


@functools.lru_cache(_MOST_KNOWN_FUNCTIONS)
def _adapter_of(function: StepFunction) -> "TypeAdapter[Any]":
    try:
        hints = get_type_hints(function, include_extras=True)
    except (TypeError, NameError):  # a partial, or an annotation of a local name: it is taken as plain JSON
        hints = {}
    return TypeAdapter(hints.get("return", Any))


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="python"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value
