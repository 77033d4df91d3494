"""Commands of pages for containers, clusters and systemd: checked by the same programs, as far as these get without."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.deploy.manifests import needed_helm
from tests.docs.blocks import ROOT, not_typed

from xlaserve import cli

PAGES = ("docs/deploy.md", "docs/operations.md", "docs/security.md", "docs/getting-started.md")
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in not_typed(page)))
NOBODY = {"KUBECONFIG": os.devnull, "DOCKER_HOST": "unix:///nowhere", "DOCKER_CONFIG": os.devnull}
"""Where no cluster and no Docker answers, whatever this machine has."""
NOBODY_ANSWERS = re.compile(r"Cannot connect to the Docker daemon|connection refused|was refused")
MAKEFILE = (ROOT / "Makefile").read_text()
TIMEOUT_S = 30
IMAGE = "xlaserve:latest"

Words = Sequence[str]


def said(*words: str, cwd: Path = ROOT) -> str:
    """Runs a command and returns what it wrote."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]}")
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **NOBODY}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return done.stdout + done.stderr


def parsed(words: Words, *flags: str, **options: str) -> argparse.Namespace:
    """Returns the values of a command's options; fails where it has others."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for name, nargs in options.items():
        parser.add_argument(f"--{name}" if nargs == "option" else name, nargs=None if nargs == "option" else nargs)
    try:
        return parser.parse_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise AssertionError(f"{shlex.join(words)}: {error}") from None


def docker(words: Words, folder: Path) -> None:
    if words[1] == "compose":  # a plugin of Docker
        found = parsed(words[2:], "--build", file="option", command="*")
        assert found.command == ["up"]
        assert (ROOT / found.file).is_file()
        return
    assert NOBODY_ANSWERS.search(said(*words)), said(*words)
    if IMAGE in words and (arguments := words[words.index(IMAGE) + 1 :]) and words[1] == "run":
        cli.parser().parse_args(arguments)


def kubectl(words: Words, folder: Path) -> None:
    words = [word for word in words if word != "&"]
    assert NOBODY_ANSWERS.search(said(*words, "--server=http://127.0.0.1:9")), said(*words)


def helm(words: Words, folder: Path) -> None:
    program = needed_helm()
    answer = said(program, *words[1:], "--kube-apiserver=http://127.0.0.1:9")
    assert NOBODY_ANSWERS.search(answer), answer
    if words[1] in ("install", "upgrade"):  # which would look at the chart and its values only then
        options = [word for word in words[2:] if word != "--create-namespace"]
        rendered = said(program, "template", *options)
        assert "kind: Deployment" in rendered, rendered


def make(words: Words, folder: Path) -> None:
    targets = [word for word in words[1:] if "=" not in word]
    known = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
    assert targets
    assert set(targets) <= set(known)


def pip(words: Words, folder: Path) -> None:
    found = parsed(words[2:], "--no-deps", "--require-hashes", constraint="option", requirement="option", packages="*")
    assert words[1] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in found.packages:
        name, _, wanted = package.rstrip("]").partition("[")
        assert name in (".", "xlaserve")
        assert {extra for extra in wanted.split(",") if extra} <= set(extras)
    for file in (found.constraint, found.requirement):
        assert file is None or (ROOT / file).is_file() or file in MAKEFILE


def install(words: Words, folder: Path) -> None:
    *others, target = words
    at = folder / target.lstrip("/")
    if "-D" not in words:
        at.mkdir(parents=True, exist_ok=True)
    assert said(*others, str(at)) == ""


def python(words: Words, folder: Path) -> None:
    assert list(words[:3]) == ["python3", "-m", "venv"]
    assert said(sys.executable, *words[1:3], "--without-pip", str(folder / words[3].lstrip("/"))) == ""


def systemctl(words: Words, folder: Path) -> None:
    verb, unit = (word for word in words[1:] if word != "--now")
    assert re.search(rf"^  {verb} .*UNIT|^  {verb} .*PATTERN", said("systemctl", "--help"), re.MULTILINE)
    assert (ROOT / "deploy" / "systemd" / f"{unit}.service").is_file()


CHECKS: Mapping[str, Callable[[Words, Path], None]] = {
    **{"docker": docker, "helm": helm, "kubectl": kubectl, "make": make, "pip": pip},
    **{"install": install, "python3": python, "systemctl": systemctl},
}


def check(command: str, folder: Path) -> None:
    words = shlex.split(command.replace("$PWD", str(ROOT)), comments=True)
    if words[0] == "sudo":
        words = words[1:]
    CHECKS[Path(words[0]).name](words, folder)
    for path in re.findall(r"(?<![\w/.-])deploy/[\w./-]+", command):
        assert (ROOT / path).exists(), path


def test_the_pages_show_such_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {"docker", "helm", "kubectl", "make", "pip", "sudo"}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_one_that_its_program_takes(command: str, tmp_path: Path) -> None:
    check(command, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "docker biuld --file deploy/Dockerfile .",
        "docker build --fil deploy/Dockerfile .",
        "docker build --file deploy/Dockerfiles .",
        "docker compose --file deploy/composed.yaml up",
        "docker compose --file deploy/compose.yaml upp",
        "docker run --read-onli xlaserve:latest",
        "docker run xlaserve:latest serv",
        "helm instal xlaserve deploy/helm/xlaserve",
        "helm install xlaserve deploy/helm/xlaserves",
        "helm install xlaserve deploy/helm/xlaserve --create-namespaces",
        "helm upgrade xlaserve deploy/helm/xlaserve --set config.drain_timeout=60s,replica=2",
        "kubectl aply --kustomize deploy/kubernetes/overlays/cpu",
        "kubectl apply --kustomise deploy/kubernetes/overlays/cpu",
        "kubectl apply --kustomize deploy/kubernetes/overlays/cpus",
        "kubectl apply --filename deploy/kserve/runtimes.yaml",
        "make hash",
        "pip install --constraint constraint.txt .",
        "pip install --constraints constraints.txt .",
        "pip install '.[cpus]'",
        "sudo install --moder 644 deploy/demo.yaml /etc/",
        "sudo install deploy/demos.yaml /etc/",
        "sudo systemctl enabel xlaserve",
        "sudo systemctl enable xlaserver",
    ],
)
def test_a_misspelt_command_is_noticed(command: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        check(command, tmp_path)
