"""Starts an operation, once per key: looks the key up without a transaction, and runs the handler inside the one that accepts.

Nothing is answered before the COMMIT. At the deadline a start whose COMMIT was not sent is cancelled and rolled back; one whose
COMMIT was sent goes on by itself, and its client is told that nobody knows yet.
"""

import asyncio
import contextlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import asyncpg
import structlog
from starlette.background import BackgroundTasks

from fencepost.cancelling import cancelled
from fencepost.clock import lease_clock
from fencepost.errors import ConfigurationError, InProgress, InvalidCommand, KeyExpired, TransientError
from fencepost.finite import finite_json
from fencepost.secrets import Secrets
from fencepost.workflows import Workflow
from producer_sdk.command import Command
from producer_sdk.http.operation import START_MARGIN_SECONDS, Call, Started
from producer_sdk.http.principal import Principal
from producer_sdk.http.problems import Refused
from producer_sdk.http.store import FIND_KEY, START_LINEAGE, FoundKey, LineageKey, LookedUp, Standing, found_key
from producer_sdk.http.transactions import CommitUnknown, OpenTransaction, is_passing
from producer_sdk.identity import UNKEYED, Scope, Unkeyed, fingerprint, key_hash

if TYPE_CHECKING:
    from producer_sdk.http.runtime import Runtime

__all__ = ["Accepting", "NotKnown", "Request"]

_log = structlog.get_logger(__name__)

# What follows is in time for the request's deadline.
_CANCEL_SECONDS: Final = START_MARGIN_SECONDS / 2


class NotKnown(Exception):
    """Whether the operation has begun is not known yet: another request is at it, or the deadline came first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request that fits its schema. ``bound``: what its key is bound to. ``body_bytes``: of the body as it came. ``read``: what
    the reply made of the headers, ``headers`` and ``background``: what dependencies have set."""

    call: Call
    principal: Principal
    key: str | None
    read: Any
    bound: Any
    arguments: Mapping[str, Any]
    body_bytes: int
    headers: tuple[tuple[bytes, bytes], ...]
    background: BackgroundTasks | None = None


class _Identity:
    """A request's key and fingerprint, under whichever versions of the secrets."""

    def __init__(self, request: Request, secrets: Secrets) -> None:
        self._request = request
        self._secrets = secrets
        self.scope = _scope(request)
        # Everyone locks the versions of a key in one order; two configurations may name them in two.
        self.versions = sorted(secrets.write) + [version for version in secrets.versions if version not in secrets.write]
        self.hashes: Sequence[bytes] = (
            [] if request.key is None else [key_hash(secrets, version, self.scope, request.key) for version in self.versions]
        )
        self.written = len(secrets.write)

    @property
    def parameters(self) -> tuple[str, Sequence[int], Sequence[bytes], int]:
        return (self.scope.tenant_id, self.versions, self.hashes, self.written)

    def check(self, found: FoundKey) -> None:
        """Raise ``Refused`` if the key belongs to another request, under the versions that it was stored with."""
        assert found.key_version is not None
        assert found.schema_version is not None
        assert found.profile is not None
        own = fingerprint(
            self._secrets,
            found.key_version,
            scope=self.scope,
            workflow=self._request.call.operation.workflow.name,
            schema_version=found.schema_version,
            request=self._request.bound,
            profile=found.profile,
        )
        if not hmac.compare_digest(own, found.fingerprint or b""):
            raise Refused("idempotency-key-reused")


def _scope(request: Request) -> Scope:
    principal = request.principal
    return Scope(tenant_id=principal.tenant_id, principal=principal.id, operation=request.call.scope_operation)


class _Start:
    """One start on its way. ``committing``: its COMMIT was sent, or is about to be. ``given_up``: it will not be."""

    committing = False
    given_up = False
    transaction: OpenTransaction | None = None


