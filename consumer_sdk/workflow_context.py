"""What a workflow sees of its run: everything that a handler sees, and steps, timers, chunks and continue-as-new.

A workflow is executed from its beginning at every attempt. What a step returned is kept, so the step is not called again; a
workflow that decides by its input and by what its steps returned goes the same way each time. Where it does not, or where its
code was changed under the run, a step meets other arguments than those that are kept: the run is parked for a person, nothing is
guessed.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar, TypeVarTuple, Unpack, cast

from consumer_sdk.context import AttemptState, RunContext, RunWriter
from consumer_sdk.decision import Ended, Left, Raised, Returned
from consumer_sdk.effects import Call, CallLimits
from consumer_sdk.encoding import MAX_OUTPUT_BYTES, encoded_as
from consumer_sdk.leaving import Continuing, GivenBack, Leaving
from consumer_sdk.steps import (
    MAX_RESULT_BYTES,
    KeptStep,
    StepKey,
    Timer,
    canonical_arguments,
    decoded_result,
    encoded_result,
    step_fingerprint,
)
from fencepost.errors import ConfigurationError, InvalidCommand, WorkflowChanged
from fencepost.secrets import Secrets
from fencepost.workflows import Workflow, WorkflowFunction, Workflows

__all__ = ["Publishing", "StepWriter", "WorkflowContext"]

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

#: A sleep up to this is waited for in the process; a longer one lets go of the run.
_SHORT_SECONDS: Final = 5.0
_MOST_SECONDS: Final = 366 * 86_400.0
_MOST_NAME_BYTES: Final = 256
_MOST_INPUT_BYTES: Final = 1_000_000
_NAME: Final = re.compile("[^\0\ud800-\udfff]+")
_OURS: Final = "fencepost."
_TIMER: Final = "fencepost.sleep"
_DEFAULT_LIMITS: Final = CallLimits()
_SWALLOWED: Final = InvalidCommand("workflow", "must let pass what sleep and continue_as_new raise", "catch narrower errors")
_MOST_CAUSES: Final = 20


class StepWriter(Protocol):
    """The worker, as far as a workflow's steps need it."""

    secrets: Secrets

    async def read(self, state: AttemptState, key: StepKey) -> KeptStep | None: ...
    async def record(self, state: AttemptState, key: StepKey, kept: KeptStep) -> None: ...
    async def begin_timer(
        self, state: AttemptState, key: StepKey, *, fingerprint: bytes, version: int, seconds: float
    ) -> Timer: ...


class Publishing(Protocol):
    """Where a workflow's chunks go."""

    async def begin(self) -> None: ...
    async def publish(self, step: str, occurrence: int, chunk: object) -> None: ...
    async def carry(self, step: str, occurrence: int) -> None: ...
    def emit(self, step: str, occurrence: int, chunk: object) -> None: ...


class _Place(NamedTuple):
    """The step that is being executed; no step has an empty name."""

    step: str
    occurrence: int


_OUTSIDE: Final = _Place("", 0)
_place: ContextVar[_Place] = ContextVar("fencepost_step", default=_OUTSIDE)


