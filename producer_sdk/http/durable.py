"""``Durable``: what an application declares its workflows and durable routes with, and what it installs into FastAPI."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import structlog
from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter

from fencepost.codec import PLAIN, PayloadCodec
from fencepost.errors import ConfigurationError, InvalidInput, TransientError
from fencepost.registration import WORKFLOW
from fencepost.secrets import Secrets
from fencepost.workflows import WorkflowFunction, Workflows
from producer_sdk.acceptance import KEY_RETENTION_SECONDS
from producer_sdk.http.metrics import RouteMetrics
from producer_sdk.http.operation import Operation, Reply, Site, check_between, check_handler
from producer_sdk.http.principal import Principal
from producer_sdk.http.routing import OPERATION, DurableRoute
from producer_sdk.http.runtime import Runtime
from producer_sdk.http.settings import RouteSettings, load_route_settings
from producer_sdk.http.stream_route import DEFAULT_STREAM_SECONDS, StreamReply
from producer_sdk.http.transactions import IN_TRANSACTION, Transactions
from producer_sdk.http.waiting import JsonReply
from producer_sdk.identity import Scope

__all__ = ["Durable"]

_log = structlog.get_logger(__name__)

_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_MOST_SECONDS: Final = 3600.0
_MOST_RETENTION_SECONDS: Final = 3_660 * 86_400.0


class Durable(Workflows):
    """A registry of workflows, and of the routes that start them.

    ``principal``: a FastAPI dependency that returns the ``Principal`` of a request; routes, monitor and cancel all use it.
    ``prefix``: of the monitor's paths. ``transactions``: where a handler's transaction comes from; by default a pool of
    Fencepost's own. ``settings`` and ``secrets`` default to the environment's, read at the application's start-up.
    """

    def __init__(
        self,
        *,
        principal: Callable[..., Any],
        prefix: str = "",
        transactions: Transactions | None = None,
        codec: PayloadCodec = PLAIN,
        settings: RouteSettings | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        super().__init__(codec)
        if not callable(principal):
            raise ConfigurationError("Durable(principal=...) must be a FastAPI dependency that returns a Principal")
        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise ConfigurationError("Durable(prefix=...) must begin with / and not end with it")
        self.principal = principal
        self.site = Site(prefix=prefix, metrics=RouteMetrics())
        self.operations: dict[str, Operation] = {}
        self.cached: frozenset[str] = frozenset()
        self.collected: frozenset[str] = frozenset()
        self.runtime: Runtime | None = None
        self.started = False
        self._told = False
        self._transactions = transactions
        self._settings = settings
        self._secrets = secrets

    @property
    def registry(self) -> CollectorRegistry:
        """The metrics of the durable routes, for the application to serve."""
        return self.site.metrics.registry

    def router(self, **options: Any) -> APIRouter:
        """An ``APIRouter`` for durable routes; others are served on it as FastAPI serves them."""
        return APIRouter(route_class=DurableRoute, **options)

    def route(
        self,
        workflow: WorkflowFunction,
        *,
        name: str | None = None,
        wait_seconds: float = 10.0,
        request_deadline_seconds: float | None = None,
        key_required: bool | None = None,
        key_retention_seconds: float = KEY_RETENTION_SECONDS,
        max_input_bytes: int | None = None,
        starts_per_minute: int | None = None,
        strict: bool = False,
        run_id_header: bool = False,
        form_field: str | None = None,
        present: Callable[[Any], Any] | None = None,
    ) -> Callable[[_Handler], _Handler]:
        """Make the decorated handler a durable route: ``@router.post(...)`` above, ``@durable.route(workflow)`` below.

        ``name``: the stable part of its keys' scope; the handler's name by default. ``wait_seconds``: how long a request waits for
        its result, from its arrival on. ``request_deadline_seconds``: when the server or a proxy gives a request up; the setting's
        by default. ``key_required`` False: each request without a key starts a run of its own; by default POST and PATCH need one.
        ``key_retention_seconds``: after it a key answers 410. ``max_input_bytes``: of a body that starts something.
        ``starts_per_minute``: of one principal, in one process; beyond it 429. ``strict``: 409 in place of 202 while the run is
        not finished. ``run_id_header``: answers name the run. ``form_field``: HTML forms may send the request, with a one-time key
        in this field. ``present``: shapes the result, once, when it is first answered; its annotation is the success model.

        Raises ``ConfigurationError`` for what cannot work.
        """
        return self.operation(
            workflow,
            JsonReply(),
            name=name,
            wait_seconds=wait_seconds,
            request_deadline_seconds=request_deadline_seconds,
            key_required=key_required,
            key_retention_seconds=key_retention_seconds,
            max_input_bytes=max_input_bytes,
            starts_per_minute=starts_per_minute,
            strict=strict,
            run_id_header=run_id_header,
            form_field=form_field,
            present=present,
        )

    def stream(
        self,
        workflow: WorkflowFunction,
        *,
        stream_seconds: float = DEFAULT_STREAM_SECONDS,
        live: bool = False,
        name: str | None = None,
        request_deadline_seconds: float | None = None,
        key_required: bool | None = None,
        key_retention_seconds: float = KEY_RETENTION_SECONDS,
        max_input_bytes: int | None = None,
        starts_per_minute: int | None = None,
        strict: bool = False,
        run_id_header: bool = False,
        present: Callable[[Any], Any] | None = None,
    ) -> Callable[[_Handler], _Handler]:
        """As ``route``, and the answer is a resumable stream of Server-Sent Events: stored chunks, then one final frame.

        ``stream_seconds``: after it the stream ends with a `pending` frame. ``live``: with the live chunks of the run, every one
        of which the caller may then see.
        """
        return self.operation(
            workflow,
            StreamReply(stream_seconds=stream_seconds, live=live),
            name=name,
            wait_seconds=0.0,
            request_deadline_seconds=request_deadline_seconds,
            key_required=key_required,
            key_retention_seconds=key_retention_seconds,
            max_input_bytes=max_input_bytes,
            starts_per_minute=starts_per_minute,
            strict=strict,
            run_id_header=run_id_header,
            form_field=None,
            present=present,
        )

    def operation(
        self, workflow: WorkflowFunction, reply: Reply, *, name: str | None, present: Callable[[Any], Any] | None, **options: Any
    ) -> Callable[[_Handler], _Handler]:
        """``route`` and ``stream`` with the reply of their own."""
        registered = self.newest(workflow)

        def register(handler: _Handler) -> _Handler:
            chosen = str(name or getattr(handler, "__name__", ""))
            what = f"route {chosen}"
            if not WORKFLOW.fullmatch(chosen):
                raise ConfigurationError(f"{what}: a name is 1 to 200 characters of a-z A-Z 0-9 _ . : -")
            if chosen in self.operations:
                raise ConfigurationError(f"{what}: the name is taken; keys of two routes would run together. Pass name=")
            check_handler(what, handler)
            _check_options(what, options)
            signature = inspect.signature(handler, eval_str=True)
            transaction_parameter = _transaction_parameter(what, signature)
            shown = registered.result_type if present is None else _presented(what, present)
            operation = Operation(
                name=chosen,
                workflow=registered,
                handler=handler,
                arguments=frozenset(signature.parameters) - {transaction_parameter},
                transaction_parameter=transaction_parameter,
                reply=reply,
                present=present,
                presented=None if present is None else TypeAdapter(shown),
                **options,
            )
            self.operations[chosen] = operation
            endpoint: _Handler = self._endpoint(handler, operation, signature, shown)
            return endpoint

        return register

    def _endpoint(self, handler: Any, operation: Operation, signature: inspect.Signature, shown: Any) -> Any:
        """What FastAPI sees: the handler's own parameters but the transaction, and the success model. It is never called."""

        async def endpoint(**_: Any) -> None:
            raise ConfigurationError(f"route {operation.name}: put it on durable.router(), whose route class knows what to do")

        parameters = [p for p in signature.parameters.values() if p.name != operation.transaction_parameter]
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(endpoint, attribute, getattr(handler, attribute))
        endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters], return_annotation=shown
        )
        endpoint.__annotations__ = {"return": shown}
        setattr(endpoint, OPERATION, (self, operation))
        return endpoint

    def deadline_seconds(self, operation: Operation) -> float:
        """When a request of the operation is given up by whoever serves it, from its arrival on."""
        if operation.request_deadline_seconds is not None:
            return operation.request_deadline_seconds
        return (
            RouteSettings.model_fields["routes_request_deadline_seconds"].default
            if self.runtime is None
            else (self.runtime.settings.routes_request_deadline_seconds)
        )

    def usable_runtime(self) -> Runtime:
        """The runtime of the application that runs. Raises ``TransientError`` while the database has not answered, before the
        application's start-up has run, and once it has ended."""
        if not self.started:
            self._tell_once()
        if self.runtime is None or not self.runtime.ready.is_set():
            raise TransientError("the database has not answered yet, or the application's start-up has not run, or it has ended")
        return self.runtime

    def _tell_once(self) -> None:
        if not self._told:
            self._told = True
            _log.error(
                "durable_not_installed",
                remedy="call durable.install(app), after every app.add_middleware, on the application that the server runs; a "
                "mounted application's start-up (lifespan) is not run",
            )

    def checked_principal(self, principal: object) -> Principal:
        """What the dependency has returned. Raises ``ConfigurationError``."""
        if not isinstance(principal, Principal):
            raise ConfigurationError("the dependency of Durable(principal=...) must return a producer_sdk.http.Principal")
        try:
            Scope(tenant_id=principal.tenant_id, principal=principal.id, operation="any")
        except InvalidInput as error:
            raise ConfigurationError(f"the principal of a request: {error}") from None
        return principal

    def new_runtime(self) -> Runtime:
        """The runtime of an application that starts. Raises ``ConfigurationError``."""
        return Runtime(
            settings=self._settings or load_route_settings(),
            secrets=self._secrets or Secrets.from_environment(),
            codec=self.codec,
            site=self.site,
            transactions=self._transactions,
            operations=self.operations,
        )

    def install(self, app: FastAPI) -> None:
        """Add to the application what its durable routes need: the arrival's stamp, the runtime, monitor, cancel and problems.

        Call it after every ``add_middleware``: the stamp must be outermost, which the start-up checks.
        """
        from producer_sdk.http.installing import install

        install(self, app)


