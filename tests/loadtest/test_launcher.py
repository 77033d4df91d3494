from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from xlaserve_loadtest import launcher
from xlaserve_loadtest.launcher import ending_with_us

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")

PATIENCE_S = 20
WRITE_PID = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid()) + '\\n'); time.sleep(600)"
STARTERS = {
    "any": "import subprocess; subprocess.run(ending_with_us(command))",
    "a thread": "from threading import Thread; import subprocess\n"
    "Thread(target=subprocess.run, args=[ending_with_us(command)]).start()",
    "a sweep": "from xlaserve_loadtest.study import measure; measure._run(command, 600)",
}


@pytest.mark.parametrize("start", STARTERS.values(), ids=STARTERS)
def test_a_command_ends_with_the_process_that_started_it(start: str, tmp_path: Path) -> None:
    written = tmp_path / "pid"
    command = [sys.executable, "-c", WRITE_PID, str(written)]
    script = f"from xlaserve_loadtest.launcher import ending_with_us\ncommand = {command!r}\n{start}"
    with subprocess.Popen([sys.executable, "-c", script]) as starter:
        started = psutil.Process(_number_in(written))
        starter.kill()
    try:
        started.wait(PATIENCE_S)
    except psutil.TimeoutExpired:
        started.kill()
        raise


def _number_in(file: Path) -> int:
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        with suppress(OSError, ValueError):  # not there, or not written yet
            return int(file.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{file} was not written")


def test_a_command_goes_on_and_its_status_is_kept() -> None:
    assert subprocess.run(ending_with_us([sys.executable, "-c", "raise SystemExit(7)"]), check=False).returncode == 7


def test_a_command_whose_starter_has_died_already_does_not_run() -> None:
    other = subprocess.Popen(["true"])
    other.wait()
    command = [sys.executable, launcher.__file__, str(other.pid), "echo", "runs"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b""
