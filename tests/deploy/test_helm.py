"""The chart of deploy/helm: what helm and Kubernetes say of it, and that it is the manifests for kustomize."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.manifests import KUBERNETES, ROOT, Manifest, containers, kustomized, needed_helm, one
from tests.deploy.test_manifests import VERSIONS, check

from xlaserve.config import load

CHART = ROOT / "deploy" / "helm" / "xlaserve"
OF_HELM = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "checksum/config",
    "helm.sh/chart",
}
"""Labels and annotations by which releases are told apart; the manifests for kustomize have none of them."""
GPU = next(
    block
    for block in re.findall(r"```yaml\n(# values.yaml.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL)
    if "nvidia.com/gpu" in block
)
VARIANTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "cpu": ((), ("cpu",)),
    "gpu": (("--values", "gpu.yaml"), ("gpu",)),
    "tls": (("--set", "tls.secretName=xlaserve-tls"), ("tls",)),
    "hpa": (("--set", "autoscaling.kind=hpa"), ("cpu", "hpa")),
    "keda": (("--set", "autoscaling.kind=keda"), ("cpu", "keda")),
    "monitoring": (("--set", "monitoring.enabled=true"), ("cpu", "monitoring")),
}
"""Options of helm, and the overlays that say the same."""
TIMEOUT_S = 60


def helm(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    (folder / "gpu.yaml").write_text(GPU) if folder != ROOT else None
    return subprocess.run(
        [needed_helm(), *words], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def rendered(folder: Path, *options: str, release: str = "xlaserve") -> list[Manifest]:
    done = helm("template", release, str(CHART), "--namespace", "xlaserve", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def plain(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Any]:
    """Returns them by kind and name, without what helm and kustomize each add, and with what files hold."""
    hashed = {
        name: re.sub(r"^xlaserve-[a-z0-9]{10}$", "xlaserve", name)
        for name in (each["metadata"]["name"] for each in manifests if each["kind"] == "ConfigMap")
    }
    return {
        (each["kind"], each["metadata"]["name"]): each for each in (_plain(manifest, hashed) for manifest in manifests)
    }


def _plain(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        kept = {key: _plain(one, names) for key, one in value.items() if key not in OF_HELM}
        return {key: one for key, one in kept.items() if (key, one) != ("annotations", {})}
    if isinstance(value, list):
        found = [_plain(one, names) for one in value]
        is_named = all(isinstance(one, dict) and "name" in one for one in found)
        return sorted(found, key=lambda one: str(one["name"])) if is_named else found
    if isinstance(value, str) and value.endswith("\n"):
        return yaml.safe_load(value)
    return names.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_renders_what_kustomize_builds(variant: str, tmp_path: Path) -> None:
    options, overlays = VARIANTS[variant]
    built = [manifest for name in overlays for manifest in kustomized(KUBERNETES / "overlays" / name)]
    found, expected = plain(rendered(tmp_path, *options)), plain(built)
    assert found.keys() == expected.keys()
    for key, manifest in expected.items():
        assert found[key] == manifest, key


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_and_operators_take_what_it_renders(variant: str, version: str, tmp_path: Path) -> None:
    for manifest in rendered(tmp_path, *VARIANTS[variant][0]):
        check(manifest, version)


def test_helm_finds_nothing_to_say_against_it() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_a_package_of_it_needs_no_files_of_this_repository(tmp_path: Path) -> None:
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    command = ("template", "xlaserve", package.name, "--namespace", "xlaserve", "--set", "monitoring.enabled=true")
    packed = helm(*command, folder=tmp_path)
    kinds = {manifest["kind"] for manifest in yaml.safe_load_all(packed.stdout)}
    assert {"PrometheusRule", "PodMonitor"} < kinds
    assert plain(list(yaml.safe_load_all(packed.stdout))) == plain(
        rendered(tmp_path, "--set", "monitoring.enabled=true")
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("autoscaling.kind=vpa", "at '/autoscaling/kind': value must be one of 'none', 'hpa', 'keda'"),
        ("replica=3", "additional properties 'replica' not allowed"),
        ("replicas=-1", "at '/replicas': minimum: got -1, want 0"),
        ("image.tag=1", "at '/image/tag': got number, want string"),
        ("config.models=null", "at '/config': missing property 'models'"),
        ("config.drain_timeout_s=soon", "at '/config/drain_timeout_s': got string, want number"),
        ("autoscaling.busyShare=80", "at '/autoscaling/busyShare': maximum: got 80, want 1"),
        ("models.a.x=1,models.b.x=2", "at '/models': maxProperties: got 2, want 1"),
        ("tls.secret=mine", "additional properties 'secret' not allowed"),
        ("env.B.c=1", "at '/env/B': got object, want "),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(value: str, said: str, tmp_path: Path) -> None:
    done = helm("template", "xlaserve", str(CHART), "--set", value, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr


def test_every_value_has_a_place_in_what_is_rendered(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "image": {"repository": "registry.example/xlaserve", "tag": "2", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 3,
        "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": None, "memory": "8Gi"}},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "servers"},
        "config": {"drain_timeout_s": 300, "max_queue_bytes": 268435456},
        "env": {"XLASERVE_FRONTS": 2, "XLASERVE_MAX_INFLIGHT_BYTES": 268435456, "XLASERVE_ADMIN": True},
        "models": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        "tls": {"secretName": "mine"},
        "autoscaling": {
            "kind": "keda",
            "minReplicas": 1,
            "maxReplicas": 5,
            "queuedWorkSeconds": 0.005,
            "busyShare": 0.5,
            "prometheus": "http://prometheus:9090",
        },
        "monitoring": {"enabled": True, "namespace": "watch", "labels": {"release": "prometheus"}},
    }
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == defaults.keys()
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    manifests = rendered(tmp_path, "--values", "values.yaml")
    for manifest in manifests:
        check(manifest)
    deployment = one(manifests, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (server,) = containers(deployment)
    assert deployment["spec"]["replicas"] == 3
    assert pod["terminationGracePeriodSeconds"] == 330
    assert (pod["imagePullSecrets"], pod["nodeSelector"], pod["tolerations"]) == (
        values["imagePullSecrets"],
        values["nodeSelector"],
        values["tolerations"],
    )
    assert (server["image"], server["imagePullPolicy"]) == ("registry.example/xlaserve:2", "Always")
    assert server["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}}
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    # Helm's numbers are floating-point ones: 268435456 must not become 2.68435456e+08.
    settings = load(
        environ={name: value for name, value in environment.items() if "TLS" not in name and "CONFIG" not in name}
    )
    assert (settings.fronts, settings.max_inflight_bytes, settings.admin) == (2, 268435456, True)
    (text,) = (each["data"]["xlaserve.yaml"] for each in manifests if "xlaserve.yaml" in each.get("data", {}))
    (tmp_path / "xlaserve.yaml").write_text(text)
    configured = load(tmp_path / "xlaserve.yaml", environ={})
    assert (configured.drain_timeout_s, configured.max_queue_bytes) == (300, 268435456)
    assert configured.models[0].name == "digits"
    assert {"name": "models", **values["models"]} in pod["volumes"]
    assert {"name": "tls", "secret": {"secretName": "mine", "defaultMode": 288}} in pod["volumes"]
    scaled = one(manifests, "ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 5)
    assert [trigger["metadata"]["threshold"] for trigger in scaled["triggers"]] == ["0.005", "0.5"]
    assert {trigger["metadata"]["serverAddress"] for trigger in scaled["triggers"]} == {"http://prometheus:9090"}
    for kind in ("PodMonitor", "PrometheusRule"):
        assert one(manifests, kind)["metadata"]["labels"]["release"] == "prometheus"
    metrics = one(manifests, "NetworkPolicy", "xlaserve-metrics")
    (source,) = metrics["spec"]["ingress"][0]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "watch"}


def test_another_configuration_rolls_the_pods(tmp_path: Path) -> None:
    def checksum(*options: str) -> str:
        pods = one(rendered(tmp_path, *options), "Deployment")["spec"]["template"]
        return str(pods["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum("--set", "monitoring.enabled=true")
    assert checksum() != checksum("--set", "config.drain_timeout_s=31")


def test_two_releases_in_a_namespace_have_nothing_in_common(tmp_path: Path) -> None:
    options = ("--set", "monitoring.enabled=true", "--set", "autoscaling.kind=keda")
    releases = ("cats", "xlaserve", "xlaserve-cats")
    found = {release: rendered(tmp_path, *options, release=release) for release in releases}
    names = [(each["kind"], each["metadata"]["name"]) for manifests in found.values() for each in manifests]
    assert len(set(names)) == len(names)
    pods = {release: one(manifests, "Deployment", "")["spec"] for release, manifests in found.items()}
    for release, manifests in found.items():
        selectors = [
            pods[release]["selector"]["matchLabels"],
            *(each["spec"]["selector"] for each in manifests if each["kind"] == "Service"),
            *(each["spec"]["selector"]["matchLabels"] for each in manifests if each["kind"] == "PodMonitor"),
            *(each["spec"]["podSelector"]["matchLabels"] for each in manifests if each["kind"] == "NetworkPolicy"),
        ]
        for selector in selectors:
            assert [
                name
                for name, spec in pods.items()
                if selector.items() <= spec["template"]["metadata"]["labels"].items()
            ] == [release]
        for trigger in one(manifests, "ScaledObject", "")["spec"]["triggers"]:
            for pattern in re.findall(r'pod=~"(.*?)"', trigger["metadata"]["query"]):
                matching = [
                    name
                    for name, other in found.items()
                    if re.fullmatch(pattern, f"{one(other, 'Deployment', '')['metadata']['name']}-5d8f6c7b9-x2x4z")
                ]
                assert matching == [release]


def test_it_has_the_version_of_the_server() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {project["version"]}
