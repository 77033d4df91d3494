"""What tools and schemas say of the manifests, and how their parts fit together."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.manifests import (
    ADDED,
    DEPLOY,
    KSERVE,
    KUBERNETES,
    ROOT,
    WHOLE,
    Manifest,
    containers,
    kustomized,
    one,
    read,
)

from xlaserve.cli import parser
from xlaserve.config import load
from xlaserve.processes.front import FLUSH_S

SCHEMAS = Path(__file__).parent / "schemas"
MOST_APPLIED_BYTES = 2**18
"""What an annotation may hold: `kubectl apply` keeps all of the manifest in one."""
VERSIONS = ("1.32", "1.37")
"""Of Kubernetes: the oldest and the newest that are checked."""
BASE = [
    document
    for file in sorted((KUBERNETES / "base").glob("*.yaml"))
    for document in read(file)
    if document.get("kind", "Kustomization") != "Kustomization"
]
RUNTIME = read(KSERVE / "runtime.yaml")[0]
MONITORING = KUBERNETES / "overlays" / "monitoring"
RULES = read(MONITORING / "rules.yaml")[0]
FILES = sorted(KSERVE.glob("*.yaml"))


def wrong_by_kubernetes(manifest: Manifest, version: str = VERSIONS[-1]) -> str:
    """Returns what Kubernetes would not take, nothing where it takes all."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


def wrong_by_our_schema(manifest: Manifest) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / f"{manifest['kind'].lower()}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in errors]


def check(manifest: Manifest, version: str = VERSIONS[-1]) -> None:
    has_our_schema = (SCHEMAS / f"{manifest['kind'].lower()}.json").exists()
    assert (wrong_by_our_schema(manifest) if has_our_schema else wrong_by_kubernetes(manifest, version)) in ([], "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", ["base", *WHOLE, *ADDED])
def test_kustomize_builds_what_kubernetes_takes(overlay: str, version: str) -> None:
    folder = KUBERNETES / overlay if overlay == "base" else KUBERNETES / "overlays" / overlay
    manifests = kustomized(folder)
    for manifest in manifests:
        check(manifest, version)
    if overlay not in ADDED:
        kinds = {manifest["kind"] for manifest in manifests}
        assert kinds == {
            *("ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount")
        }


@pytest.mark.parametrize("manifest", BASE, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}")
def test_kubernetes_takes_the_base(manifest: Manifest) -> None:
    check(manifest)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.stem))
def test_kserve_takes_its_resources(file: Path) -> None:
    for manifest in read(file):
        assert wrong_by_our_schema(manifest) == []


def test_the_runtimes_container_is_one_that_kubernetes_takes() -> None:
    spec = {"containers": RUNTIME["spec"]["containers"], "volumes": RUNTIME["spec"]["volumes"]}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec})


def test_a_misspelt_field_is_noticed() -> None:
    deployment = json.loads(json.dumps(one(BASE, "Deployment")))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    assert "livenessProbes" in wrong_by_kubernetes(deployment)
    runtime = {**RUNTIME, "spec": {**RUNTIME["spec"], "protocols": ["v2"]}}
    assert any("protocols" in message for message in wrong_by_our_schema(runtime))
    rules = json.loads(json.dumps(RULES))
    rules["spec"]["groups"][0]["rules"][0]["expression"] = rules["spec"]["groups"][0]["rules"][0].pop("expr")
    assert any("expression" in message for message in wrong_by_our_schema(rules))


# How the parts fit together.

DEPLOYMENT = one(BASE, "Deployment")
POD = DEPLOYMENT["spec"]["template"]
(SERVER,) = containers(DEPLOYMENT)
PORTS = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
LABELS = POD["metadata"]["labels"].items()


def test_a_pod_has_the_time_that_its_server_takes_to_stop() -> None:
    settings = load(KUBERNETES / "base" / "xlaserve.yaml", environ={})
    command, waits = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    takes_s = int(waits) + settings.shutdown_delay_s + settings.drain_timeout_s + 3 * FLUSH_S
    assert takes_s < POD["spec"]["terminationGracePeriodSeconds"]


def test_a_server_that_hangs_is_seen_to_be_gone_while_it_still_serves() -> None:
    """Readiness is lost within what a server goes on serving after it was told to stop."""
    readiness = SERVER["readinessProbe"]
    settings = load(KUBERNETES / "base" / "xlaserve.yaml", environ={})
    waits = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= waits + settings.shutdown_delay_s


