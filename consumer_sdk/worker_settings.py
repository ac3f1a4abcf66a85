"""The worker's settings, read from ``FENCEPOST_*`` in the environment. Relations between them are checked, not hoped for."""

import socket
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fencepost.settings import ENVIRONMENT_PREFIX, DatabaseAddress, load, mistyped, stripped

__all__ = ["WorkerSettings", "load_worker_settings", "unknown_worker_variables"]


class WorkerSettings(BaseSettings):
    """Every setting of ``fencepost worker run``. Times say their unit."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", env_ignore_empty=False)

    database_url: DatabaseAddress = Field(
        description="PostgreSQL address of the database that holds the runs. Required; a direct connection is best: "
        "through a transaction pooler, which must keep prepared statements, set FENCEPOST_WORKER_WAKEUP=poll."
    )
    worker_name: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default_factory=socket.gethostname,
        description="Name in attempts, logs and metrics. Defaults to the host name. Two workers may share one: a nonce of each "
        "start keeps them apart.",
    )
    worker_concurrency: int = Field(
        10, ge=1, le=10_000, description="Most attempts at once in this process, all workflows together. Defaults to 10."
    )
    worker_lease_seconds: float = Field(
        30, ge=1, le=3600, description="How long a job stays owned without a renewal: what a crash costs. Defaults to 30."
    )
    worker_lease_margin_seconds: float = Field(
        3, ge=0.1, le=600, description="Taken off the lease before the worker trusts it: scheduling and transit. Defaults to 3."
    )
    worker_stop_grace_seconds: float = Field(
        20,
        ge=0,
        le=3600,
        description="At SIGTERM, how long attempts in progress may take. What is left is given back before it is over, without "
        "a failure. Keep it below the orchestrator's own grace. Defaults to 20.",
    )
    worker_cancel_grace_seconds: float = Field(
        10,
        ge=0,
        le=600,
        description="How long a handler may clean up after it was cancelled; its lease is renewed meanwhile, except past the "
        "attempt's deadline, where what is left of the lease must do. Defaults to 10.",
    )
    worker_wakeup: Literal["listen", "poll"] = Field(
        "listen", description="listen: whoever makes a job ready rings an idle worker; poll: no LISTEN. Defaults to listen."
    )
    worker_poll_interval_ms: int = Field(
        500,
        ge=5,
        le=60_000,
        description="Longest wait of an idle worker between two looks: what a lost ring can cost. Defaults to 500.",
    )
    ledger_retention_days: float = Field(
        30,
        ge=0,
        le=3_650,
        description="How long the ledger remembers outside effects; 0 is for ever. Give all services of a database the same. "
        "Defaults to 30.",
    )
    chunk_retention_days: float = Field(
        7,
        ge=0,
        le=3_650,
        description="How long the chunks of a stream are kept after the end of its lineage; a cursor behind what was deleted gets "
        "410. 0 is for ever. Give all workers of a database the same. Defaults to 7.",
    )
    worker_http_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of /livez, /readyz and /metrics. Defaults to 127.0.0.1."
    )
    worker_http_port: int = Field(
        9465, ge=0, le=65_535, description="Port of /livez, /readyz and /metrics. Defaults to 9465; 0 picks one."
    )
    worker_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged. Defaults to info."
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_white_space(cls, values: object) -> object:
        return stripped(values)

    @model_validator(mode="after")
    def _renewals_fit_into_lease(self) -> Self:
        # A renewal is due at a third of the lease; one that fails must leave time for another before trust ends.
        if self.worker_lease_margin_seconds > self.worker_lease_seconds / 3:
            raise ValueError(
                f"FENCEPOST_WORKER_LEASE_MARGIN_SECONDS ({self.worker_lease_margin_seconds:g}) must be at most a third of "
                f"FENCEPOST_WORKER_LEASE_SECONDS ({self.worker_lease_seconds:g})"
            )
        return self

    @property
    def renew_after_seconds(self) -> float:
        """A third of the lease: two renewals may fail before the lease does."""
        return self.worker_lease_seconds / 3

    @property
    def trusted_seconds(self) -> float:
        """How long after the start of a claim or renewal the lease may be acted upon."""
        return self.worker_lease_seconds - self.worker_lease_margin_seconds


def unknown_worker_variables() -> list[str]:
    """Variables of the worker's prefix that no setting has: mistyped, perhaps."""
    return mistyped(WorkerSettings, prefix=f"{ENVIRONMENT_PREFIX}WORKER_")


def load_worker_settings(overrides: Mapping[str, object] | None = None) -> WorkerSettings:
    """Settings from the environment. Raises ``ConfigurationError`` that names every setting at fault, never its value."""
    return load(WorkerSettings, overrides or {})
