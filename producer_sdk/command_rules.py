"""Why a command may not be accepted: the rules of the SQL function ``fencepost.command_refusal``, told before any statement.

Whatever passes here passes there. No message quotes a value.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NoReturn, Protocol
from uuid import UUID

from fencepost.canonical_json import MAX_BYTES, MAX_DEPTH, MAX_DIGITS, canonical_json, parse_json
from fencepost.codec import MAX_DATA_KEY_BYTES
from fencepost.errors import InvalidCommand, InvalidEvent, InvalidJson
from fencepost.finite import check_finite
from producer_sdk.rules import check_optional_text, check_text, check_topic

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_COST_LIMIT",
    "MAX_INPUT_BYTES",
    "MAX_SECONDS",
    "MIN_DEADLINE_SECONDS",
    "check_command",
    "check_data_key",
    "check_expected_version",
    "check_request",
    "check_required_text",
    "check_seconds",
    "check_stored",
    "check_words",
    "cost",
]

MAX_INPUT_BYTES: Final = MAX_BYTES
MAX_ATTEMPTS: Final = 1_000
MAX_SECONDS: Final = 366 * 86_400
MIN_DEADLINE_SECONDS: Final = 0.001
MAX_COST_LIMIT: Final = 10**15
# Beyond it the database would round, to zero in the end.
MAX_COST_DECIMALS: Final = 18

_MAX_VERSION: Final = 2**31 - 1
_MAX_RUN_VERSION: Final = 2**63 - 1
_ENCODER_REASONS: Final = {
    "Out of range float": "it holds NaN or an infinity",
    "holds NaN": "it holds NaN or an infinity",
    "Circular reference": "it holds itself",
    "Exceeds the limit": f"it holds a number of more than {MAX_DIGITS} digits",
}
_WORKFLOW: Final = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


class Draft(Protocol):
    """A command whose fields nobody has looked at yet."""

    @property
    def workflow(self) -> Any: ...
    @property
    def version(self) -> Any: ...
    @property
    def topic(self) -> Any: ...
    @property
    def delay_seconds(self) -> Any: ...
    @property
    def max_attempts(self) -> Any: ...
    @property
    def deadline_seconds(self) -> Any: ...
    @property
    def cost_limit(self) -> Any: ...
    @property
    def traceparent(self) -> Any: ...
    @property
    def run_id(self) -> Any: ...


def check_command(command: Draft, given_input: object) -> bytes:
    """Return the input as it is stored; raise ``InvalidCommand`` for the first rule broken, in the order of the SQL function."""
    if not isinstance(command.run_id, UUID):
        raise InvalidCommand("run_id", "must be a uuid.UUID", "leave it out to have one minted")
    _check_workflow(command.workflow)
    _check_integer("version", command.version, _MAX_VERSION)
    _as_event_rule(check_topic, command.topic)
    stored = _input_json(given_input)
    check_seconds("delay_seconds", command.delay_seconds, 0, MAX_SECONDS)
    _check_integer("max_attempts", command.max_attempts, MAX_ATTEMPTS)
    if command.deadline_seconds is not None:
        check_seconds("deadline_seconds", command.deadline_seconds, MIN_DEADLINE_SECONDS, MAX_SECONDS)
    _check_cost_limit(command.cost_limit)
    _as_event_rule(check_optional_text, "traceparent", command.traceparent)
    return stored


def check_stored(stored: bytes) -> bytes:
    """Return an input as a codec encoded it; raise ``InvalidCommand`` where that is longer than the table holds."""
    if len(stored) > MAX_INPUT_BYTES:
        limit = f"has {len(stored)} bytes as the codec encodes it, may have {MAX_INPUT_BYTES}"
        raise InvalidCommand("input", limit, "store it elsewhere and pass a reference")
    return stored


def check_data_key(wrapped: bytes | None) -> bytes | None:
    """Return a data key as a codec wrapped it; raise ``InvalidCommand`` where the table does not hold that."""
    if wrapped is not None and not isinstance(wrapped, bytes):
        raise InvalidCommand("data_key", "must be bytes as the codec wraps it", "return bytes from new_data_key")
    if wrapped is not None and not 1 <= len(wrapped) <= MAX_DATA_KEY_BYTES:
        limit = f"has {len(wrapped)} bytes as the codec wraps it, must have 1 to {MAX_DATA_KEY_BYTES}"
        raise InvalidCommand("data_key", limit, "wrap the key alone")
    return wrapped


def check_request(request: object, *, field: str) -> None:
    """Raise ``InvalidCommand`` for a request that has no canonical form. ``field``: what the caller passed it as."""
    try:
        canonical_json(request)
    except InvalidJson as error:
        remedy = "pass request= with what the client sent, as JSON values"
        raise InvalidCommand(
            field, f"{error.field} {error.limit}", remedy if field == "request" else f"{error.remedy}; or {remedy}"
        ) from None


def check_seconds(field: str, seconds: object, least: float, most: float) -> None:
    """Raise ``InvalidCommand`` for what is no number of seconds from ``least`` to ``most``."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not least <= seconds <= most:  # type: ignore[operator]
        raise InvalidCommand(field, f"must be a number from {least} to {most}", "pass seconds within that range")


