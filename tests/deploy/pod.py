"""A kubelet's part: starts a container as its manifest has it, probes it, and ends it."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import grpc
import numpy
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.manifests import ROOT, Manifest, instruction

import xlaserve
import xlaserve_client
import xlaserve_proto

PORTS = ("GRPC", "HTTP", "METRICS")
NUMBERS = {"grpc": ("8001", "9000"), "http": ("8000", "8080"), "metrics": ("8002", "8082")}
"""The ports of the manifests, in whose place a test has free ones."""
PATIENCE_S = 120.0
POLL_S = 0.02
HEALTH = "import sys; from xlaserve.commands.health import main; sys.exit(main())"
FOR_ALL = 0o755
SEAL = """
set -e
folder=$1 user=$2 group=$3; shift 3
mount --bind "$folder" "$folder"
mount -o remount,ro,bind /
exec setpriv --reuid="$user" --regid="$group" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
"""Becomes a command of a user without privileges, on a root that can't be written but for one folder."""


class Pod:
    """The first container of `spec`, a pod's, as a process of the manifest's user where we are root, who can write only
    into the pod's volumes where we may mount.

    Its volumes are folders in `folder`, and what is mounted at a path is found there wherever the manifest or a file of
    a volume names the path. `files` holds what is in them, by volume and name. `environment` goes before that of the
    manifest.
    """

    def __init__(
        self,
        spec: Manifest,
        folder: Path,
        files: Mapping[str, Mapping[str, str | bytes]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._container = spec["containers"][0]
        self._mounts = self._container["volumeMounts"]
        self._folder = folder
        security = {**spec.get("securityContext", {}), **self._container["securityContext"]}
        self._user = security["runAsUser"] if os.geteuid() == 0 else None
        self._group = security["runAsGroup"] if self._user is not None else None
        self._mount(files or {})
        self._python = _python_for(self._user)
        self._environment = {**self._variables(), **dict.fromkeys((f"XLASERVE_{port}_PORT" for port in PORTS), "0")}
        self._environment.update(environment or {})
        self._log = folder / "log"
        command = [*instruction("ENTRYPOINT"), *self._container["args"]]
        assert command[:3] == ["/usr/bin/tini", "--", "xlaserve"]
        arguments = [self._mapped(text) for text in command[3:]]
        self.process = self._start([*self._python, "-m", "xlaserve", *arguments])

    def succeeds(self, probe: Manifest) -> bool:
        """Returns whether a probe succeeds once."""
        if "grpc" in probe:
            return self._serves(self._address(probe["grpc"]["port"]), probe["grpc"].get("service", ""))
        if "exec" in probe:
            return self.run(probe["exec"]["command"]) == 0
        get = probe["httpGet"]
        unverified = ssl._create_unverified_context()  # as kubelets have it
        try:
            address = f"{get.get('scheme', 'HTTP').lower()}://{self._address(get['port'])}{get['path']}"
            with urlopen(address, timeout=probe["timeoutSeconds"], context=unverified) as answer:
                return bool(answer.status < 400)
        except (HTTPError, URLError, TimeoutError):
            return False

    def run(self, command: Sequence[str]) -> int:
        """Runs a command in the container and returns its exit status."""
        program = [*self._python, "-c", HEALTH] if command[0] == "xlaserve-health" else [command[0]]
        port = {"XLASERVE_GRPC_PORT": self.grpc.rpartition(":")[2]}
        return self._start([*program, *command[1:]], **port).wait(PATIENCE_S)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Returns once `condition` holds; fails where the container ends first."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < give_up_at, self.said
            time.sleep(POLL_S)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def grpc(self) -> str:
        """HOST:PORT."""
        return self._address("grpc")

    @property
    def http(self) -> str:
        """HOST:PORT."""
        return self._address("http")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _address(self, port: str | int) -> str:
        """Returns where a port of the manifest really is; waits until it listens."""
        self.wait_for(lambda: "listening: " in self.said)
        found = re.search(r"listening: gRPC (\S+), HTTP (\S+), metrics ([^\s\"]+)", self.said)
        assert found is not None
        names = {name: name for name in NUMBERS} | {number: name for name, all_ in NUMBERS.items() for number in all_}
        address = dict(zip(NUMBERS, found.groups(), strict=True))[names[str(port)]]
        return address.replace("0.0.0.0", "127.0.0.1")

    def _serves(self, address: str, service: str) -> bool:
        with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status
            except grpc.RpcError:
                return False
            return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def _mount(self, files: Mapping[str, Mapping[str, str | bytes]]) -> None:
        self._folder.chmod(FOR_ALL)
        for mount in self._mounts:
            folder = self._folder / mount["name"]
            folder.mkdir(mode=FOR_ALL)
            if self._user is not None and not mount.get("readOnly"):
                os.chown(folder, self._user, -1)
            for name, content in files.get(mount["name"], {}).items():
                (folder / name).write_bytes(content if isinstance(content, bytes) else self._mapped(content).encode())

    def _mapped(self, text: str) -> str:
        names = {mount["mountPath"]: mount["name"] for mount in self._mounts}
        paths = "|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
        return re.sub(rf"(?<![\w.-])({paths})(?![\w.-])", lambda found: str(self._folder / names[found[1]]), text)

    def _variables(self) -> dict[str, str]:
        """Returns the image's variables and the manifest's, and those that lead Python to this checkout."""
        (line,) = re.findall(r"^ENV (.*)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
        image = dict(part.split("=", 1) for part in line.split())
        image["PATH"] = os.environ["PATH"]
        manifest = {variable["name"]: variable["value"] for variable in self._container["env"]}
        sources = [
            str(Path(module.__file__ or "").parents[1]) for module in (xlaserve, xlaserve_client, xlaserve_proto, numpy)
        ]
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), *sources])
        image["TMPDIR"] = "/tmp"
        return {name: self._mapped(value) for name, value in {**image, **manifest}.items()} | {"PYTHONPATH": path}

    def _start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        user: dict[str, Any] = {}
        if self._user and may_mount() and self._container["securityContext"]["readOnlyRootFilesystem"]:
            seal = ["unshare", "--mount", "bash", "-c", SEAL, "seal"]
            command = [*seal, str(self._folder), str(self._user), str(self._group), *command]
        elif self._user:
            user = {"user": self._user, "group": self._group, "extra_groups": []}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env={**self._environment, **environment},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **user,
            )


@cache
def may_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "setpriv", "true"], check=False).returncode == 0
    except FileNotFoundError:
        return False


def _python_for(user: int | None) -> list[str]:
    """Returns a Python that `user` may run: ours, or the system's of the same version where ours lies in a home."""
    system = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, system):
        try:
            user_options: dict[str, Any] = {"user": user, "group": user, "extra_groups": []} if user else {}
            subprocess.run([program, "-c", ""], check=True, **user_options)
        except (OSError, subprocess.CalledProcessError):
            continue
        return [program]
    raise AssertionError(f"expected a Python that user {user} may run, neither {sys.executable} nor {system} is")
