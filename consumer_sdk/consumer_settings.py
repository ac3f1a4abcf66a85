"""The consumer's settings, read from ``FENCEPOST_*`` in the environment. Relations between them are checked, not hoped for."""

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fencepost.settings import ENVIRONMENT_PREFIX, Brokers, DatabaseAddress, load, mistyped, stripped
from fencepost.wire import MAX_TOPIC_CHARACTERS

__all__ = ["ConsumerSettings", "load_consumer_settings", "unknown_consumer_variables"]

_TOPIC: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_TOPIC_CHARACTERS}}}")


class ConsumerSettings(BaseSettings):
    """Every setting of ``fencepost consumer run``. Times say their unit."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid", env_ignore_empty=False)

    database_url: DatabaseAddress = Field(
        description="PostgreSQL address of the database that holds the ledger, and what handlers write. Required."
    )
    kafka_bootstrap_servers: Brokers = Field(description="Kafka brokers: host:port, separated by commas. Required.")
    consumer_topics: Annotated[str, Field(min_length=1)] = Field(description="Topics to consume, separated by commas. Required.")
    consumer_group: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="Kafka's consumer group. Required.")
    consumer_name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")] = Field(
        "",
        validate_default=False,
        description="The consumer's name in the ledger: two consumers of one database need two. Defaults to the group; keep the "
        "old name when you rename the group, or everything that is delivered again is handled again.",
    )
    consumer_instance: Annotated[str, Field(max_length=200)] = Field(
        "",
        description="Kafka's group.instance.id (static membership): a member that comes back within the session time-out gets its "
        "partitions back without a rebalance. Each process needs one of its own. Defaults to none.",
    )
    consumer_member: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default_factory=socket.gethostname, description="This process's name in logs and ledger. Defaults to the host name."
    )
    consumer_concurrency: int = Field(
        10, ge=1, le=1_000, description="Most messages handled at once, each of another key; batches come on top. Defaults to 10."
    )
    consumer_max_in_flight: int = Field(
        2_000, ge=1, le=100_000, description="Most messages in memory; beyond it nothing is fetched. Defaults to 2000."
    )
    consumer_max_in_flight_mb: int = Field(
        32, ge=1, le=1_024, description="Most megabytes of messages in memory. Defaults to 32; clients' buffers come on top."
    )
    consumer_max_ahead: int = Field(
        20_000,
        ge=1,
        le=1_000_000,
        description="Most messages of a partition that may be received behind one that is not done: what a crash has delivered "
        "again at most. Defaults to 20000.",
    )
    consumer_commit_interval_ms: int = Field(
        500, ge=10, le=60_000, description="How often finished offsets are committed. Defaults to 500."
    )
    consumer_offset_reset: Literal["earliest", "latest"] = Field(
        "earliest",
        description="Where a group begins that has no offset yet: latest passes over what is there. Defaults to earliest.",
    )
    consumer_isolation: Literal["read_committed", "read_uncommitted"] = Field(
        "read_committed", description="Whether messages of aborted Kafka transactions are left out. Defaults to read_committed."
    )
    consumer_session_timeout_seconds: float = Field(
        10, ge=1, le=1_800, description="How long a member may be silent before its partitions move. Defaults to 10."
    )
    consumer_rebalance_grace_seconds: float = Field(
        5,
        ge=0,
        le=240,
        description="How long handlers may go on after their partitions were revoked; then they are cancelled. Defaults to 5.",
    )
    consumer_stop_grace_seconds: float = Field(
        20,
        ge=0,
        le=3600,
        description="At SIGTERM, how long handlers may go on. What is not done is delivered again. Keep it below the "
        "orchestrator's own grace. Defaults to 20.",
    )
    consumer_dead_letter_topic: Annotated[str, Field(max_length=MAX_TOPIC_CHARACTERS)] = Field(
        "",
        description="Topic that the relay publishes dead letters to; it must exist. Defaults to none: they are kept in the "
        "database only, which they are in any case.",
    )
    consumer_statement_seconds: float = Field(
        10, ge=0.1, le=600, description="Longest that one of the consumer's own statements may take. Defaults to 10."
    )
    consumer_pooler: bool = Field(
        False,
        description="true: a transaction pooler stands before the database, which keeps prepared statements. Defaults to false.",
    )
    ledger_retention_days: float = Field(
        30,
        ge=0,
        le=3_650,
        description="How long the ledger remembers what was done; 0 is for ever. At least the topics' retention and "
        "FENCEPOST_CONSUMER_REPLAY_DAYS together. Give all services of a database the same. Defaults to 30.",
    )
    consumer_replay_days: float = Field(
        7,
        ge=0,
        le=3_650,
        description="How old a message may be that is handled anew, by a redrive or by offsets set back. Defaults to 7.",
    )
    consumer_retention_check: Literal["refuse", "warn"] = Field(
        "refuse", description="What to do where the ledger would forget messages that can still come. Defaults to refuse."
    )
    consumer_http_host: str = Field(
        "127.0.0.1", min_length=1, description="Address of /livez, /readyz and /metrics. Defaults to 127.0.0.1."
    )
    consumer_http_port: int = Field(
        9466, ge=0, le=65_535, description="Port of /livez, /readyz and /metrics. Defaults to 9466; 0 picks one."
    )
    consumer_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged. Defaults to info."
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_white_space(cls, values: object) -> object:
        return stripped(values)

    @model_validator(mode="after")
    def _names_can_work(self) -> Self:
        for topic in self.topics or ("",):
            if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
                raise ValueError("FENCEPOST_CONSUMER_TOPICS must be names of topics, separated by commas")
        if self.consumer_dead_letter_topic and not _TOPIC.fullmatch(self.consumer_dead_letter_topic):
            raise ValueError("FENCEPOST_CONSUMER_DEAD_LETTER_TOPIC must be the name of a topic")
        if self.consumer_dead_letter_topic in self.topics:
            raise ValueError(
                "FENCEPOST_CONSUMER_DEAD_LETTER_TOPIC must not be among FENCEPOST_CONSUMER_TOPICS: it would feed itself"
            )
        if not self.consumer_name and not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", self.consumer_group):
            raise ValueError("FENCEPOST_CONSUMER_NAME is required for this group: 1 to 64 characters of a-z A-Z 0-9 _ . : -")
        return self

    @property
    def topics(self) -> Sequence[str]:
        """The topics, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.consumer_topics.split(",") if name.strip()))

    @property
    def name(self) -> str:
        """The consumer's name in the ledger."""
        return self.consumer_name or self.consumer_group


def unknown_consumer_variables() -> list[str]:
    """Variables of the consumer's prefix that no setting has: mistyped, perhaps."""
    return mistyped(ConsumerSettings, prefix=f"{ENVIRONMENT_PREFIX}CONSUMER_")


def load_consumer_settings(overrides: Mapping[str, object] | None = None) -> ConsumerSettings:
    """Settings from the environment. Raises ``ConfigurationError`` that names every setting at fault, never its value."""
    return load(ConsumerSettings, overrides or {})