def check_required_text(field: str, text: object, most: int, *, remedy: str) -> None:
    """Raise ``InvalidCommand`` for what is not text of 1 to ``most`` bytes."""
    if text is None:
        raise InvalidCommand(field, "is required", remedy)
    _as_event_rule(check_text, field, text, most=most, remedy=remedy)


def check_words(field: str, text: object, most: int, *, remedy: str) -> None:
    """``check_required_text`` for what people say: blanks say nothing."""
    check_required_text(field, text, most, remedy=remedy)
    if str(text).isspace():
        raise InvalidCommand(field, "holds blanks only", remedy)


def check_expected_version(version: object) -> None:
    """Raise ``InvalidCommand`` for what is neither None nor the version of a run."""
    if version is not None and not _is_integer(version, _MAX_RUN_VERSION):
        raise InvalidCommand(
            "expected_version", "must be an integer from 1 to 2**63 - 1", "pass the version that read_run gave, or None"
        )


def cost(limit: object) -> object:
    """Return the limit of costs as a ``Decimal``, as it prints; what is no number stays for the check to refuse."""
    if isinstance(limit, int) and not isinstance(limit, bool):
        return Decimal(limit)
    return Decimal(repr(limit)) if isinstance(limit, float) else limit


def _input_json(value: object) -> bytes:
    """Compact JSON in UTF-8. Read back before it is kept, by the strict reader: it means the same to every worker."""
    try:
        text = _dumped(parse_json(value) if isinstance(value, bytes) else value)
        parse_json(text)
    except InvalidJson as error:
        raise InvalidCommand("input", error.limit, error.remedy) from None
    return text


def _dumped(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_model_values).encode()
    except TypeError as error:
        reason = str(error)  # names types, never values
    except UnicodeEncodeError:
        reason = "it holds text that is not valid Unicode"
    except ValueError as error:
        reason = _unencodable(str(error))
    except RecursionError:
        reason = f"it is nested deeper than {MAX_DEPTH}"
    raise InvalidCommand("input", f"must be a value that JSON can hold: {reason}", "convert it first")


def _unencodable(message: str) -> str:
    """Why the encoder gave up, by how its message begins; the message itself may go on with a value."""
    return next(
        (reason for start, reason in _ENCODER_REASONS.items() if message.startswith(start)), "a part of it cannot be dumped"
    )


def _model_values(value: object) -> object:
    dump: Callable[..., object] | None = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    dumped = dump(mode="json")
    check_finite(json.dumps(dumped).encode(), dump)
    return dumped


def _as_event_rule(check: Callable[..., None], *arguments: object, **options: object) -> None:
    try:
        check(*arguments, **options)
    except InvalidEvent as error:
        raise InvalidCommand(error.field, error.limit, error.remedy) from None


def _check_workflow(workflow: object) -> None:
    if not isinstance(workflow, str) or not _WORKFLOW.fullmatch(workflow):
        limit = "must be 1 to 200 characters of a-z A-Z 0-9 _ . : -"
        raise InvalidCommand("workflow", limit, "use the name that its handler is registered under")


def _check_integer(field: str, number: object, most: int) -> None:
    if not _is_integer(number, most):
        raise InvalidCommand(field, f"must be an integer from 1 to {most}", "pass one within that range")


def _is_integer(number: object, most: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= most


def _check_cost_limit(limit: object) -> None:
    if limit is None:
        return
    if not isinstance(limit, Decimal) or not limit.is_finite() or not 0 < limit <= MAX_COST_LIMIT:
        _refuse_cost("must be a number above 0 and at most 1e15")
    exponent = limit.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -MAX_COST_DECIMALS:
        _refuse_cost(f"may have {MAX_COST_DECIMALS} decimals")


def _refuse_cost(limit: str) -> NoReturn:
    raise InvalidCommand("cost_limit", limit, "pass a Decimal, or leave it out")
