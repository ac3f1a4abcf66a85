"""Pages that people write, where they repeat the code: fields of commands, environment variables, a worker's manifests."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import typer
import yaml

from consumer_sdk.worker_metrics import WorkerMetrics
from consumer_sdk.worker_settings import WorkerSettings, load_worker_settings
from fencepost.cli import app
from fencepost.secrets import _SECRETS_VARIABLE, _WRITE_VARIABLE, MAX_SECRET_VERSION, MIN_SECRET_BYTES
from producer_sdk import Command
from producer_sdk.acceptance import KEY_RETENTION_SECONDS, MAX_KEY_RETENTION_SECONDS, MAX_WAIT_SECONDS
from producer_sdk.command_rules import MAX_ATTEMPTS, MAX_COST_DECIMALS, MAX_INPUT_BYTES, MAX_SECONDS

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
REFERENCE: Final = DOCS / "reference"
BLOCK: Final = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
REPEATED: Final = ("", "the input", "the plain one", "a new UUIDv7", "OpenTelemetry's current span, where it is used")


def rows_of(page: Path) -> list[list[str]]:
    """The cells of each row whose first is in code font."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# Commands


@pytest.fixture
def fields() -> dict[str, list[str]]:
    return {cells[0].strip("`"): cells[1:] for cells in rows_of(REFERENCE / "commands-of-runs.md")}


def test_every_field_of_a_command_is_in_the_table_and_no_other(fields: dict[str, list[str]]) -> None:
    assert list(fields) == list(inspect.signature(Command).parameters)
    assert set(fields) - {"codec"} == {field.name for field in dataclasses.fields(Command) if field.init}


def test_the_table_gives_the_default_of_every_field(fields: dict[str, list[str]]) -> None:
    written = {"none": None, "required": inspect.Parameter.empty}
    for name, parameter in inspect.signature(Command).parameters.items():
        said = fields[name][0]
        if said in REPEATED:
            continue
        value = parameter.default
        assert said == f"`{value}`" or (said in written and written[said] is value), name


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("input", f"{MAX_INPUT_BYTES:,} bytes"), ("max_attempts", f"1 to {MAX_ATTEMPTS:,}"),
        ("delay_seconds", f"0 to {MAX_SECONDS:,}"),
        ("deadline_seconds", f"to {MAX_SECONDS:,}"), ("cost_limit", f"{MAX_COST_DECIMALS} decimals"), ("version", f"{2**31 - 1:,}"),
    ],
)  # fmt: skip
def test_the_table_gives_the_limit_of_a_field(fields: dict[str, list[str]], field: str, limit: str) -> None:
    assert limit in fields[field][1]


def test_the_page_gives_the_limits_of_accept() -> None:
    page = (REFERENCE / "commands-of-runs.md").read_text()
    assert f"`key_retention_seconds` ({KEY_RETENTION_SECONDS:,.0f}; 1 to {MAX_KEY_RETENTION_SECONDS:,})" in page
    assert f"`wait_seconds` (0; 0 to {MAX_WAIT_SECONDS})" in page


# Environment variables


def variables_of(command: Any) -> Iterator[str]:
    """Those of a command's options, and of the commands below it."""
    for parameter in command.params:
        names = parameter.envvar or ()
        yield from [names] if isinstance(names, str) else names
    for inner in getattr(command, "commands", {}).values():
        yield from variables_of(inner)


def test_every_variable_that_is_read_has_a_row_in_a_reference_of_settings() -> None:
    documented = {cells[0].strip("`") for page in REFERENCE.glob("*settings.md") for cells in rows_of(page)}
    read = {*variables_of(typer.main.get_command(app())), _SECRETS_VARIABLE, _WRITE_VARIABLE}
    assert "FENCEPOST_LEDGER_RETENTION_HOURS" in read
    assert read <= documented


def test_the_row_of_the_secrets_gives_their_limits() -> None:
    [row] = [cells for cells in rows_of(REFERENCE / "other-settings.md") if cells[0] == f"`{_SECRETS_VARIABLE}`"]
    assert f"Versions 1 to {MAX_SECRET_VERSION:,}, at least {MIN_SECRET_BYTES} bytes each" in row[3]


# The worker's manifests


@pytest.mark.parametrize(
    "page", sorted(page for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text())), ids=lambda p: p.name
)
def test_every_yaml_block_of_the_documents_is_yaml(page: Path) -> None:
    for block in BLOCK.findall(page.read_text()):
        assert yaml.safe_load(block)


@pytest.fixture
def blocks() -> list[Any]:
    return [yaml.safe_load(block) for block in BLOCK.findall((DOCS / "how-to" / "workers.md").read_text())]


@pytest.fixture
def deployment(blocks: list[Any]) -> Any:
    [found] = [block for block in blocks if block.get("kind") == "Deployment"]
    return found


@pytest.fixture
def rules(blocks: list[Any]) -> list[Any]:
    [found] = [block for block in blocks if "groups" in block]
    return [rule for group in found["groups"] for rule in group["rules"]]


def settings_of(deployment: Any, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """Those of a worker that starts with the pod's environment."""
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "postgresql://worker@db/app"))
    return load_worker_settings()


def test_the_deployment_is_one_that_kubernetes_takes(deployment: Any) -> None:
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


def test_the_deployment_sets_only_what_the_worker_reads(deployment: Any) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert {variable["name"] for variable in container["env"]} <= {
        f"FENCEPOST_{name.upper()}" for name in WorkerSettings.model_fields
    }
    assert "secretKeyRef" in container["env"][0]["valueFrom"]


def test_the_pod_outlives_the_worker_s_own_stop(deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= settings_of(deployment, monkeypatch).worker_stop_grace_seconds + 5


def test_the_probes_reach_the_worker(deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(deployment, monkeypatch)
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert settings.worker_http_host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [settings.worker_http_port]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}


def test_an_alert_asks_for_metrics_that_a_worker_has(rules: list[Any]) -> None:
    registry = WorkerMetrics(version="0", worker_id="w", workflows=["send_invoice"]).registry
    names = {sample.name for metric in registry.collect() for sample in metric.samples} | {
        metric.name for metric in registry.collect()
    }
    names |= {f"{metric.name}_total" for metric in registry.collect() if metric.type == "counter"}
    for rule in rules:
        asked = set(re.findall(r"fencepost_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= names


def test_every_alert_of_the_guide_is_a_rule(rules: list[Any]) -> None:
    guide = (DOCS / "guides" / "executing.md").read_text()
    table = guide.partition("## What to alert on")[2].partition("[")[0]
    asked = {name for rule in rules for name in re.findall(r"fencepost_\w+", rule["expr"])}
    assert len(asked) > 5
    assert set(re.findall(r"`[^`]*?(fencepost_\w+)", table)) <= asked


def test_a_rule_says_how_bad_it_is_what_it_means_and_where_to_read_on(rules: list[Any]) -> None:
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        runbook = rule["annotations"].get("runbook")
        assert runbook is None or (ROOT / runbook).is_file()
        assert runbook or rule["labels"]["severity"] != "page"
