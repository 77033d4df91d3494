"""The unit of systemd: what systemd itself says of it, and what it is told by a server that runs as the unit has it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import NOOP, StartServer

from xlaserve.cli import parser
from xlaserve.config import Settings
from xlaserve.processes.front import FLUSH_S

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = FOLDER / "xlaserve.service"
SERVER = "/opt/xlaserve/bin/xlaserve"
PATIENCE_S = 60.0
MOST_EXPOSED = 2.0
"""What systemd calls OK, with the points in tenths below it: of 10."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def seconds(name: str) -> float:
    value = setting(name)
    return float(value.removesuffix("s"))


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@needs_systemd
@pytest.mark.parametrize("drop_ins", [[], ["gpu.conf"]], ids=["cpu", "gpu"])
def test_systemd_takes_the_unit_without_a_word(tmp_path: Path, drop_ins: list[str]) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(SERVER, "/bin/true"))  # what it starts has to exist
    folder = tmp_path / f"{UNIT.name}.d"
    folder.mkdir()
    for name in drop_ins:
        shutil.copy(FOLDER / name, folder)
    done = analyzed("verify", "--man=no", "--recursive-errors=no", unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_a_misspelt_setting_is_noticed(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(SERVER, "/bin/true").replace("ProtectSystem", "ProtectsSystem"))
    assert "ProtectsSystem" in analyzed("verify", "--man=no", "--recursive-errors=no", unit).stderr


@needs_systemd
def test_the_unit_is_not_exposed() -> None:
    done = analyzed("security", "--offline=true", "--no-pager", f"--threshold={int(MOST_EXPOSED * 10)}", UNIT)
    assert done.returncode == 0, done.stdout


def test_the_unit_gives_the_server_time_to_drain() -> None:
    defaults = Settings()
    assert seconds("TimeoutStopSec") > defaults.shutdown_delay_s + defaults.drain_timeout_s + 3 * FLUSH_S


def test_the_unit_starts_a_command_that_there_is() -> None:
    command, *arguments = shlex.split(setting("ExecStart"))
    assert command == SERVER
    parser().parse_args(arguments)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"{os.path.relpath(tmp_path)}/notify")
        listening.settimeout(PATIENCE_S)
        yield listening


def heard(manager: socket.socket, what: str) -> str:
    """Returns the status that comes with `what`; passes over pings."""
    while True:
        lines = manager.recv(4096).decode().splitlines()
        if lines == ["WATCHDOG=1"]:
            continue
        assert what in lines
        return next(line.partition("=")[2] for line in lines if line.startswith("STATUS="))


def test_the_manager_is_told_of_start_reload_and_stop(start_server: StartServer, manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": str(Path(manager.getsockname()).resolve()), "WATCHDOG_USEC": "200000"}
    server = start_server({"models": [NOOP]}, env=environment, wait=False)
    assert heard(manager, "STATUS=compiling") == "compiling"
    assert heard(manager, "READY=1") == "ready: noop"
    assert server.is_ready
    assert manager.recv(4096) == b"WATCHDOG=1"
    server.process.send_signal(signal.SIGHUP)
    assert heard(manager, "RELOADING=1") == "reloading"
    assert heard(manager, "READY=1") == "ready: noop"
    server.process.terminate()
    assert heard(manager, "STOPPING=1") == "stopping"
    assert server.wait() == 0
