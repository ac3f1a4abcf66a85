"""Durable routes: HTTP routes of FastAPI whose work runs as durable runs, keyed by the client's ``Idempotency-Key``.

``Durable`` is a registry of workflows with ``route`` and ``stream`` for handlers and ``install`` for the application. The first
request of a key starts the run inside the handler's own transaction and waits for its result; the same request again gets the
stored answer, byte for byte. Workers execute the runs: ``fencepost worker run app:durable``.

Names are loaded at first use: ``producer_sdk.http.client`` must not bring a server along.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fencepost.errors import ConfigurationError, WorkflowFailure
    from fencepost.retry import Retry
    from producer_sdk.http.durable import Durable
    from producer_sdk.http.headers import EXPOSED_HEADERS, REQUEST_HEADERS
    from producer_sdk.http.principal import Principal
    from producer_sdk.http.settings import RouteSettings, load_route_settings
    from producer_sdk.http.transactions import IN_TRANSACTION, SessionTransactions, Tx

__all__ = [
    "EXPOSED_HEADERS",
    "IN_TRANSACTION",
    "REQUEST_HEADERS",
    "ConfigurationError",
    "Durable",
    "Principal",
    "Retry",
    "RouteSettings",
    "SessionTransactions",
    "Tx",
    "WorkflowFailure",
    "load_route_settings",
]

_HOMES: Final = {
    "EXPOSED_HEADERS": "producer_sdk.http.headers",
    "IN_TRANSACTION": "producer_sdk.http.transactions",
    "REQUEST_HEADERS": "producer_sdk.http.headers",
    "ConfigurationError": "fencepost.errors",
    "Durable": "producer_sdk.http.durable",
    "Principal": "producer_sdk.http.principal",
    "Retry": "fencepost.retry",
    "RouteSettings": "producer_sdk.http.settings",
    "SessionTransactions": "producer_sdk.http.transactions",
    "Tx": "producer_sdk.http.transactions",
    "WorkflowFailure": "fencepost.errors",
    "load_route_settings": "producer_sdk.http.settings",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