class WorkflowContext(RunContext):
    """One attempt of one run of a workflow."""

    def __init__(
        self,
        state: AttemptState,
        writer: RunWriter,
        *,
        workflow: Workflow,
        registry: Workflows,
        steps: StepWriter,
        publisher: Publishing,
    ) -> None:
        super().__init__(state, writer)
        self._workflow = workflow
        self._registry = registry
        self._steps = steps
        self._publisher = publisher
        self._calls: dict[str, int] = {}
        self._ended_by: Leaving | WorkflowChanged | None = None

    @property
    def iteration(self) -> int:
        """How often this lineage has continued as new: 0 in its first run, and in that run's replays."""
        return self._state.claim.iteration

    def step(
        self, name: str, function: Callable[[Unpack[_Arguments]], Awaitable[_Result]], *arguments: *_Arguments
    ) -> Coroutine[Any, Any, _Result]:
        """Call ``function(*arguments)`` and keep what it returns: a later attempt gets that, and does not call it again.

        Arguments and result must have a form in JSON. Annotate what the function returns, and a later attempt gets it as that type.
        The same name may be used again: the first call, the second and so on are told apart by their order, which must be the same
        at every attempt. What the function raises is raised here and not kept: the next attempt calls it again. Outside effects in
        it are made by ``once``.

        Raises ``WorkflowChanged`` where a result is kept for other arguments, ``InvalidCommand`` for a name, arguments or a result
        that cannot be kept, and within another step; ``LeaseLost``.
        """
        place = self._next_place(name)
        return self._stepped(place, function, arguments)

    async def sleep(self, seconds: float) -> None:
        """Go on after so many seconds, up to 366 days. Beyond 5 the attempt ends and costs nothing: the run waits in the database,
        and whoever claims it then executes the workflow anew up to here. Raises ``InvalidCommand``, also within a step."""
        if type(seconds) not in (int, float) or not 0 <= seconds <= _MOST_SECONDS:
            raise InvalidCommand("seconds", f"must be from 0 to {_MOST_SECONDS:g} (366 days)", "continue as new for longer chains")
        place = self._counted(_TIMER)
        left: float = seconds
        if seconds > _SHORT_SECONDS:
            left = await self._left_of_timer(place, seconds)
        if left > _SHORT_SECONDS:
            self._leave(Leaving(GivenBack(seconds=left)))
        await asyncio.sleep(max(left, 0.0))

    def continue_as_new(self, input: object, workflow: WorkflowFunction | None = None) -> NoReturn:  # noqa: A002 - the workflow's own word
        """End this run, and begin the next one of the lineage with another input: its steps and effects happen anew.

        It executes this version of this workflow; ``workflow`` names another function of the same registry. Let what is raised here
        pass. Raises ``InvalidCommand`` for an input that does not fit the workflow, and within a step or a transaction.
        """
        self._refuse_after_completion()
        if _place.get() is not _OUTSIDE or self._in_transaction:
            raise InvalidCommand("continue_as_new", "ends the run, which a step or a transaction cannot", "call it after that")
        following = self._workflow if workflow is None else self._registry.newest(workflow)
        payload = encoded_as("input", following.input, input, most=_MOST_INPUT_BYTES)
        self._leave(Leaving(Continuing(workflow=following, input=payload)))

    async def publish(self, chunk: object) -> None:
        """Store a chunk of the run's stream: a value that JSON can hold, or a pydantic model. Raises ``LeaseLost``,
        ``InvalidCommand`` for one that is too long."""
        self._refuse_after_completion()
        await self._publisher.publish(*_place.get(), chunk)

    def emit(self, chunk: object) -> None:
        """Send a live chunk to whoever listens now; it is not stored, and may be lost."""
        self._refuse_after_completion()
        self._publisher.emit(*_place.get(), chunk)

    async def once(
        self,
        operation: str,
        *,
        request: object,
        call: Call,
        limits: CallLimits = _DEFAULT_LIMITS,
        step: str | None = None,
        occurrence: int | None = None,
    ) -> object:
        """As a handler's, for this run's iteration; step and occurrence are those of the step that is being executed."""
        if operation.startswith(_OURS):
            raise InvalidCommand("operation", f"must not begin with {_OURS}", "name what is done, for example card.charge")
        place = _place.get()
        return await super().once(
            operation,
            request=request,
            call=call,
            limits=limits,
            step=step or place.step or None,
            occurrence=place.occurrence if occurrence is None else occurrence,
        )

    async def execute(self, function: WorkflowFunction, value: object) -> object:
        """Execute the workflow's function from its beginning. For the worker."""
        if self._state.claim.was_executed or self.iteration:
            await self._publisher.begin()  # the lineage may have published, and readers clear what comes anew
        return await function(self, value)

    def ending(self, ended: Ended) -> Ended:
        """How the attempt ended, whatever the workflow's function made of what took it out."""
        by = self._ended_by
        if isinstance(by, WorkflowChanged):
            return Raised(by)
        if by is None or not isinstance(ended, Returned | Raised):
            return ended
        if isinstance(ended, Returned):
            return Raised(_SWALLOWED)
        left, others = _parted(ended.error)
        if left and others is None:
            return Left(by.way)
        return Raised(_SWALLOWED if others is None or _replaces(others, by) else others)

    def _encoded_output(self, output: object) -> bytes:
        return encoded_as("output", self._workflow.result, output, most=MAX_OUTPUT_BYTES)

    def _refuse_after_completion(self) -> None:
        super()._refuse_after_completion()
        if self._ended_by is not None:
            raise self._ended_by  # it was caught on its way out, or this is a finally: the workflow is leaving all the same

    def _leave(self, leaving: Leaving) -> NoReturn:
        self._ended_by = leaving
        raise leaving

    def _changed(self, what: str) -> NoReturn:
        self._ended_by = WorkflowChanged(f"{what}: the workflow is not what the run began under; the run is parked")
        raise self._ended_by

    def _next_place(self, name: str) -> _Place:
        if not 1 <= len(name.encode(errors="replace")) <= _MOST_NAME_BYTES or not _NAME.fullmatch(name):
            raise InvalidCommand("step", f"must be a name of 1 to {_MOST_NAME_BYTES} bytes", "use a short, stable name")
        if name.startswith(_OURS):
            raise InvalidCommand("step", f"must not begin with {_OURS}", "use another name")
        return self._counted(name)

    def _counted(self, name: str) -> _Place:
        self._refuse_after_completion()
        if _place.get() is not _OUTSIDE:
            raise InvalidCommand(
                "step", "may hold no other step, and no sleep", "call the function itself, or make it a step after this"
            )
        occurrence = self._calls.get(name, 0)
        self._calls[name] = occurrence + 1
        return _Place(name, occurrence)

    def _key(self, place: _Place) -> StepKey:
        claim = self._state.claim
        return StepKey(str(claim.root_run_id), claim.key.tenant_id, claim.iteration, *place)

    async def _stepped(self, place: _Place, function: Callable[..., Awaitable[_Result]], arguments: tuple[object, ...]) -> _Result:
        self._refuse_after_completion()
        key, canonical = self._key(place), canonical_arguments(arguments)
        if self._state.claim.was_executed:
            kept = await self._steps.read(self._state, key)
            if kept is not None:
                result = self._remembered(place, function, canonical, kept)
                await self._publisher.carry(*place)
                return result
        payload, read = encoded_result(place.step, function, await self._called(place, function, arguments))
        await self._record(key, canonical, payload)
        self.progress()
        return cast("_Result", read)

    async def _called(self, place: _Place, function: Callable[..., Awaitable[_Result]], arguments: tuple[object, ...]) -> _Result:
        token = _place.set(place)
        try:
            return await function(*arguments)
        finally:
            _place.reset(token)

    async def _record(self, key: StepKey, canonical: bytes, payload: bytes) -> None:
        self._refuse_after_completion()
        stored = self._state.codec.encode(payload)
        if len(stored) > MAX_RESULT_BYTES:
            limit = f"may have at most {MAX_RESULT_BYTES} bytes"
            raise InvalidCommand(f"result of step {key.step}", limit, "store it elsewhere and return a reference")
        version = self._steps.secrets.write[0]
        fingerprint = step_fingerprint(self._steps.secrets, version, canonical)
        try:
            await self._steps.record(self._state, key, KeptStep(fingerprint, version, stored))
        except WorkflowChanged as changed:
            self._ended_by = changed
            raise

    def _remembered(self, place: _Place, function: Callable[..., Awaitable[_Result]], canonical: bytes, kept: KeptStep) -> _Result:
        self._require_same(place, kept.fingerprint, kept.fingerprint_version, canonical)
        try:
            if kept.result is None:
                raise ValueError
            result = decoded_result(function, self._state.codec.decode(kept.result))
        except Exception:  # noqa: BLE001 - a boundary: codec and model are the author's
            self._changed(f"step {place.step}: what is kept cannot be read")
        return cast("_Result", result)

    def _require_same(self, place: _Place, fingerprint: bytes, version: int, canonical: bytes) -> None:
        try:
            same = hmac.compare_digest(fingerprint, step_fingerprint(self._steps.secrets, version, canonical))
        except ConfigurationError:
            self._changed(f"step {place.step}: kept under a secret of version {version}, which this worker does not have")
        if not same:
            self._changed(f"step {place.step}: other arguments than at an earlier attempt")

    async def _left_of_timer(self, place: _Place, seconds: float) -> float:
        secrets, canonical = self._steps.secrets, canonical_arguments([seconds])
        version = secrets.write[0]
        timer = await self._steps.begin_timer(
            self._state,
            self._key(place),
            fingerprint=step_fingerprint(secrets, version, canonical),
            version=version,
            seconds=seconds,
        )
        self._require_same(place, timer.fingerprint, timer.fingerprint_version, canonical)
        return timer.seconds_left


def _parted(error: BaseException) -> tuple[bool, BaseException | None]:
    """Whether the workflow is leaving by the error, and what else is in it: branches of a TaskGroup end together."""
    if isinstance(error, BaseExceptionGroup):
        leaving, others = error.split(Leaving)
        return leaving is not None, others
    return (True, None) if isinstance(error, Leaving) else (False, error)


def _replaces(error: BaseException, leaving: Leaving) -> bool:
    """Whether the error was raised where the leaving was caught."""
    link: BaseException | None = error
    for _ in range(_MOST_CAUSES):  # which also ends a circle
        if link is None or link is leaving:
            break
        link = link.__cause__ or link.__context__
    return link is leaving
