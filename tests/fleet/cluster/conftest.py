"""A Ray cluster of several nodes on this machine, and fleets on it by the commands that people type."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

START_TIMEOUT_S = 180
POLL_S = 0.1
SERVER = {
    "drain_timeout_s": 10,
    "shutdown_delay_s": 1,
    "models": [{"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1, 2, 4, 8]}],
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def until(condition: Callable[[], Any], otherwise: str, timeout_s: float = START_TIMEOUT_S) -> Any:
    """Returns what `condition` returns, once that is true."""
    give_up_at = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < give_up_at, f"{otherwise} within {timeout_s} s"
        time.sleep(POLL_S)
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Fleet:
    """A fleet of the cluster at `ray`, whose file and whose commands are real."""

    def __init__(self, folder: Path, ray: str, **values: object) -> None:
        self.port = free_port()
        self.file = folder / "fleet.yaml"
        self.host = ray.rpartition(":")[0] if ":" in ray else "127.0.0.1"
        self._values: dict[str, object] = {"ray": ray, "port": self.port, "server": SERVER, "scale_up_after_s": 1}
        self.write(**values)

    @property
    def url(self) -> str:
        return f"fleet://{self.host}:{self.port}"

    def write(self, **values: object) -> None:
        """Changes fields of the file."""
        self._values.update(values)
        self.file.write_text(json.dumps(self._values))  # JSON is YAML as well

    def start(self, action: str, *options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "xlaserve_fleet", action, "--config", str(self.file), *map(str, options)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, action: str, *options: object) -> subprocess.CompletedProcess[str]:
        process = self.start(action, *options)
        try:
            out, err = process.communicate(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"fleet {action} did not end: {process.communicate()}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def do(self, action: str, *options: object) -> str:
        done = self.run(action, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.do("status", "--json"))
        return found

    def servers(self) -> list[Mapping[str, Any]]:
        """What is known of each ready server."""
        return [one for one in self.status()["servers"] if one["state"] == "ready"]

    def listing(self) -> dict[str, Any]:
        """What the name service says; no servers where it does not answer."""
        host, port = self.url.removeprefix("fleet://").rsplit(":", 1)
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/v1/servers", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
        except OSError:
            return {"servers": [], "generation": 0}
        return found

    def ready(self) -> list[str]:
        """The ids of the servers that clients may call."""
        return [one["id"] for one in self.listing()["servers"] if one["state"] == "ready"]

    def wait_for(self, count: int, without: tuple[str, ...] = ()) -> list[str]:
        """Returns the ids of the ready servers once there are so many, none of them of `without`."""

        def found() -> list[str]:
            ids = self.ready()
            return ids if len(ids) == count and not {*ids} & {*without} else []

        ids: list[str] = until(found, f"there were not {count} servers: {self.listing()}")
        return ids


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """A cluster whose head has no cores for servers. Nodes are added by tests."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        yield cluster
        cluster.shutdown()


@pytest.fixture
def fleet(ray_cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Starts a fleet with so many nodes of one core, and takes it down."""
    fleets: list[Fleet] = []

    def start(nodes: int, **values: object) -> Fleet:
        for _ in range(nodes):
            ray_cluster.add_node(num_cpus=1)
        cache = tmp_path / "cache"
        found = Fleet(tmp_path, ray_cluster.address, **{"server": {**SERVER, "compile_cache": str(cache)}, **values})
        fleets.append(found)
        found.do("up")
        return found

    yield start
    for one in fleets:
        if ray_cluster.head_node is not None:
            one.run("down")
