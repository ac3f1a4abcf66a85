"""What the settings of every service share: where they come from, and how a wrong one is told. Values are never quoted."""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings

from fencepost.addresses import check_bootstrap_servers, check_database_url
from fencepost.errors import ConfigurationError

__all__ = ["ENVIRONMENT_PREFIX", "Brokers", "DatabaseAddress", "load", "mistyped", "stripped"]

ENVIRONMENT_PREFIX: Final = "FENCEPOST_"

_Settings = TypeVar("_Settings", bound=BaseSettings)


def _checked(check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


def _database_url(value: SecretStr) -> SecretStr:
    return SecretStr(_checked(check_database_url, value.get_secret_value()))


def _brokers(value: str) -> str:
    return _checked(check_bootstrap_servers, value)


DatabaseAddress = Annotated[SecretStr, Field(min_length=1), AfterValidator(_database_url)]
Brokers = Annotated[str, Field(min_length=1), AfterValidator(_brokers)]


def stripped(values: object) -> object:
    """Values without the blanks around them: those from files and manifests end in line ends."""
    if not isinstance(values, dict):
        return values
    return {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}


def load(model: type[_Settings], overrides: Mapping[str, Any]) -> _Settings:
    """Settings from the environment. Raises ``ConfigurationError`` that names every setting at fault, never its value."""
    try:
        return model(**overrides)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(detail) for detail in error.errors())) from None


def mistyped(model: type[BaseSettings], *, prefix: str, others: tuple[str, ...] = ()) -> list[str]:
    """Variables that begin with ``prefix`` and are no setting of the model: mistyped, perhaps.

    Not refused, since Kubernetes adds such names. ``others``: what may follow the prefix in variables that are not the model's.
    """
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in model.model_fields}
    foreign = tuple(prefix + rest for rest in ("SERVICE_", "PORT", *others))
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in known and not name.startswith(foreign))


def _explain(detail: Mapping[str, Any]) -> str:
    location = detail["loc"]
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not location:
        return message
    name = f"{ENVIRONMENT_PREFIX}{str(location[0]).upper()}"
    if detail["type"] == "missing":
        return f"{name} is required: set it in the environment"
    if not str(detail.get("input", "x")).strip(" ,"):
        return f"{name} is blank: give it a value, or unset it where it has a default"
    return message if message.startswith(name) else f"{name}: {message}"
