"""The worker's settings are right, or it does not start and says which of them is wrong, never what its value was."""

import os

import pytest
from pydantic import ValidationError

from consumer_sdk.worker_settings import WorkerSettings, load_worker_settings
from fencepost.errors import ConfigurationError

SECRET = "s3cret-pa55word"
DATABASE_URL = f"postgresql://worker:{SECRET}@db.internal/app"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the required setting is in the environment."""
    for name in [name for name in os.environ if name.startswith("FENCEPOST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FENCEPOST_DATABASE_URL", DATABASE_URL)


def loaded(monkeypatch: pytest.MonkeyPatch, **environment: str) -> WorkerSettings:
    for name, value in environment.items():
        monkeypatch.setenv(f"FENCEPOST_{name.upper()}", value)
    return load_worker_settings()


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        loaded(monkeypatch, **environment)
    return str(refused.value)


def test_the_address_is_enough() -> None:
    settings = load_worker_settings()

    assert settings.database_url.get_secret_value() == DATABASE_URL
    assert (settings.worker_concurrency, settings.worker_lease_seconds, settings.worker_stop_grace_seconds) == (10, 30, 20)


def test_a_lease_is_renewed_at_a_third_and_trusted_less_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(monkeypatch, worker_lease_seconds="30", worker_lease_margin_seconds="3")

    assert (settings.renew_after_seconds, settings.trusted_seconds) == (10, 27)


def test_a_missing_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_DATABASE_URL")

    assert refusal(monkeypatch) == "FENCEPOST_DATABASE_URL is required: set it in the environment"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_lease_seconds", "0"),
        ("worker_lease_seconds", "-1"),
        ("worker_lease_seconds", "nan"),
        ("worker_lease_seconds", "inf"),
        ("worker_lease_seconds", "3601"),
        ("worker_lease_margin_seconds", "0"),
        ("worker_concurrency", "0"),
        ("worker_concurrency", "10001"),
        ("worker_concurrency", "1.5"),
        ("worker_stop_grace_seconds", "-1"),
        ("worker_cancel_grace_seconds", "601"),
        ("worker_poll_interval_ms", "4"),
        ("worker_poll_interval_ms", "60001"),
        ("worker_http_port", "65536"),
        ("ledger_retention_days", "-1"),
        ("ledger_retention_days", "3651"),
        ("ledger_retention_days", "nan"),
        ("worker_http_host", ""),
        ("worker_name", " "),
        ("worker_name", "x" * 201),
        ("worker_wakeup", "sometimes"),
        ("worker_log_level", "loud"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """JOB-38."""
    assert refusal(monkeypatch, **{name: value}).startswith(f"FENCEPOST_{name.upper()}")


@pytest.mark.parametrize(
    ("lease", "margin", "fits"), [("3", "1", True), ("3", "1.01", False), ("1", "0.3", True), ("1", "3", False)]
)
def test_a_renewal_that_fails_must_leave_time_for_another(
    monkeypatch: pytest.MonkeyPatch, lease: str, margin: str, fits: bool
) -> None:
    environment = {"worker_lease_seconds": lease, "worker_lease_margin_seconds": margin}
    if fits:
        assert loaded(monkeypatch, **environment).trusted_seconds > 0
    else:
        told = refusal(monkeypatch, **environment)
        assert "FENCEPOST_WORKER_LEASE_MARGIN_SECONDS" in told
        assert "FENCEPOST_WORKER_LEASE_SECONDS" in told


@pytest.mark.parametrize(
    "address", [f"mysql://worker:{SECRET}@db/app", f"{SECRET}", "", f"postgresql://worker:{SECRET}@db:port/app"]
)
def test_a_wrong_address_is_refused_without_being_quoted(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    told = refusal(monkeypatch, database_url=address)

    assert told.startswith("FENCEPOST_DATABASE_URL")
    assert SECRET not in told


def test_every_fault_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(monkeypatch, worker_concurrency="0", worker_wakeup="sometimes", database_url="")

    for name in ("FENCEPOST_WORKER_CONCURRENCY", "FENCEPOST_WORKER_WAKEUP", "FENCEPOST_DATABASE_URL"):
        assert name in told


def test_no_secret_is_shown_with_the_settings() -> None:
    assert SECRET not in repr(load_worker_settings())


def test_settings_cannot_be_changed() -> None:
    settings = load_worker_settings()

    with pytest.raises(ValidationError):
        settings.worker_concurrency = 3


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="WORKER_LEASE_SECOND"):
        load_worker_settings({"worker_lease_second": 3})


def test_white_space_around_a_value_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(monkeypatch, worker_name="  press-1\n", worker_concurrency=" 20\n", worker_wakeup=" poll ")

    assert (settings.worker_name, settings.worker_concurrency, settings.worker_wakeup) == ("press-1", 20, "poll")


def test_every_setting_says_what_it_is_and_what_it_defaults_to() -> None:
    for name, field in WorkerSettings.model_fields.items():
        assert field.description, name
        assert "Defaults to" in field.description or "Required" in field.description, name
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
            assert f"Defaults to {field.default}" in field.description, name