class Accepting:
    """Starts of one process. Those of one key are coalesced: while one is on its way, the others do not touch the database."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        # One connection stays free for who reads for all that wait; a burst of look-ups waits here, as long as its requests may.
        self._looking = asyncio.Semaphore(runtime.settings.routes_read_connections - 1)
        self._on_their_way: set[bytes] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def look_up(self, request: Request) -> Started | None:
        """The lineage of the request's key, None if there is none. Raises ``Refused`` and ``TransientError``."""
        if request.key is None:
            return None
        async with self._looking:
            return await self._looked_up(request, _Identity(request, self._runtime.secrets))

    async def start(self, request: Request) -> Started:
        """The lineage that the request starts, or another one has started meanwhile. Raises ``Refused``, ``NotKnown``,
        ``TransientError``, and what the handler raises, after which nothing is stored."""
        identity = _Identity(request, self._runtime.secrets)
        key = identity.hashes[0] if identity.hashes else b""
        if key and key in self._on_their_way:
            raise NotKnown
        self._check_new(request)
        with self._on_the_way(key):
            return await self._supervised(request, identity)

    async def finish(self, seconds: float) -> None:
        """Wait for starts whose COMMIT was sent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _looked_up(self, request: Request, identity: _Identity) -> Started | None:
        try:
            looked_up = await self._runtime.store.look_up(*identity.parameters)
        except (TransientError, ConfigurationError, asyncpg.PostgresError) as error:
            # Whose status cannot be read may still be found: it is pending then, and not unavailable.
            found = await self._found(identity)
            if found is None:
                raise _as_ours(error) from error
            _log.warning("lineage_not_read", error=type(error).__name__)
            looked_up = LookedUp(found, None)
        return self._known(request, identity, looked_up)

    async def _found(self, identity: _Identity) -> FoundKey | None:
        with contextlib.suppress(TransientError, ConfigurationError, asyncpg.PostgresError):
            found = await self._runtime.store.find_key(*identity.parameters)
            return found if found.outcome == "found" else None
        return None

    def _known(self, request: Request, identity: _Identity, looked_up: LookedUp) -> Started | None:
        match looked_up.found:
            case FoundKey(outcome="found") as found:
                identity.check(found)
                return self._following(request, found, looked_up.standing)
            case FoundKey(outcome="expired"):
                raise Refused("idempotency-key-expired")
            case FoundKey(outcome="erased"):
                raise Refused("erased")
        return None

    def _following(self, request: Request, found: FoundKey, standing: Standing | None) -> Started:
        assert found.root_run_id is not None
        if found.monitor_id is None:
            raise Refused("result-unavailable")  # a run of the key that no durable route has started
        return self._of(request, found.root_run_id, found.monitor_id, replayed=True, standing=standing)

    def _of(self, request: Request, root: UUID, monitor_id: UUID, *, replayed: bool, standing: Standing | None = None) -> Started:
        return Started(
            call=request.call,
            runtime=self._runtime,
            principal=request.principal,
            key=LineageKey(root, request.principal.tenant_id),
            monitor_id=monitor_id,
            replayed=replayed,
            standing=standing,
            read=request.read,
            headers=request.headers,
        )

    def _check_new(self, request: Request) -> None:
        """What is asked of a request that would start something; whoever comes again for what was accepted passes by."""
        operation = request.call.operation
        if operation.max_input_bytes is not None and request.body_bytes > operation.max_input_bytes:
            raise Refused("input-too-large")
        seconds = self._runtime.pace.seconds_until(operation.name, request.principal, operation.starts_per_minute)
        if seconds > 0:
            raise Refused("rate-limited", retry_after=int(seconds) + 1)

    @contextlib.contextmanager
    def _on_the_way(self, key: bytes) -> Iterator[None]:
        self._on_their_way.add(key)
        try:
            yield
        finally:
            self._on_their_way.discard(key)

    async def _supervised(self, request: Request, identity: _Identity) -> Started:
        start = _Start()
        task = asyncio.create_task(self._start(request, identity, start))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task}, timeout=max(request.call.start_until - lease_clock(), 0))
            if not task.done() and not start.committing:
                start.given_up = True
                await self._end(task, start, request)
        except asyncio.CancelledError:
            if not start.committing:
                start.given_up = True  # now, and not when the task below has its turn
                ending = asyncio.create_task(self._end(task, start, request))
                self._tasks.add(ending)
                ending.add_done_callback(self._tasks.discard)
            task.add_done_callback(_retrieve)
            raise
        if not task.done() or task.cancelled():
            task.add_done_callback(_retrieve)
            raise NotKnown
        return task.result()

    async def _end(self, task: "asyncio.Task[Started]", start: _Start, request: Request) -> None:
        """Of a start that does not end, Fencepost's connection is taken away: there are few, and others wait for them."""
        if await cancelled(task, _CANCEL_SECONDS):
            return
        if start.transaction is not None:
            start.transaction.abandon()
        remedy = "its handler catches its own cancellation: let asyncio.CancelledError pass"
        _log.warning("start_does_not_end", route=request.call.operation.name, remedy=remedy)

    async def _start(self, request: Request, identity: _Identity, start: _Start) -> Started:
        async with self._runtime.transactions.begin() as transaction:
            start.transaction = transaction
            found = await self._reserved(request, identity, transaction)
            if found is not None:
                return found
            command = await self._command(request, transaction)
            key: str | Unkeyed = UNKEYED if request.key is None else request.key
            try:
                await transaction.accept(
                    command,
                    identity.scope,
                    key,
                    secrets=self._runtime.secrets,
                    key_retention_seconds=request.call.operation.key_retention_seconds,
                )
            except (InProgress, KeyExpired):
                raise NotKnown from None
            monitor_id = uuid4()
            await transaction.row(START_LINEAGE, self._lineage(request, command.run_id, monitor_id))
            if start.given_up:  # the handler let its cancellation pass by
                raise NotKnown
            start.committing = True
            try:
                await transaction.commit()
            except CommitUnknown as error:
                _log.warning("commit_unknown", route=request.call.operation.name, error=type(error.__cause__).__name__)
                raise NotKnown from None
        self._runtime.metrics.started(request.call.operation.name)
        return self._of(request, command.run_id, monitor_id, replayed=False)

    async def _reserved(self, request: Request, identity: _Identity, transaction: OpenTransaction) -> Started | None:
        """Keep the key for this transaction. What another one has started meanwhile, or None."""
        if request.key is None:
            return None
        found = found_key(await transaction.row(FIND_KEY, (*identity.parameters, True)))
        if found.outcome == "in_progress":
            raise NotKnown
        return self._known(request, identity, LookedUp(found, None))

    async def _command(self, request: Request, transaction: OpenTransaction) -> Command:
        operation = request.call.operation
        arguments = dict(request.arguments)
        if operation.transaction_parameter is not None:
            arguments[operation.transaction_parameter] = transaction.tx
        try:
            given = await operation.handler(**arguments)
        except Exception as error:
            if is_passing(error):
                raise TransientError(f"handler: {type(error).__name__}") from error
            raise
        workflow = operation.workflow
        written = _input(workflow, given)
        try:
            return Command(
                workflow=workflow.name,
                version=workflow.version,
                input=written,
                request=request.bound,
                max_attempts=workflow.max_attempts,
                deadline_seconds=workflow.deadline_seconds,
                codec=self._runtime.codec,
            )
        except InvalidCommand as error:
            if error.field != "input":
                raise
            _log.warning("input_refused", route=operation.name, limit=error.limit)
            raise Refused("input-too-large") from None

    def _lineage(self, request: Request, run_id: UUID, monitor_id: UUID) -> tuple[Any, ...]:
        principal, secrets = request.principal, self._runtime.secrets
        version = secrets.write[0]
        digest = principal.digest(secrets, version)
        return (principal.tenant_id, str(run_id), str(monitor_id), request.call.scope_operation, digest, version)


def _input(workflow: Workflow, given: object) -> bytes:
    try:
        return finite_json(workflow.input, workflow.input.validate_python(given))
    except ValueError:
        # Without its cause: that error quotes the value.
        raise TypeError(f"the handler returned a {type(given).__name__}, which is no input of workflow {workflow.name}") from None


def _as_ours(error: Exception) -> Exception:
    if isinstance(error, asyncpg.PostgresError):
        return TransientError(f"look_up: {error.sqlstate}")
    return error


def _retrieve(task: "asyncio.Task[Started]") -> None:
    """A start that nobody waits for any more: its failure is told here."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, NotKnown):
        _log.warning("late_start_failed", error=type(error).__name__)
