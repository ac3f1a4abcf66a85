"""The relay's settings, read from ``FENCEPOST_*`` in the environment. Relations between them are checked, not hoped for."""

import socket
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fencepost.settings import ENVIRONMENT_PREFIX, Brokers, DatabaseAddress, load, mistyped, stripped

__all__ = ["ENVIRONMENT_PREFIX", "RelaySettings", "load_settings", "unknown_variables"]


class RelaySettings(BaseSettings):
    """Every setting of ``fencepost relay run``. Times say their unit; sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", env_ignore_empty=False)

    database_url: DatabaseAddress = Field(
        description="PostgreSQL address of the database that holds the outbox. Required; a direct connection is best: "
        "through a transaction pooler, which must keep prepared statements, set FENCEPOST_WAKEUP=poll."
    )
    kafka_bootstrap_servers: Brokers = Field(description="Kafka brokers to start from, host:port, separated by commas. Required.")
    relay_name: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default_factory=socket.gethostname,
        description="Name in status, logs and receipts. Defaults to the host name. Two relays may share one: a nonce of "
        "each start keeps them apart.",
    )
    source: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        "fencepost", description="CloudEvents source of rows that name none. Defaults to fencepost."
    )
    wakeup: Literal["listen", "poll"] = Field(
        "listen", description="listen: writers ring a sleeping relay; poll: no LISTEN, for transaction poolers. Defaults to listen."
    )
    poll_interval_ms: int = Field(
        200,
        ge=5,
        le=60_000,
        description="Longest wait between two polls: what a lost ring or a raw INSERT can cost. Defaults to 200.",
    )
    pace_max_ms: int = Field(
        30,
        ge=0,
        le=1_000,
        description="Most latency that pacing may add under a steady stream, to leave the cores to the writers. "
        "0 polls as fast as it can. Defaults to 30.",
    )
    batch_rows: int = Field(
        3_000,
        ge=1,
        le=20_000,
        description="Most rows of one lane in a batch. Defaults to 3000: a drain gained a fifth over 1000, for 20 MB of memory.",
    )
    memory_budget_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024 * 1024,
        le=4 * 1024**3,
        description="Row bytes held at once, polled and in flight, all lanes together; the process needs about four times "
        "as much. Defaults to 32 MiB.",
    )
    lease_seconds: float = Field(
        20, ge=1, le=3600, description="How long a lane stays owned without a renewal: what a crash costs. Defaults to 20."
    )
    lease_margin_seconds: float = Field(
        2, ge=0.1, le=600, description="Taken off the lease before the relay trusts it: scheduling and transit. Defaults to 2."
    )
    publish_deadline_seconds: float = Field(
        10, ge=0.5, le=3600, description="A batch without an answer for this long is tried anew by a new producer. Defaults to 10."
    )
    stop_grace_seconds: float = Field(
        15, ge=0, le=600, description="At SIGTERM, how long batches in flight may take before they are abandoned. Defaults to 15."
    )
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        "none", description="Compression of Kafka batches. Defaults to none: it costs the relay's core most."
    )
    wait_for_flush: bool = Field(
        False,
        description="Publish only rows whose commit is flushed to disk: for writers with synchronous_commit = off. Off by default.",
    )
    http_host: str = Field("127.0.0.1", min_length=1, description="Address of /livez, /readyz and /metrics. Defaults to 127.0.0.1.")
    http_port: int = Field(
        9464, ge=0, le=65_535, description="Port of /livez, /readyz and /metrics. Defaults to 9464; 0 picks one."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged. Defaults to info."
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_white_space(cls, values: object) -> object:
        return stripped(values)

    @model_validator(mode="after")
    def _deadline_fits_into_lease(self) -> Self:
        # A batch is watched until its deadline; a lease that ends before would be lost with the batch still on its way.
        least = self.publish_deadline_seconds + self.lease_margin_seconds
        if self.lease_seconds <= least:
            raise ValueError(
                f"FENCEPOST_PUBLISH_DEADLINE_SECONDS ({self.publish_deadline_seconds:g}) and "
                f"FENCEPOST_LEASE_MARGIN_SECONDS ({self.lease_margin_seconds:g}) do not fit into "
                f"FENCEPOST_LEASE_SECONDS ({self.lease_seconds:g}); the least lease that fits is more than {least:g}"
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_the_largest_record(self) -> Self:
        if self.memory_budget_bytes < 2 * 1024 * 1024:
            raise ValueError(
                "FENCEPOST_MEMORY_BUDGET_BYTES must be at least 2097152: one record of the largest size in flight and one polled"
            )
        return self

    @property
    def renew_interval_seconds(self) -> float:
        """A quarter of the lease: three renewals may fail before the lease does."""
        return self.lease_seconds / 4

    @property
    def trusted_seconds(self) -> float:
        """How long after the start of a claim or renewal the lease may be acted upon."""
        return self.lease_seconds - self.lease_margin_seconds


def load_settings(overrides: Mapping[str, object] | None = None) -> RelaySettings:
    """Settings from the environment. Raises ``ConfigurationError`` that names every setting at fault, never its value."""
    return load(RelaySettings, overrides or {})


def unknown_variables() -> list[str]:
    """Variables with our prefix that no setting of any part has: mistyped, perhaps."""
    return mistyped(
        RelaySettings,
        prefix=ENVIRONMENT_PREFIX,
        others=("TEST_", "WORKER_", "CONSUMER_", "ROUTES_", "CHUNK_", "IDEMPOTENCY_", "LEDGER_"),
    )
