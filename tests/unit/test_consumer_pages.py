"""The page on deploying consumers, where it repeats the code: environment, probes, graces, metrics in alerts."""

import re
from pathlib import Path
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from consumer_sdk.consumer_metrics import ConsumerMetrics
from consumer_sdk.consumer_settings import ConsumerSettings, load_consumer_settings
from consumer_sdk.delivery import DEAD_REASONS

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
BLOCK: Final = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
GOOD_BYE_SECONDS: Final = 10


@pytest.fixture
def blocks() -> list[Any]:
    return [yaml.safe_load(block) for block in BLOCK.findall((DOCS / "how-to" / "consumers.md").read_text())]


@pytest.fixture
def pod(blocks: list[Any]) -> Any:
    [deployment] = [block for block in blocks if block.get("kind") == "Deployment"]
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    return deployment["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    [found] = pod["containers"]
    return found


@pytest.fixture
def rules(blocks: list[Any]) -> list[Any]:
    [found] = [block for block in blocks if "groups" in block]
    return [rule for group in found["groups"] for rule in group["rules"]]


@pytest.fixture
def settings(container: Any, monkeypatch: pytest.MonkeyPatch) -> ConsumerSettings:
    """Those of a consumer that starts with the pod's environment."""
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "postgresql://consumer@db/app"))
    return load_consumer_settings()


def test_the_deployment_sets_only_what_is_read(container: Any) -> None:
    read = {f"FENCEPOST_{name.upper()}" for name in ConsumerSettings.model_fields} | {"FENCEPOST_IDEMPOTENCY_SECRETS"}
    assert {variable["name"] for variable in container["env"]} <= read
    secret = {variable["name"] for variable in container["env"] if "valueFrom" in variable}
    assert secret == {"FENCEPOST_DATABASE_URL", "FENCEPOST_IDEMPOTENCY_SECRETS"}


def test_the_pod_outlives_the_consumer_s_own_stop(pod: Any, settings: ConsumerSettings) -> None:
    assert pod["terminationGracePeriodSeconds"] >= settings.consumer_stop_grace_seconds + GOOD_BYE_SECONDS


def test_the_probes_reach_the_consumer(container: Any, settings: ConsumerSettings) -> None:
    assert settings.consumer_http_host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [settings.consumer_http_port]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}


def metric_names() -> set[str]:
    metrics = ConsumerMetrics(version="0", holder="h", types=["order.placed"], topics=["orders"])
    metrics.attempt("order.placed", 1)
    collected = list(metrics.registry.collect())
    totals = {f"{metric.name}_total" for metric in collected if metric.type == "counter"}
    return {sample.name for metric in collected for sample in metric.samples} | {metric.name for metric in collected} | totals


def test_an_alert_asks_for_metrics_that_a_consumer_has(rules: list[Any]) -> None:
    names = metric_names()
    for rule in rules:
        asked = set(re.findall(r"fencepost_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= names


@pytest.mark.parametrize("page", ["how-to/consumers.md", "guides/consuming.md", "guides/outside-effects.md"])
def test_a_page_names_no_metric_of_a_consumer_that_there_is_not(page: str) -> None:
    assert set(re.findall(r"fencepost_consumer_\w+", (DOCS / page).read_text())) <= metric_names() | {"fencepost_consumer"}


def test_what_can_go_wrong_names_only_metrics_that_there_are() -> None:
    text = (DOCS / "concepts" / "what-can-go-wrong.md").read_text()
    named = {f"fencepost_consumer_{name}" for name in re.findall(r"`([a-z_]+_(?:total|seconds|messages|waiting))\b", text)}
    assert len(named) > 8
    assert named - metric_names() <= {"fencepost_consumer_attempt_seconds", "fencepost_consumer_patience_seconds"}


def test_every_reason_of_a_dead_letter_is_explained() -> None:
    text = (DOCS / "concepts" / "what-can-go-wrong.md").read_text()
    table = text.partition("| reason |")[2].partition("\n\n")[0]
    explained = set(re.findall(r"`([a-z_]+)`", "\n".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert explained == set(DEAD_REASONS)


def test_a_rule_says_how_bad_it_is_what_it_means_and_where_to_read_on(rules: list[Any]) -> None:
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        runbook = rule["annotations"].get("runbook")
        assert runbook is None or (ROOT / runbook).is_file()
        assert runbook or rule["labels"]["severity"] != "page"


def test_every_variable_of_the_pages_is_read() -> None:
    read = {f"FENCEPOST_{name.upper()}" for name in ConsumerSettings.model_fields}
    for page in ("guides/consuming.md", "guides/transactional-effects.md", "concepts/what-can-go-wrong.md", "how-to/consumers.md"):
        assert set(re.findall(r"FENCEPOST_CONSUMER_\w+", (DOCS / page).read_text())) <= read
