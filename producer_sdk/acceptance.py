"""Accepting a command under a key: what the statement ``accept`` is given, and what its answer means.

Pure but for the pauses between two tries. The adapters do the talking.
"""

import asyncio
import hmac
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from fencepost.errors import IdempotencyConflict, IdempotencyError, InProgress, InvalidCommand, KeyExpired
from fencepost.secrets import Secrets
from producer_sdk.command import Command
from producer_sdk.command_rules import check_seconds
from producer_sdk.identity import CURRENT_PROFILE, Scope, Unkeyed, check_key, fingerprint, key_hash

__all__ = [
    "KEY_RETENTION_SECONDS",
    "MAX_COMMANDS_PER_CALL",
    "MAX_WAIT_SECONDS",
    "Acceptance",
    "Accepted",
    "Answer",
    "Patience",
    "Submission",
    "acceptances",
    "outcomes",
    "persist",
    "persist_async",
]

KEY_RETENTION_SECONDS: Final = 86_400.0
MAX_KEY_RETENTION_SECONDS: Final = 3_660 * 86_400
MAX_WAIT_SECONDS: Final = 60
MAX_COMMANDS_PER_CALL: Final = 1_000

# Between two tries of one key: long beside the statement, short beside a human's patience.
_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25

# PostgreSQL runs READ UNCOMMITTED as READ COMMITTED. In the other levels the snapshot is the transaction's.
_FRESH_SNAPSHOTS: Final = frozenset({"read committed", "read uncommitted"})


@dataclass(frozen=True, slots=True)
class Accepted:
    """The run that a command stands for: created in this transaction, or replayed, that is, found under its key."""

    outcome: Literal["created", "replayed"]
    run_id: UUID
    state: str

    @property
    def created(self) -> bool:
        """Whether this call made the run. If not, whatever belongs to the first call only must not be done again."""
        return self.outcome == "created"


@dataclass(frozen=True, slots=True)
class Submission:
    """A command with its key, for a call that accepts many."""

    command: Command
    scope: Scope
    key: str | Unkeyed


class Answer(NamedTuple):
    """The row that the statement ``accept`` gives."""

    outcome: str
    run_id: str | None
    run_state: str | None
    key_version: int | None
    profile: int | None
    schema_version: int | None
    fingerprint: bytes | None
    isolation: str


class Acceptance:
    """One command under one key: the parameters of ``accept``, and the judgement of its answer."""

    def __init__(
        self, command: Command, scope: Scope, key: str | Unkeyed, *, secrets: Secrets | None, key_retention_seconds: float
    ) -> None:
        """Raises ``KeyMissing`` and ``KeyInvalid``; ``ConfigurationError`` where a key is given and there are no secrets;
        ``TypeError`` for an argument that is of another kind, two that were exchanged say."""
        _require("command", command, Command, "Command(workflow=..., input=...)")
        _require("scope", scope, Scope, "Scope(tenant_id=..., principal=..., operation=...)")
        if secrets is not None:
            _require("secrets", secrets, Secrets, "Secrets({1: ...}, write=[1]), or leave it out to read the environment's")
        check_seconds("key_retention_seconds", key_retention_seconds, 1, MAX_KEY_RETENTION_SECONDS)
        self._command = command
        self._scope = scope
        self._key = None if isinstance(key, Unkeyed) else check_key(key)
        self._secrets = secrets
        self._retention_seconds = key_retention_seconds

    def parameters(self) -> tuple[Any, ...]:
        """The parameters of the statement, in the order of its placeholders. Ids travel as text."""
        command = self._command
        return (
            self._scope.tenant_id,
            str(command.run_id),
            command.workflow,
            command.version,
            command.topic,
            command.input,
            command.delay_seconds,
            command.max_attempts,
            command.deadline_seconds,
            command.cost_limit,
            command.traceparent,
            *self._identity(),
            command.data_key,
        )

    def judged(self, answer: Answer) -> Accepted:
        """Return what the answer says; raise ``IdempotencyConflict``, ``KeyExpired`` or ``InProgress`` where it refuses."""
        match answer:
            case Answer(outcome="created", run_id=str(run_id), run_state=str(state)):
                return Accepted("created", UUID(run_id), state)
            case Answer(outcome="found", run_id=str(run_id), run_state=str(state)):
                self._compare(answer)
                return Accepted("replayed", UUID(run_id), state)
            case Answer(outcome="expired"):
                raise KeyExpired("the key is past its retention; what it started is not started again. Use a new key")
        raise InProgress(_in_progress(answer.isolation))

    def _identity(self) -> tuple[Any, ...]:
        if self._key is None:
            return ([], [], [], 0, None, None)
        secrets, key = self._known_secrets(), self._key
        # Everyone locks the versions of a key in one order; two configurations may name them in two.
        versions = sorted(secrets.write) + [version for version in secrets.versions if version not in secrets.write]
        return (
            versions,
            [key_hash(secrets, version, self._scope, key) for version in versions],
            [self._fingerprint(version, self._command.version, CURRENT_PROFILE) for version in versions],
            len(secrets.write),
            CURRENT_PROFILE,
            self._retention_seconds,
        )

    def _compare(self, answer: Answer) -> None:
        """Under the versions that were current when the key was stored, not under today's."""
        assert answer.key_version is not None
        assert answer.schema_version is not None
        assert answer.profile is not None
        own = self._fingerprint(answer.key_version, answer.schema_version, answer.profile)
        if not hmac.compare_digest(own, bytes(answer.fingerprint or b"")):
            raise IdempotencyConflict("the key belongs to another request; use a new key for a new request")

    def _fingerprint(self, key_version: int, schema_version: int, profile: int) -> bytes:
        return fingerprint(
            self._known_secrets(),
            key_version,
            scope=self._scope,
            workflow=self._command.workflow,
            schema_version=schema_version,
            request=self._command.request,
            profile=profile,
        )

    def _known_secrets(self) -> Secrets:
        return _process_secrets() if self._secrets is None else self._secrets


