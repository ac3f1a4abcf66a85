"""Finds what a command line names as ``module:attribute``."""

import importlib
import sys
from typing import Final, TypeVar

from consumer_sdk.evidence import frames_of
from consumer_sdk.handlers import Handlers
from fencepost.errors import ConfigurationError
from fencepost.workflows import Workflows

__all__ = ["load_handlers", "load_object"]

_Kind = TypeVar("_Kind")

_ABSENT: Final = object()


def load_handlers(place: str) -> Handlers:
    """The ``Handlers`` at ``module:attribute``, or handlers of the workflows there. Raises ``ConfigurationError``."""
    found = _found(place)
    if isinstance(found, Handlers):
        return found
    if isinstance(found, Workflows):
        handlers = Handlers()
        handlers.include(found)
        return handlers
    raise _another(place, found, "consumer_sdk.Handlers, a consumer_sdk.Workflows or a producer_sdk.http.Durable")


def load_object(place: str, kind: type[_Kind]) -> _Kind:
    """The object of that kind at ``module:attribute``; the current directory is looked in first. Raises ``ConfigurationError``."""
    found = _found(place)
    if isinstance(found, kind):
        return found
    raise _another(place, found, f"consumer_sdk.{kind.__name__}")


def _another(place: str, found: object, taken: str) -> ConfigurationError:
    module_name, _, attribute = place.partition(":")
    if found is _ABSENT:
        return ConfigurationError(f"HANDLERS: {module_name} has nothing named {attribute}; name a {taken} in it")
    kind = type(found)
    return ConfigurationError(f"HANDLERS: {place} is of type {kind.__module__}.{kind.__qualname__}; name a {taken}")


def _found(place: str) -> object:
    module_name, colon, attribute = place.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError("HANDLERS must be module:attribute, for example orders.work:handlers")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name != error.name and not module_name.startswith(f"{error.name}."):
            raise ConfigurationError(f"HANDLERS: {module_name} imports {error.name}, which is not installed") from error
        raise ConfigurationError(
            f"HANDLERS: there is no module {error.name}; start where it can be imported, or install it"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError("HANDLERS must name a module by its full name, for example orders.work:handlers") from error
    except Exception as error:  # noqa: BLE001 - a boundary: whatever a module does when it is imported
        place = (frames_of(error) or ["?"])[-1] if not isinstance(error, SyntaxError) else f"{error.filename}:{error.lineno}"
        raise ConfigurationError(f"HANDLERS: importing {module_name} failed: {type(error).__name__} at {place}") from None
    return getattr(module, attribute, _ABSENT)
