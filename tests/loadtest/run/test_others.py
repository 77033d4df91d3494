from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from xlaserve_loadtest.run.others import Others, is_here

Times = namedtuple("Times", "user nice system idle irq softirq guest")
BUSY = """
import pathlib, sys, time
while time.process_time() < 0.5: pass
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


class Machine:
    """Processor times of the machine, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = Times(100.0, 10.0, 50.0, 1000.0, 1.0, 2.0, 5.0)
        monkeypatch.setattr(psutil, "cpu_times", lambda: self.times)

    def goes_on(self, **more_s: float) -> None:
        self.times = self.times._replace(**{name: getattr(self.times, name) + more_s[name] for name in more_s})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[int]:
    """A process that is not below this one, and begins to use half a second of a processor."""
    command = '"$@" >/dev/null 2>&1 & echo $!'
    words = ["setsid", "sh", "-c", command, "sh", sys.executable, "-c", BUSY, str(tmp_path / "done")]
    started = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    yield int(started.stdout)
    os.kill(int(started.stdout), signal.SIGKILL)


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"no {path}")


def test_what_processes_used_less_ones_own_was_used_by_others(machine: Machine) -> None:
    others = Others()
    machine.goes_on(user=3.0, system=1.0, idle=4.0, softirq=2.0)
    assert others.share() == pytest.approx(0.4, abs=0.05)


def test_interrupts_and_an_idle_machine_are_no_others(machine: Machine) -> None:
    others = Others()
    assert others.share() is None
    machine.goes_on(idle=8.0, softirq=2.0)
    assert others.share() == 0.0


def test_processes_below_ones_own_are_not_others(machine: Machine) -> None:
    others = Others()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    machine.goes_on(user=1.0, idle=1.0)
    # At least the half second, and the interpreter's start.
    assert 0.0 <= (others.share() or 0.0) <= 0.26


def test_a_server_is_no_other_process_where_it_is_known(machine: Machine, stranger: int, tmp_path: Path) -> None:
    unknown, known = Others(), Others(stranger)
    used_before_s = sum(psutil.Process(stranger).cpu_times()[:2])
    wait_for(tmp_path / "done")
    used_s = sum(psutil.Process(stranger).cpu_times()[:2]) - used_before_s
    machine.goes_on(user=1.0, idle=1.0)
    assert (unknown.share() or 0.0) - (known.share() or 0.0) == pytest.approx(used_s / 2, abs=0.1)


def test_addresses_of_this_machine_are_told_from_others() -> None:
    assert is_here("127.0.0.1:8001")
    assert is_here("tfs://localhost:8500")
    own = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    assert all(is_here(f"{address}:1") for address in own)
    assert not is_here("192.0.2.1:8001")
    assert not is_here("http://[2001:db8::1]:8000")
