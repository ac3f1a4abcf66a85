"""Settings are right, or the relay does not start and says which of them is wrong, never what its value was."""

import os

import pytest
from pydantic import ValidationError

from fencepost.errors import ConfigurationError
from relay.settings import ENVIRONMENT_PREFIX, RelaySettings, load_settings, unknown_variables

SECRET = "s3cret-pa55word"
DATABASE_URL = f"postgresql://relay:{SECRET}@db.internal/app"
REQUIRED = {"DATABASE_URL": DATABASE_URL, "KAFKA_BOOTSTRAP_SERVERS": "kafka:9092"}

BLANK = "is blank: give it a value, or unset it where it has a default"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the required settings are in the environment."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in REQUIRED.items():
        monkeypatch.setenv(ENVIRONMENT_PREFIX + name, value)


def loaded(monkeypatch: pytest.MonkeyPatch, **environment: str) -> RelaySettings:
    for name, value in environment.items():
        monkeypatch.setenv(ENVIRONMENT_PREFIX + name.upper(), value)
    return load_settings()


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        loaded(monkeypatch, **environment)
    return str(refused.value)


def test_the_two_addresses_are_enough() -> None:
    settings = load_settings()

    assert settings.database_url.get_secret_value() == DATABASE_URL
    assert settings.kafka_bootstrap_servers == "kafka:9092"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (" a:1 , b:2 ", "a:1,b:2"),
        ("a:1,b:2,", "a:1,b:2"),
        ("\na:1,\n  b:2,\n\n", "a:1,b:2"),
        (",a:1,,", "a:1"),
    ],
)
def test_a_broker_list_may_have_blanks_line_ends_and_trailing_commas(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    """OPS-4."""
    assert loaded(monkeypatch, kafka_bootstrap_servers=given).kafka_bootstrap_servers == expected


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("relay_name", "  relay-0\n", "relay-0"),
        ("source", "/shop ", "/shop"),
        ("batch_rows", " 500\n", 500),
        ("lease_seconds", "30 ", 30.0),
        ("http_host", " 0.0.0.0 ", "0.0.0.0"),
        ("wakeup", " poll\n", "poll"),
        ("compression", "gzip ", "gzip"),
        ("log_level", " warning", "warning"),
        ("wait_for_flush", " true ", True),
    ],
)
def test_white_space_around_a_value_is_dropped(monkeypatch: pytest.MonkeyPatch, name: str, given: str, expected: object) -> None:
    """OPS-4."""
    assert getattr(loaded(monkeypatch, **{name: given}), name) == expected


def test_white_space_around_the_database_address_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-4: a secret from a file often ends in a line end."""
    settings = loaded(monkeypatch, database_url=f" {DATABASE_URL}\n")

    assert settings.database_url.get_secret_value() == DATABASE_URL


@pytest.mark.parametrize("blank", ["", "  ", "\n", "\t\r\n"])
@pytest.mark.parametrize("name", ["database_url", "kafka_bootstrap_servers", "relay_name", "source"])
def test_a_blank_text_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, blank: str) -> None:
    """OPS-4."""
    assert refusal(monkeypatch, **{name: blank}) == f"FENCEPOST_{name.upper()} {BLANK}"


def test_a_broker_list_of_commas_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, kafka_bootstrap_servers=" , ,") == f"FENCEPOST_KAFKA_BOOTSTRAP_SERVERS {BLANK}"


@pytest.mark.parametrize("name", ["batch_rows", "lease_seconds", "wait_for_flush", "wakeup"])
def test_a_blank_number_flag_or_choice_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """OPS-4: never a traceback, never a default in its place."""
    assert f"FENCEPOST_{name.upper()}" in refusal(monkeypatch, **{name: " "})


def test_every_missing_setting_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REQUIRED:
        monkeypatch.delenv(ENVIRONMENT_PREFIX + name)

    message = refusal(monkeypatch)

    assert "FENCEPOST_DATABASE_URL is required" in message
    assert "FENCEPOST_KAFKA_BOOTSTRAP_SERVERS is required" in message


def test_a_lease_shorter_than_the_publish_deadline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEASE-7: both settings and the least lease that fits."""
    message = refusal(monkeypatch, lease_seconds="30", publish_deadline_seconds="120", lease_margin_seconds="2")

    assert "FENCEPOST_PUBLISH_DEADLINE_SECONDS (120)" in message
    assert "FENCEPOST_LEASE_MARGIN_SECONDS (2)" in message
    assert "FENCEPOST_LEASE_SECONDS (30)" in message
    assert "more than 122" in message