def test_everything_selects_the_pods_and_names_their_ports() -> None:
    selectors = [DEPLOYMENT["spec"]["selector"], one(BASE, "PodDisruptionBudget")["spec"]["selector"]]
    selectors += [one(BASE, "NetworkPolicy")["spec"]["podSelector"]]
    (monitor,), (policy,) = read(MONITORING / "podmonitor.yaml"), read(MONITORING / "network.yaml")
    selectors += [monitor["spec"]["selector"], policy["spec"]["podSelector"]]
    services = [each for each in BASE if each["kind"] == "Service"]
    selectors += [{"matchLabels": service["spec"]["selector"]} for service in services]
    assert all(selector["matchLabels"].items() <= LABELS for selector in selectors)
    for service in services:
        assert all(
            port["targetPort"] in PORTS and PORTS[port["targetPort"]] == port["port"]
            for port in service["spec"]["ports"]
        )
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    allowed = {
        port["port"]
        for each in (one(BASE, "NetworkPolicy"), policy)
        for rule in each["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert allowed == set(PORTS.values())


def test_the_operators_rules_are_those_of_prometheus() -> None:
    files = [read(DEPLOY / "prometheus" / f"{name}.rules.yaml")[0] for name in ("recording", "alerts")]
    assert RULES["spec"]["groups"] == [group for file in files for group in file["groups"]]


def test_each_dashboard_is_a_labelled_config_map_that_kubectl_can_apply() -> None:
    found = [each for each in kustomized(MONITORING) if each["kind"] == "ConfigMap"]
    dashboards = {file.name: file.read_text() for file in (DEPLOY / "grafana" / "dashboards").glob("*.json")}
    assert {name: text for each in found for name, text in each["data"].items()} == dashboards
    for each in found:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(each)) < MOST_APPLIED_BYTES


def test_one_service_is_headless_for_clients_that_balance_calls() -> None:
    headless = one(BASE, "Service", "xlaserve-headless")
    assert headless["spec"]["clusterIP"] == "None"
    assert [port["name"] for port in headless["spec"]["ports"]] == ["grpc"]


def test_the_ports_are_the_servers_own() -> None:
    settings = load(environ={})
    assert {"grpc": settings.grpc_port, "http": settings.http_port, "metrics": settings.metrics_port} == PORTS


@pytest.mark.parametrize(
    "security",
    [
        {**POD["spec"]["securityContext"], **SERVER["securityContext"]},
        RUNTIME["spec"]["containers"][0]["securityContext"],
    ],
    ids=["deployment", "runtime"],
)
def test_pods_are_restricted(security: Mapping[str, Any]) -> None:
    """What the Pod Security Standard `restricted` asks for, and a root that can't be written."""
    assert security["runAsNonRoot"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"\nUSER {security['runAsUser']}:{security['runAsGroup']}\n" in dockerfile


def test_the_arguments_are_those_of_the_command() -> None:
    parser().parse_args(SERVER["args"])
    options = parser().parse_args(
        [text.replace("{{.Name}}", "flowers") for text in RUNTIME["spec"]["containers"][0]["args"]]
    )
    assert options.models[0]["name"] == "flowers"


def test_autoscalers_ask_for_metrics_that_there_are() -> None:
    text = (KUBERNETES / "overlays" / "keda" / "autoscaler.yaml").read_text()
    text += (ROOT / "docs" / "deploy.md").read_text()
    known = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    asked = set(re.findall(r"\bxlaserve_[a-z_]+_(?:seconds|total|lanes)\b|\bxlaserve_lanes\b", text))
    assert "xlaserve_queued_work_seconds" in asked
    assert [
        name for name in asked if f"`{name.removesuffix('_total')}`" not in known and f"`{name}`" not in known
    ] == []


def test_the_canary_differs_from_the_stable_service_by_model_and_share() -> None:
    (stable,), (canary,) = read(KSERVE / "inferenceservice.yaml"), read(KSERVE / "canary.yaml")
    assert stable["metadata"] == canary["metadata"]
    changed = json.loads(json.dumps(canary))
    assert changed["spec"]["predictor"].pop("canaryTrafficPercent") == 10
    assert changed["spec"]["predictor"]["model"].pop("storageUri") != stable["spec"]["predictor"]["model"]["storageUri"]
    changed["spec"]["predictor"]["model"]["storageUri"] = stable["spec"]["predictor"]["model"]["storageUri"]
    assert changed == stable


def test_the_example_of_the_documentation_builds(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    for name in ("grafana", "kubernetes"):
        shutil.copytree(DEPLOY / name, tmp_path / "xlaserve" / "deploy" / name)
    shutil.copy(KUBERNETES / "base" / "xlaserve.yaml", tmp_path)
    for name, words in {"kustomization.yaml": "kind: Kustomization", "models.yaml": "persistentVolumeClaim"}.items():
        (block,) = (block for block in blocks if words in block)
        (tmp_path / name).write_text(block)
    (target,) = (block for block in blocks if "patchesJson6902" in block)
    with (tmp_path / "kustomization.yaml").open("a") as file:
        file.write(target)
    manifests = kustomized(tmp_path)
    assert one(manifests, "ScaledObject")["spec"]["triggers"][0]["metadata"]["threshold"] == "0.005"
    volumes = one(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in volumes
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"xlaserve"}
    for manifest in manifests:
        check(manifest)
