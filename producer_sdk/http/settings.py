"""The settings of durable routes, read from ``FENCEPOST_*`` in the environment. Relations between them are checked."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fencepost.settings import ENVIRONMENT_PREFIX, DatabaseAddress, load, mistyped, stripped

__all__ = ["RouteSettings", "load_route_settings", "unknown_route_variables"]


class RouteSettings(BaseSettings):
    """Every setting of durable routes in one process. Times say their unit; sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", env_ignore_empty=False)

    database_url: DatabaseAddress = Field(
        description="PostgreSQL address of the database that holds the runs. Required; a direct connection: one of them listens."
    )
    routes_request_deadline_seconds: float = Field(
        30,
        gt=2,
        le=3600,
        description="After how long the server, or a proxy before it, gives a request up. Waiting ends 2 s before it, a start that "
        "is not committed 1 s before it. A route may have its own. Defaults to 30.",
    )
    routes_start_connections: int = Field(
        10,
        ge=1,
        le=100,
        description="Most starts at once: each holds a connection for its handler and its commit; others wait for one, for half of "
        "the request's deadline at most. Defaults to 10.",
    )
    routes_read_connections: int = Field(
        4, ge=2, le=100, description="Connections that look keys up and read for all who wait and stream. Defaults to 4."
    )
    routes_database_seconds: float = Field(
        3,
        ge=0.1,
        le=60,
        description="Most that a statement of Fencepost's may take, or connecting, or a read's wait for its connection. "
        "Defaults to 3.",
    )
    routes_max_waiters: int = Field(
        2_000,
        ge=0,
        le=100_000,
        description="Requests that wait at once in this process; the rest is answered 202 with its run committed. 0: nobody waits. "
        "Defaults to 2000.",
    )
    routes_max_waiters_per_principal: int = Field(
        200, ge=0, le=100_000, description="The same for each principal, so that none takes all. Defaults to 200."
    )
    routes_max_streams: int = Field(
        1_000, ge=0, le=100_000, description="Streams open at once in this process. 0: each is answered 202. Defaults to 1000."
    )
    routes_max_streams_per_principal: int = Field(50, ge=0, le=100_000, description="The same for each principal. Defaults to 50.")
    routes_max_body_bytes: int = Field(
        1_000_000,
        ge=1,
        le=1_000_000,
        description="Largest body that is read at all; a larger one is refused before anything else. Defaults to 1000000.",
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_white_space(cls, values: object) -> object:
        return stripped(values)

    @model_validator(mode="after")
    def _a_statement_fits_into_a_request(self) -> Self:
        if self.routes_database_seconds >= self.routes_request_deadline_seconds:
            raise ValueError(
                f"FENCEPOST_ROUTES_DATABASE_SECONDS ({self.routes_database_seconds:g}) must be less than "
                f"FENCEPOST_ROUTES_REQUEST_DEADLINE_SECONDS ({self.routes_request_deadline_seconds:g})"
            )
        return self


def load_route_settings(overrides: Mapping[str, object] | None = None) -> RouteSettings:
    """Settings from the environment. Raises ``ConfigurationError`` that names every setting at fault, never its value."""
    return load(RouteSettings, overrides or {})


def unknown_route_variables() -> list[str]:
    """Variables of our prefix for routes that no setting has: mistyped, perhaps."""
    return mistyped(RouteSettings, prefix=f"{ENVIRONMENT_PREFIX}ROUTES_")
