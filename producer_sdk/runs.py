"""A run from outside its worker: what was read of it, what came of cancelling it, and what a refusal is called."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from fencepost.canonical_json import Json
from fencepost.codec import PayloadCodec, lineage_codec
from fencepost.errors import InvalidCommand, RunChanged, RunEnded, RunErased, RunNotFound
from producer_sdk.command_rules import check_expected_version, check_required_text, check_words
from producer_sdk.identity import MAX_TENANT_BYTES

__all__ = [
    "Cancellation",
    "Erasure",
    "Run",
    "cancel_parameters",
    "cancelled",
    "erase_parameters",
    "erased",
    "lineage_codec_from",
    "read_parameters",
    "run_from",
]

MAX_ACTOR_BYTES: Final = 256
MAX_REASON_BYTES: Final = 2_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Run:
    """A run's state and answer. ``state``: queued, running, completed, failed, cancelled or continued. Times are in UTC.

    ``version`` rises at every change of state: hand it to ``cancel`` to cancel only what you saw. ``output`` is as the
    worker left it and not in the ``repr``. ``error_code`` says why a failed run failed.
    """

    run_id: UUID
    workflow: str
    state: str
    version: int
    attempts: int
    output: bytes | None = field(repr=False)
    error_code: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None

    def json(self) -> Json:
        """The output as a JSON value; ``ValueError`` if there is none, or it is not JSON."""
        if self.output is None:
            raise ValueError(f"a run that is {self.state} has no output" if self.state != "completed" else "the run has no output")
        value: Json = json.loads(self.output)
        return value


@dataclass(frozen=True, slots=True)
class Cancellation:
    """``cancelled``: the run has ended and no attempt begins. ``requested``: a worker holds it, is told, and the run ends as
    cancelled; what the worker finishes from now on is refused."""

    outcome: Literal["cancelled", "requested"]
    state: str
    version: int


@dataclass(frozen=True, slots=True)
class Erasure:
    """``erased``: of the lineage's ``runs`` no payload is left. ``already_erased``: there was nothing to do."""

    outcome: Literal["erased", "already_erased"]
    runs: int


def read_parameters(run_id: UUID, tenant_id: str) -> tuple[Any, ...]:
    """The parameters of the statement ``read_run``."""
    check_required_text("tenant_id", tenant_id, MAX_TENANT_BYTES, remedy="pass the id of the run's tenant")
    return (tenant_id, _id_text(run_id))


def cancel_parameters(run_id: UUID, *, tenant_id: str, actor: str, reason: str, expected_version: int | None) -> tuple[Any, ...]:
    """The parameters of the statement ``cancel_run``."""
    check_expected_version(expected_version)
    return (*erase_parameters(run_id, tenant_id=tenant_id, actor=actor, reason=reason), expected_version)


def erase_parameters(run_id: UUID, *, tenant_id: str, actor: str, reason: str) -> tuple[Any, ...]:
    """The parameters of the statement ``erase_lineage``."""
    check_words("actor", actor, MAX_ACTOR_BYTES, remedy="say who acts")
    check_words("reason", reason, MAX_REASON_BYTES, remedy="say why")
    return (*read_parameters(run_id, tenant_id), actor, reason)


def run_from(run_id: UUID, row: Sequence[Any]) -> Run:
    """The run that the statement ``read_run`` found; raise ``RunNotFound`` where it found none."""
    workflow, state, version, attempts, output, error_code, *times = row
    if state is None:
        raise _not_found()
    created_at, started_at, finished_at, cancel_requested_at = map(_time, times)
    assert created_at is not None
    return Run(
        run_id=run_id,
        workflow=workflow,
        state=state,
        version=version,
        attempts=attempts,
        output=None if output is None else bytes(output),
        error_code=error_code,
        created_at=created_at,
        started_at=started_at,
        finished_at=finished_at,
        cancel_requested_at=cancel_requested_at,
    )


def cancelled(row: Sequence[Any]) -> Cancellation:
    """What the statement ``cancel_run`` did; raise ``RunNotFound``, ``RunChanged`` or ``RunEnded`` where it did nothing."""
    match tuple(row):
        case ("cancelled" | "requested" as outcome, state, version):
            return Cancellation(outcome, state, version)
        case ("changed", _, version):
            raise RunChanged(f"the run has version {version} by now; read it again and decide anew")
        case ("ended", state, _):
            raise RunEnded(state)
    raise _not_found()


def erased(row: Sequence[Any]) -> Erasure:
    """What the statement ``erase_lineage`` did; raise ``RunNotFound`` where it found no run."""
    match tuple(row):
        case ("erased" | "already_erased" as outcome, runs):
            return Erasure(outcome, runs)
    raise _not_found()


def lineage_codec_from(row: Sequence[Any], codec: PayloadCodec) -> PayloadCodec:
    """The codec of the lineage whose key the statement ``read_data_key`` found; raise ``RunNotFound`` or ``RunErased``."""
    match tuple(row):
        case ("found", wrapped):
            return lineage_codec(codec, None if wrapped is None else bytes(wrapped))
        case ("erased", _):
            raise RunErased("the run's lineage was erased; nobody can read what was encoded for it")
    raise _not_found()


def _not_found() -> RunNotFound:
    return RunNotFound("this tenant has no such run")


def _id_text(run_id: object) -> str:
    if not isinstance(run_id, UUID):
        raise InvalidCommand("run_id", "must be a uuid.UUID", "parse it first, and answer as for an unknown run if that fails")
    return str(run_id)


def _time(microseconds: int | None) -> datetime | None:
    # An integer, because drivers differ in the time zone that they give a timestamp.
    return None if microseconds is None else _EPOCH + timedelta(microseconds=microseconds)