def _transaction_parameter(what: str, signature: inspect.Signature) -> str | None:
    marked = [name for name, parameter in signature.parameters.items() if _is_marked(parameter.annotation)]
    if len(marked) > 1:
        raise ConfigurationError(f"{what}: {', '.join(marked)}: there is one accepting transaction")
    return marked[0] if marked else None


def _is_marked(annotation: Any) -> bool:
    return any(mark is IN_TRANSACTION for mark in getattr(annotation, "__metadata__", ()))


def _presented(what: str, present: Callable[[Any], Any]) -> Any:
    returned = inspect.signature(present, eval_str=True).return_annotation
    if returned is inspect.Signature.empty:
        raise ConfigurationError(f"{what}: annotate what present returns: it is the success model")
    return returned


def _check_options(what: str, options: Mapping[str, Any]) -> None:
    check_between(f"{what}: wait_seconds", options["wait_seconds"], 0, _MOST_SECONDS)
    deadline = options["request_deadline_seconds"]
    check_between(f"{what}: request_deadline_seconds", deadline, 0, _MOST_SECONDS)
    if deadline is not None and deadline <= 2:
        raise ConfigurationError(f"{what}: request_deadline_seconds must be more than 2: a start needs time before the last answer")
    check_between(f"{what}: key_retention_seconds", options["key_retention_seconds"], 1, _MOST_RETENTION_SECONDS)
    check_between(f"{what}: max_input_bytes", options["max_input_bytes"], 1, 1_000_000)
    check_between(f"{what}: starts_per_minute", options["starts_per_minute"], 1, 1_000_000)
