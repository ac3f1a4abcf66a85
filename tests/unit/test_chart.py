"""What helm/ renders, held against the relay that it runs. scripts/check_chart checks the chart for itself."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

from relay.settings import RelaySettings, load_settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]

# The one setting that is a secret: the chart takes it by reference.
SETTINGS = {to_camel(name): name for name in RelaySettings.model_fields if name != "database_url"}


@pytest.fixture(scope="session")
def helm() -> str:
    command = [sys.executable, str(ROOT / "scripts" / "check_chart"), "--helm"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def render(helm: str) -> Render:
    def render(*settings: str, values: str = "default") -> list[Manifest]:
        command = [helm, "template", "test", str(CHART), "--values", str(CHART / "ci" / f"{values}-values.yaml")]
        for setting in settings:
            command += ["--set-json", setting]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]

    return render


@pytest.fixture(scope="session")
def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def pod_of(manifests: list[Manifest], kind: str) -> Any:
    return of_kind(manifests, kind)["spec"]["template"]["spec"]


def environment(pod: Any) -> dict[str, Any]:
    return {variable["name"]: variable for variable in pod["containers"][0]["env"]}


def settings_of(pod: Any, monkeypatch: pytest.MonkeyPatch) -> RelaySettings:
    """The settings of a relay that starts with the pod's environment."""
    monkeypatch.setenv("FENCEPOST_DATABASE_URL", "postgresql://relay@localhost/orders")
    for name, variable in environment(pod).items():
        if "value" in variable:
            monkeypatch.setenv(name, variable["value"])
    return load_settings()


def test_the_chart_offers_every_setting_of_the_relay_and_no_other(schema: Any) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert set(values["relay"]["settings"]) == set(SETTINGS)
    assert set(schema["properties"]["relay"]["properties"]["settings"]["properties"]) == set(SETTINGS)


def test_the_relay_takes_each_setting_as_the_chart_spells_it(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    given = yaml.safe_load((CHART / "ci" / "every-setting-values.yaml").read_text())["relay"]["settings"]

    taken = settings_of(pod_of(render(values="every-setting"), "Deployment"), monkeypatch)

    assert set(given) == set(SETTINGS)
    assert taken.model_dump(mode="json", include=set(SETTINGS.values())) == {SETTINGS[name]: value for name, value in given.items()}


def test_a_setting_left_alone_has_the_relay_s_own_default(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = settings_of(pod_of(render(), "Deployment"), monkeypatch)
    chosen_by_the_chart = {"database_url", "kafka_bootstrap_servers", "http_host"}

    for name, field in RelaySettings.model_fields.items():
        if name not in chosen_by_the_chart:
            assert getattr(taken, name) == field.get_default(call_default_factory=True), name


def test_the_chart_accepts_what_the_relay_accepts(schema: Any) -> None:
    chart = schema["properties"]["relay"]["properties"]["settings"]["properties"]
    relay = RelaySettings.model_json_schema()["properties"]

    def limits(setting: Any) -> dict[str, Any]:
        return {limit: setting[limit] for limit in ("type", "enum", "minimum", "maximum", "maxLength") if limit in setting}

    # A process without privileges can't open a port below 1024, and of a budget the relay checks more than its range.
    narrower = {"http_port": {"minimum": 1024}, "memory_budget_bytes": {"minimum": 2 * 1024 * 1024}}
    for camel, name in SETTINGS.items():
        assert limits(chart[camel]) == limits(relay[name]) | narrower.get(name, {}), name


def test_the_lease_relation_is_refused_before_it_reaches_the_cluster(helm: str) -> None:
    command = [helm, "template", "test", str(CHART), "--values", str(CHART / "ci" / "default-values.yaml")]
    command += ["--set", "relay.settings.leaseSeconds=12"]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode != 0
    assert "must be less than leaseSeconds (12)" in result.stderr


@pytest.mark.parametrize(("stop_grace", "grace_period"), [("15", 25), ("45.5", 56), ("1", 11)])
def test_the_pod_outlives_the_relay_s_own_stop(render: Render, stop_grace: str, grace_period: int) -> None:
    pod = pod_of(render(f"relay.settings.stopGraceSeconds={stop_grace}"), "Deployment")

    assert pod["terminationGracePeriodSeconds"] == grace_period


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_no_pod_is_root_or_can_become_it(render: Render, kind: str) -> None:
    pod = pod_of(render(), kind)
    [container] = pod["containers"]

    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_no_pod_gets_a_token_or_variables_derived_from_services(render: Render, kind: str) -> None:
    pod = pod_of(render(), kind)

    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_a_platform_may_choose_the_user_id_but_not_root(render: Render) -> None:
    pod = pod_of(render(values="service-account"), "Deployment")

    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_probes_ask_the_port_that_the_relay_serves(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = pod_of(render("relay.settings.httpPort=8080"), "Deployment")
    [container] = pod["containers"]

    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["startupProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["ports"] == [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]
    assert settings_of(pod, monkeypatch).http_port == 8080
    assert settings_of(pod, monkeypatch).http_host == "0.0.0.0"


def test_the_database_url_comes_by_reference_and_the_chart_makes_no_secret(render: Render) -> None:
    manifests = render()

    for kind in ("Deployment", "Job"):
        assert environment(pod_of(manifests, kind))["FENCEPOST_DATABASE_URL"]["valueFrom"] == {
            "secretKeyRef": {"name": "orders-db", "key": "database-url"}
        }
    assert {manifest["kind"] for manifest in manifests} == {"Deployment", "Job", "Service", "ServiceAccount"}


def test_the_migrating_role_has_a_secret_that_the_relays_never_see(render: Render) -> None:
    manifests = render(values="migration-role")

    assert "orders-db-owner" in str(pod_of(manifests, "Job"))
    assert "orders-db-owner" not in str(pod_of(manifests, "Deployment"))
    assert "orders-db-relay" not in str(pod_of(manifests, "Job"))


def test_migrations_run_before_an_install_and_before_an_upgrade(render: Render) -> None:
    job = of_kind(render(), "Job")

    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["migrate"]
    # The hook runs ahead of the release, whose account is not there yet.
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "default"


def test_migrations_can_be_left_to_others(render: Render) -> None:
    assert "Job" not in {manifest["kind"] for manifest in render(values="no-migration")}


def test_the_service_leads_to_the_relays_and_not_to_the_migration(render: Render) -> None:
    manifests = render()
    selector = of_kind(manifests, "Service")["spec"]["selector"]

    def labels(kind: str) -> Any:
        return of_kind(manifests, kind)["spec"]["template"]["metadata"]["labels"]

    assert selector.items() <= labels("Deployment").items()
    assert not selector.items() <= labels("Job").items()
    assert selector == of_kind(manifests, "Deployment")["spec"]["selector"]["matchLabels"]


def test_two_relays_prefer_different_zones_and_hosts(render: Render) -> None:
    deployment = of_kind(render(), "Deployment")
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]

    assert deployment["spec"]["replicas"] == 2
    assert [rule["topologyKey"] for rule in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert {rule["whenUnsatisfiable"] for rule in spread} == {"ScheduleAnyway"}


def test_the_chart_installs_this_release(render: Render) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    assert pod_of(render(), "Deployment")["containers"][0]["image"] == f"example/fencepost:{version}"
