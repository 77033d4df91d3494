"""The process that checks is replaced by small ones that behave as the real one might."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from xlaserve.config import Mode, ModelSettings, Settings
from xlaserve.inspection.check import runner
from xlaserve.inspection.check.record import Checked

MODEL = runner.Candidate("m", ModelSettings(name="m", source="builtin:noop"))
HELLO = """
import json, os, signal, sys, time
task = json.loads(sys.stdin.readline())
assert task["settings"]["models"][0]["name"] == "m" and task["modes"] == ["xla"], task
def say(**line): print(json.dumps(line), flush=True)
say(trying="xla 1x224x224")
say(program={"arm": "xla", "batch": 1, "run_ms": 2.0})
say(trying="xla 8x224x224")
"""


def check(behaviour: str, timeout_s: float = 30.0) -> Checked:
    return runner.check(
        MODEL,
        server=Settings(),
        modes=(Mode.XLA,),
        lowerings=False,
        batches=(1, 8),
        timeout_s=timeout_s,
        command=(sys.executable, "-c", HELLO + behaviour),
    )


def test_what_the_process_finds_out_is_kept() -> None:
    found = check('say(task="classification", size=[224, 224], is_done=True)')
    assert found.failure is None
    assert (found.name, found.source, found.task, found.size) == ("m", "builtin:noop", "classification", (224, 224))
    assert [program.run_ms for program in found.programs] == [2.0]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process died: killed by SIGSEGV, at xla 8x224x224"),
        ("sys.exit('out of memory')", "its process died: exit status 1: out of memory, at xla 8x224x224"),
        ("os._exit(0)", "its process died: exit status 0, at xla 8x224x224"),
        ("print('half a li', end='', flush=True); os._exit(3)", "its process died: exit status 3, at xla 8x224x224"),
    ],
)
def test_a_crash_ends_one_model_and_leaves_what_was_found(behaviour: str, reason: str) -> None:
    found = check(behaviour)
    assert found.failure == reason
    assert found.has_failed
    assert len(found.programs) == 1


def test_a_process_that_never_ends_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    found = check(
        f"""
import subprocess
child = subprocess.Popen(["sleep", "100"])
open({str(pid)!r}, "w").write(str(child.pid))
time.sleep(100)
""",
        timeout_s=2.0,
    )
    assert found.failure == "not done in 2 s, at xla 8x224x224"
    assert len(found.programs) == 1
    assert time.monotonic() - began < 20
    with suppress(psutil.NoSuchProcess):  # it is gone already; a signal takes effect in its own time
        psutil.Process(int(pid.read_text())).wait(timeout=20)


def test_a_process_that_reads_nothing_is_a_failure_and_no_error() -> None:
    found = runner.check(
        MODEL,
        server=Settings(),
        modes=(Mode.XLA,),
        lowerings=False,
        batches=(1,),
        timeout_s=30.0,
        command=(sys.executable, "-c", "1/0"),
    )
    assert found.failure is not None
    assert "ZeroDivisionError" in found.failure
    assert "before the first program" in found.failure