@pytest.mark.parametrize(("lease", "fits"), [("11.9", False), ("12", False), ("12.1", True)])
def test_the_least_lease_is_the_deadline_and_the_margin(monkeypatch: pytest.MonkeyPatch, lease: str, fits: bool) -> None:
    """LEASE-7, at the border: a lease of just deadline + margin does not fit."""
    chosen = {"lease_seconds": lease, "publish_deadline_seconds": "10", "lease_margin_seconds": "2"}
    if fits:
        assert loaded(monkeypatch, **chosen).trusted_seconds > 10
    else:
        assert "more than 12" in refusal(monkeypatch, **chosen)


def test_the_defaults_fit_each_other() -> None:
    settings = load_settings()

    assert settings.publish_deadline_seconds < settings.trusted_seconds
    assert settings.renew_interval_seconds * 3 < settings.trusted_seconds


def test_a_memory_budget_below_two_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, memory_budget_bytes="2097151")

    assert "FENCEPOST_MEMORY_BUDGET_BYTES" in message
    assert "2097152" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_rows", "0"),
        ("batch_rows", "20001"),
        ("batch_rows", "many"),
        ("poll_interval_ms", "-1"),
        ("lease_seconds", "nan"),
        ("lease_seconds", "inf"),
        ("http_port", "65536"),
        ("wakeup", "bell"),
        ("compression", "rar"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    assert refusal(monkeypatch, **{name: value}).startswith(f"FENCEPOST_{name.upper()}: ")


def test_an_unknown_keyword_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="FENCEPOST_BATCH_ROW:"):
        load_settings({"batch_row": 5})


def test_a_mistyped_variable_is_named_and_foreign_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes adds names of services with our prefix, so they are named, not refused."""
    kubernetes = ("FENCEPOST_SERVICE_HOST", "FENCEPOST_PORT_9464_TCP")
    other_parts = ("FENCEPOST_WORKER_HTTP_PORT", "FENCEPOST_IDEMPOTENCY_KEYS", "FENCEPOST_LEDGER_RETENTION")
    for name in ("FENCEPOST_BATCH_ROW", "FENCEPOST_BATCH_ROWS", *kubernetes, *other_parts):
        monkeypatch.setenv(name, "5")

    assert unknown_variables() == ["FENCEPOST_BATCH_ROW"]


def test_a_keyword_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_BATCH_ROWS", "7")

    assert load_settings({"batch_rows": 9}).batch_rows == 9


def test_settings_do_not_change() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.batch_rows = 5


def test_the_password_is_in_no_text_of_the_settings() -> None:
    settings = load_settings()

    for text in (repr(settings), str(settings), settings.model_dump_json(), repr(settings.model_dump())):
        assert SECRET not in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"database_url": [DATABASE_URL]},
        {"database_url": DATABASE_URL.encode() + b"\xff"},
        {"database_url": DATABASE_URL, "lease_seconds": 1},
        {"database_url": DATABASE_URL, "batch_rows": DATABASE_URL},
        {"database_url": DATABASE_URL, "wakeup": DATABASE_URL},
        {"database_url": DATABASE_URL, "nonsense": DATABASE_URL},
    ],
)
def test_the_password_is_in_no_refusal(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(wrong)

    error = refused.value
    assert SECRET not in f"{error!r} {error.__cause__!r}"
    assert error.__suppress_context__  # pydantic's error quotes its input
