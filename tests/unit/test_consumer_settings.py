"""The consumer's settings are right, or it does not start and says which of them is wrong, never what its value was."""

import os
from typing import Any

import pytest
from pydantic import ValidationError

from consumer_sdk.consumer_settings import ConsumerSettings, load_consumer_settings, unknown_consumer_variables
from fencepost.errors import ConfigurationError

SECRET = "s3cret-pa55word"
DATABASE_URL = f"postgresql://consumer:{SECRET}@db.internal/app"
REQUIRED = {
    "database_url": DATABASE_URL,
    "kafka_bootstrap_servers": "kafka:9092",
    "consumer_topics": "orders",
    "consumer_group": "billing",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the required settings are in the environment."""
    for name in [name for name in os.environ if name.startswith("FENCEPOST_")]:
        monkeypatch.delenv(name)
    for name, value in REQUIRED.items():
        monkeypatch.setenv(f"FENCEPOST_{name.upper()}", value)


def loaded(monkeypatch: pytest.MonkeyPatch, **environment: str) -> ConsumerSettings:
    for name, value in environment.items():
        monkeypatch.setenv(f"FENCEPOST_{name.upper()}", value)
    return load_consumer_settings()


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        loaded(monkeypatch, **environment)
    return str(refused.value)


def test_addresses_topics_and_a_group_are_enough() -> None:
    settings = load_consumer_settings()

    assert settings.database_url.get_secret_value() == DATABASE_URL
    assert (settings.topics, settings.name, settings.consumer_concurrency) == (("orders",), "billing", 10)
    assert (settings.consumer_isolation, settings.consumer_offset_reset, settings.consumer_retention_check) == (
        "read_committed", "earliest", "refuse",
    )  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_setting_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(f"FENCEPOST_{name.upper()}")

    assert refusal(monkeypatch) == f"FENCEPOST_{name.upper()} is required: set it in the environment"


@pytest.mark.parametrize("name", REQUIRED)
def test_a_setting_that_is_blank_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert refusal(monkeypatch, **{name: "  "}).startswith(f"FENCEPOST_{name.upper()} is blank")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consumer_concurrency", "0"),
        ("consumer_concurrency", "1001"),
        ("consumer_concurrency", "1.5"),
        ("consumer_max_in_flight", "0"),
        ("consumer_max_in_flight_mb", "1025"),
        ("consumer_max_ahead", "0"),
        ("consumer_commit_interval_ms", "9"),
        ("consumer_session_timeout_seconds", "0.5"),
        ("consumer_session_timeout_seconds", "nan"),
        ("consumer_rebalance_grace_seconds", "241"),
        ("consumer_stop_grace_seconds", "-1"),
        ("consumer_statement_seconds", "0"),
        ("consumer_statement_seconds", "inf"),
        ("consumer_replay_days", "-1"),
        ("consumer_http_port", "65536"),
        ("consumer_http_host", ""),
        ("consumer_member", " "),
        ("consumer_instance", "x" * 201),
        ("consumer_name", "a b"),
        ("consumer_name", "x" * 65),
        ("consumer_pooler", "perhaps"),
        ("consumer_offset_reset", "newest"),
        ("consumer_isolation", "serializable"),
        ("consumer_retention_check", "ignore"),
        ("consumer_log_level", "loud"),
        ("ledger_retention_days", "3651"),
        ("ledger_retention_days", "nan"),
        ("kafka_bootstrap_servers", "kafka:port"),
        ("consumer_dead_letter_topic", "a/b"),
        ("consumer_dead_letter_topic", "x" * 250),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert refusal(monkeypatch, **{name: value}).startswith(f"FENCEPOST_{name.upper()}")


@pytest.mark.parametrize("topics", ["a b", "orders,a/b", "é", "x" * 250, ",", " , "])
def test_a_name_that_no_topic_can_have_is_refused(monkeypatch: pytest.MonkeyPatch, topics: str) -> None:
    assert refusal(monkeypatch, consumer_topics=topics).startswith("FENCEPOST_CONSUMER_TOPICS")


def test_topics_are_separated_by_commas_and_each_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, consumer_topics=" orders, payments,,orders ").topics == ("orders", "payments")


def test_dead_letters_that_are_consumed_again_would_feed_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(monkeypatch, consumer_topics="orders,dead", consumer_dead_letter_topic="dead")

    assert "FENCEPOST_CONSUMER_DEAD_LETTER_TOPIC must not be among FENCEPOST_CONSUMER_TOPICS" in told


def test_a_group_that_is_no_name_for_the_ledger_needs_one_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, consumer_group="the group").startswith("FENCEPOST_CONSUMER_NAME is required for this group")
    assert loaded(monkeypatch, consumer_name="billing-1").name == "billing-1"


def test_the_name_outlives_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, consumer_group="billing-v2", consumer_name="billing").name == "billing"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("database_url", f"mysql://consumer:{SECRET}@db/app"),
        ("database_url", SECRET),
        ("database_url", f"postgresql://consumer:{SECRET}@db:port/app"),
        ("kafka_bootstrap_servers", f"{SECRET}:x"),
        ("consumer_topics", f"{SECRET} /"),
        ("consumer_dead_letter_topic", f"{SECRET} /"),
        ("consumer_group", f"{SECRET} /"),
        ("consumer_name", f"{SECRET} /"),
        ("consumer_isolation", SECRET),
        ("consumer_concurrency", SECRET),
    ],
)
def test_no_value_is_quoted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert SECRET not in refusal(monkeypatch, **{name: value})


def test_every_fault_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(monkeypatch, consumer_concurrency="0", consumer_isolation="none", database_url="")

    for name in ("FENCEPOST_CONSUMER_CONCURRENCY", "FENCEPOST_CONSUMER_ISOLATION", "FENCEPOST_DATABASE_URL"):
        assert name in told


def test_no_secret_is_shown_with_the_settings() -> None:
    assert SECRET not in repr(load_consumer_settings())


def test_settings_cannot_be_changed() -> None:
    settings: Any = load_consumer_settings()

    with pytest.raises(ValidationError):
        settings.consumer_concurrency = 3


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="CONSUMER_TOPIC"):
        load_consumer_settings({"consumer_topic": "orders"})


def test_a_variable_that_is_mistyped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_CONSUMER_TOPIC", "orders")
    monkeypatch.setenv("FENCEPOST_CONSUMER_SERVICE_HOST", "10.0.0.1")  # as Kubernetes adds it

    assert unknown_consumer_variables() == ["FENCEPOST_CONSUMER_TOPIC"]


def test_white_space_around_a_value_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(
        monkeypatch, consumer_member="  press-1\n", consumer_concurrency=" 20\n", consumer_isolation=" read_committed "
    )

    assert (settings.consumer_member, settings.consumer_concurrency) == ("press-1", 20)


def test_every_setting_says_what_it_is_and_what_it_defaults_to() -> None:
    for name, field in ConsumerSettings.model_fields.items():
        assert field.description, name
        assert "Defaults to" in field.description or "Required" in field.description, name
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool) and field.default != "":
            assert f"Defaults to {field.default}" in field.description, name
