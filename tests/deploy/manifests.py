"""The manifests of deploy/, as they are written and as kustomize puts them together."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KSERVE = DEPLOY / "kserve"
HELM = ROOT / "build" / "helm" / "helm"
"""Where scripts/install_helm.sh puts it."""
WHOLE = ("cpu", "gpu", "tls")
"""Overlays that are a deployment; the others are added to one."""
ADDED = ("hpa", "keda", "monitoring")

Manifest = Mapping[str, Any]


def read(file: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


@cache
def kustomized(folder: Path) -> list[Manifest]:
    """Returns what `kubectl apply --kustomize FOLDER` would apply; skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def needed_helm() -> str:
    """Returns the path of helm; skips the test where there is none."""
    if not HELM.exists():
        pytest.skip("needs helm: scripts/install_helm.sh")
    return str(HELM)


def one(manifests: Iterable[Manifest], kind: str, name: str = "xlaserve") -> Manifest:
    (found,) = (each for each in manifests if each["kind"] == kind and each["metadata"]["name"].startswith(name))
    return found


def instruction(name: str) -> Any:
    """Returns what an instruction of the Dockerfile that is written as JSON holds."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    (found,) = (line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} "))
    return json.loads(found)


def containers(manifest: Manifest) -> Iterator[Manifest]:
    spec = manifest["spec"]
    yield from spec["containers"] if "containers" in spec else spec["template"]["spec"]["containers"]
