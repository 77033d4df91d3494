"""The images that scripts/build_image.sh made, run as a container runtime runs them: `make image`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("buildah") is None, reason="needs root and buildah"),
]
IMAGE, WITH_MODELS = "localhost/xlaserve:latest", "localhost/xlaserve:demo"
PATIENCE_S = 120.0
# Process 1 of its own processes, on a root that can't be written, with a /tmp of its own, and without any privilege.
ENTER = """
set -e
root=$1 user=$2 folder=$3; shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mount -o remount,ro,bind "$root"
exec chroot --userspec="$user" "$root" /usr/bin/setpriv --no-new-privs --bounding-set=-all --inh-caps=-all \
    /usr/bin/env --ignore-environment --chdir="$folder" "$@"
"""
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")


class Container:
    """A container of `image`, whose files are in `root`."""

    def __init__(self, image: str) -> None:
        self.config: dict[str, Any] = json.loads(said("buildah", "inspect", "--type", "image", image))["Docker"][
            "config"
        ]
        self._name = said("buildah", "from", "--pull-never", image)
        self.root = Path(said("buildah", "mount", self._name))
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Runs `command` as the image has it."""
        variables = [*self.config["Env"], *(f"{name}={value}" for name, value in environment.items())]
        there = (str(self.root), self.config["User"], self.config["WorkingDir"])
        process = subprocess.Popen(
            [*UNSHARE, "bash", "-c", ENTER, "enter", *there, *variables, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Returns the exit status of a command, and what it said."""
        process = self.start(*command, **environment)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said.strip()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate(timeout=PATIENCE_S)
        subprocess.run(["buildah", "rm", self._name], check=True, capture_output=True)


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def container() -> Iterator[Callable[[str], Container]]:
    with ExitStack() as open_ones:

        def make(image: str) -> Container:
            made = Container(image)
            open_ones.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="module")
def plain(container: Callable[[str], Container]) -> Container:
    return container(IMAGE)


@pytest.fixture(scope="module")
def demo(container: Callable[[str], Container]) -> Container:
    return container(WITH_MODELS)


def served(container: Container, **environment: str) -> subprocess.Popen[str]:
    """Starts the image's own command on free ports."""
    ports = {f"XLASERVE_{name}_PORT": "0" for name in ("GRPC", "HTTP", "METRICS")}
    command = container.config["Entrypoint"] + container.config["Cmd"]
    return container.start(*command, **{"XLASERVE_HOST": "127.0.0.1", **ports, **environment})


def first(process: subprocess.Popen[str], of: Callable[[], object], otherwise: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not of():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up_at, otherwise
        time.sleep(0.005)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Returns what it says up to and including the line with `words`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    pytest.fail(f"it never said {words}:\n{''.join(lines)}")


def test_the_image_says_what_it_is_and_how_it_stops(plain: Container) -> None:
    assert plain.config["Labels"]["org.opencontainers.image.title"] == "xlaserve"
    assert plain.config["StopSignal"] == "SIGTERM"
    assert plain.config["Healthcheck"]["Test"] == ["CMD", "xlaserve-health"]
    assert sorted(plain.config["ExposedPorts"]) == ["8000/tcp", "8001/tcp", "8002/tcp"]


def test_nobody_runs_it_on_a_root_that_can_not_be_written(plain: Container) -> None:
    code = "import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getpid())"
    assert plain.run("python3", "-c", code) == (0, "65532 65532 [65532] 1")
    for folder in ("/", "/opt/xlaserve", "/var/cache/xlaserve", "/etc/xlaserve", "/mnt/models"):
        status, words = plain.run("touch", f"{folder}/file")
        assert (status, "Read-only file system" in words or "Permission denied" in words) == (1, True)
    assert plain.run("touch", "/tmp/file") == (0, "")


def test_no_compiler_and_no_installer_is_in_it(plain: Container) -> None:
    names = ["cc", "gcc", "g++", "c++", "clang", "ld", "make", "pip", "pip3"]
    assert [name for name in names if plain.run("which", name)[0] == 0] == []
    assert plain.run("python3", "-m", "pip")[0] == 1
    assert [*plain.root.glob("opt/xlaserve/lib/python3*/site-packages/*/libclang*")] == []


def test_root_owns_what_it_runs(plain: Container) -> None:
    assert [path for path in (plain.root / "opt").rglob("*") if path.lstat().st_uid != 0] == []


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 2.0])
def test_a_signal_ends_it_at_any_time(plain: Container, after_s: float) -> None:
    process = served(plain)
    first(process, lambda: tini(process) is not None, "it did not start")
    time.sleep(after_s)
    before = time.monotonic()
    required_tini(process).send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    print(f"ended {time.monotonic() - before:.2f} s after a signal at {after_s} s")
    assert process.returncode in (0, 128 + signal.SIGTERM)
    assert time.monotonic() - before < PATIENCE_S / 4


def test_models_that_were_compiled_before_serve_in_seconds(demo: Container) -> None:
    begin = time.monotonic()
    process = served(demo, XLASERVE_READY_FILE="/tmp/ready.json")
    words = read_until(process, "ready: digits, shapes-detector, shapes-segmenter")
    print(f"ready after {time.monotonic() - begin:.1f} s at a load of {os.getloadavg()[0]:.1f}")
    assert re.findall(r"xla \S+ compiled in", words) == []
    assert "xla 1x32x32 loaded in" in words
    one = required_tini(process)
    assert one.uids().real == 65532
    root = Path("/proc") / str(one.pid) / "root"
    ready = json.loads((root / "tmp" / "ready.json").read_text())
    print("health:", *(f"{seconds:.2f} s" for seconds in [timed_health(demo, ready["grpc"]) for _ in range(3)]))
    one.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, rest
    assert "stopped" in rest


def test_several_processes_serve_refuse_an_upgrade_and_end_with_a_signal(demo: Container) -> None:
    begin = time.monotonic()
    process = served(demo, XLASERVE_FRONTS="1", XLASERVE_READY_FILE="/tmp/ready.json")
    words = read_until(process, "ready: digits, shapes-detector, shapes-segmenter")
    print(f"ready after {time.monotonic() - begin:.1f} s at a load of {os.getloadavg()[0]:.1f}")
    assert re.findall(r"xla \S+ compiled in", words) == []
    assert "xla 1x32x32 loaded in" in words
    one = required_tini(process)
    first(process, (Path("/proc") / str(one.pid) / "root" / "tmp" / "ready.json").exists, "no ready file")
    (supervisor,) = one.children()
    others = {child.name(): child for child in supervisor.children()}
    assert others.keys() >= {"front 1", "engine"}
    assert {each.uids().real for each in (one, supervisor, *others.values())} == {65532}
    ready = json.loads((Path("/proc") / str(one.pid) / "root" / "tmp" / "ready.json").read_text())
    print("health:", f"{timed_health(demo, ready['grpc']):.2f} s")
    one.send_signal(signal.SIGUSR2)
    read_until(process, "upgrade: ")
    others["front 1"].kill()
    read_until(process, "is ready")
    timed_health(demo, ready["grpc"])
    begin = time.monotonic()
    one.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert process.returncode == 0, rest
    assert not any(each.is_running() for each in others.values())


def timed_health(container: Container, address: str) -> float:
    begin = time.monotonic()
    assert container.run("xlaserve-health", XLASERVE_GRPC_PORT=address.rpartition(":")[2]) == (0, "SERVING")
    return time.monotonic() - begin


def tini(process: subprocess.Popen[str]) -> psutil.Process | None:
    """Returns process 1 of a container, once it is what the image starts."""
    for child in psutil.Process(process.pid).children():
        if "tini" in child.exe():
            return child
    return None


def required_tini(process: subprocess.Popen[str]) -> psutil.Process:
    found = tini(process)
    assert found is not None
    return found
