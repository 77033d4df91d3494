from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from xlaserve.telemetry import resources
from xlaserve.telemetry.resources import SUPERVISOR, process_usage

STARTS = """
import subprocess, sys
from xlaserve.processes.supervision.linux import set_title

if len(sys.argv) > 1:
    set_title("xlaserve front 1", "front 1")
else:
    child = subprocess.Popen([sys.executable, __file__, "front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[int]:
    """The number of a process that has started another one, called `front 1`."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


@pytest.mark.parametrize("has_kernel_a_list", [True, False])
def test_it_is_told_by_role_what_each_process_takes(
    supervisor: int, has_kernel_a_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel_a_list:
        monkeypatch.setattr(resources, "CHILDREN", "/proc/nothing/{0}")
    found = process_usage(supervisor)
    assert [one.role for one in found] == [SUPERVISOR, "front 1"]
    assert found[0].pid == supervisor
    for one in found:
        assert 0 < one.cpu_s < 60
        assert 2**20 < one.resident_bytes < 2**30


def test_one_that_has_ended_is_left_out(supervisor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setattr(resources, "_children", lambda pid: [ended.pid])
    assert [one.role for one in process_usage(supervisor)] == [SUPERVISOR]
    assert process_usage(ended.pid) == []


def test_a_server_of_one_process_is_this_one() -> None:
    (found,) = process_usage()
    assert found.role == ""
    assert found.cpu_s == pytest.approx(time.process_time(), abs=0.5)