class Patience:
    """How long to go on trying a key that another transaction is accepting."""

    def __init__(
        self,
        wait_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """``wait_seconds``: 0 to 60; 0 tries once. Raises ``InvalidCommand``."""
        check_seconds("wait_seconds", wait_seconds, 0, MAX_WAIT_SECONDS)
        self._clock = clock
        self._jitter = jitter
        self._ends_at = clock() + wait_seconds
        self._pause = _FIRST_PAUSE_SECONDS

    def pause_after(self, answer: Answer) -> float | None:
        """Seconds until the next try; None where there is an answer, no time is left, or a next try would see the same."""
        if answer.outcome != "in_progress" or answer.isolation not in _FRESH_SNAPSHOTS:
            return None
        left = self._ends_at - self._clock()
        if left <= 0:
            return None
        pause = self._jitter(self._pause / 2, self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return min(pause, left)


def persist(attempt: Callable[[], Answer], patience: Patience) -> Answer:
    """Try until there is an answer or the patience ends."""
    while True:
        answer = attempt()
        pause = patience.pause_after(answer)
        if pause is None:
            return answer
        time.sleep(pause)


async def persist_async(attempt: Callable[[], Awaitable[Answer]], patience: Patience) -> Answer:
    """``persist`` on an event loop."""
    while True:
        answer = await attempt()
        pause = patience.pause_after(answer)
        if pause is None:
            return answer
        await asyncio.sleep(pause)


def acceptances(
    submissions: Sequence[Submission], *, secrets: Secrets | None, key_retention_seconds: float
) -> list[Acceptance | IdempotencyError]:
    """One for each submission; a key that cannot be used takes its own place only. Raises ``InvalidCommand`` for too many."""
    if len(submissions) > MAX_COMMANDS_PER_CALL:
        limit = f"{len(submissions)} in one call, may be {MAX_COMMANDS_PER_CALL}"
        raise InvalidCommand("submissions", limit, "accept them in several calls")
    return [_acceptance(submission, secrets, key_retention_seconds) for submission in submissions]


def outcomes(acceptances: Sequence[Acceptance | IdempotencyError], answers: Sequence[Answer]) -> list[Accepted | IdempotencyError]:
    """What each submission came to. ``answers``: those of the acceptances that were sent, in their order."""
    waiting = iter(answers)
    return [one if isinstance(one, IdempotencyError) else _outcome(one, next(waiting)) for one in acceptances]


def _acceptance(submission: Submission, secrets: Secrets | None, key_retention_seconds: float) -> Acceptance | IdempotencyError:
    _require("a submission", submission, Submission, "Submission(command, scope, key)")
    try:
        return Acceptance(
            submission.command,
            submission.scope,
            submission.key,
            secrets=secrets,
            key_retention_seconds=key_retention_seconds,
        )
    except IdempotencyError as error:
        return error


def _require(name: str, value: object, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, is a {type(value).__name__}; pass {remedy}")


def _outcome(acceptance: Acceptance, answer: Answer) -> Accepted | IdempotencyError:
    try:
        return acceptance.judged(answer)
    except IdempotencyError as error:
        return error


@cache
def _process_secrets() -> Secrets:
    return Secrets.from_environment()


def _in_progress(isolation: str) -> str:
    if isolation in _FRESH_SNAPSHOTS:
        return "another transaction is accepting this key; try again"
    return (
        f"another transaction is accepting this key, or has committed what this {isolation.upper()} transaction cannot see or "
        "conflicts with; roll back, or commit, and try again in a new transaction"
    )
