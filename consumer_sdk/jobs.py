"""What a worker holds and what it reports: a claimed job, and the ways in which its attempt can end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

__all__ = ["Claim", "Completion", "Continuation", "FailedAttempt", "JobKey", "Reaped", "Release", "Settled", "Standing", "Usage"]


class JobKey(NamedTuple):
    """A run's job under one generation: what every write of its holder names."""

    run_id: UUID
    tenant_id: str
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A job leased to this worker. ``attempt_seconds`` is how long this attempt may take from its claim, None without bound.

    ``round_ended_at``: the tenant at which the workflow's round over its tenants ended, where the claim made one. ``data_key``: the
    lineage's, wrapped; None if it has none.
    """

    key: JobKey
    attempt: int
    max_attempts: int
    workflow: str
    workflow_version: int
    input: bytes
    checkpoint: bytes | None
    retry_delay_seconds: float | None
    attempt_seconds: float | None
    root_run_id: UUID
    iteration: int
    traceparent: str | None
    created_at: datetime
    is_replay: bool = False
    round_ended_at: str | None = None
    data_key: bytes | None = field(default=None, repr=False)

    @property
    def was_executed(self) -> bool:
        """Whether the ledger may hold steps of this iteration: an attempt at it, or at the run that it replays, has begun."""
        return self.key.generation > 1 or self.is_replay


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an attempt used: ``cost`` in the unit of the command's ``cost_limit``, ``detail`` any numbers worth keeping."""

    cost: float | None = None
    detail: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An attempt that succeeded. ``started_after_seconds`` counts from the claim."""

    key: JobKey
    output: bytes
    started_after_seconds: float
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """An attempt that failed. ``delay_seconds`` None: trying again cannot help, and ``reason`` says why. ``failure``: what a client
    may know of that."""

    key: JobKey
    delay_seconds: float | None
    reason: str | None
    error_class: str
    error_code: str
    checkpoint: bytes | None
    started_after_seconds: float
    usage: Usage
    failure: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """An attempt given back without a failure: the worker stops, or the run is to go on after ``delay_seconds``.

    ``parked_as``: why it goes on only when a person resumes it."""

    key: JobKey
    checkpoint: bytes | None
    started_after_seconds: float
    delay_seconds: float | None = None
    parked_as: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """An attempt that ended its run by starting the next one of its lineage, ``new_run_id``."""

    key: JobKey
    new_run_id: UUID
    workflow: str
    workflow_version: int
    input: bytes
    max_attempts: int
    deadline_seconds: float | None
    started_after_seconds: float
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What became of a job: queued again, dead (and why), or cancelled."""

    state: str
    reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaped:
    """A job that no claim could see any more. ``root_run_id`` is the lineage whose run it ended, None if it was queued again."""

    run_id: UUID
    workflow: str
    state: str
    reason: str | None
    root_run_id: UUID | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a job stands whose holder's write changed nothing.

    ``held``: still its own, so its row was locked by somebody else at that moment, or a cancellation is in the way.
    ``left_here``: it left the lease under the holder's generation: by a write of its own that seemed unanswered, or by a
    cancellation or the reaper. ``state`` is the job's.
    """

    state: str
    held: bool
    left_here: bool
    cancel_requested: bool
