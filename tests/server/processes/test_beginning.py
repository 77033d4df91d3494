"""The process that serves, as the child of a small one: real processes, without a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from xlaserve.engine import under_way
from xlaserve.engine.under_way import UnderWay
from xlaserve.processes.beginning import LEFT, CrashedError, begin
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.processes.supervision import parent
from xlaserve.processes.supervision.restart_policy import RestartPolicy

PATIENCE_S = 30.0
PROGRAM = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from xlaserve.processes import beginning
from xlaserve.processes.beginning import CrashedError, begin, end_at_sigterm
from xlaserve.config import ModelSettings
from xlaserve.engine.under_way import key_of
from xlaserve.processes.ready_file import ReadyFile

folder = Path(sys.argv[1])
if (folder / "said").exists() and (folder / "held").exists():  # as while it is imported again
    (folder / "imports").touch()
    while (folder / "held").exists():
        time.sleep(0.01)
end_at_sigterm()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some programs that start others leave it
beginning.LATER_S, beginning.LOOK_S = 0.0, 0.01
try:
    beginning = begin(ReadyFile(folder / "ready"), drain_s=float(os.environ.get("DRAIN_S", 30.0)))
except CrashedError as crashed:
    sys.exit(crashed.status)
said = {
    "pid": beginning.pid,
    "own": os.getpid(),
    "set_aside": [*beginning.set_aside.values()],
    "has_served": beginning.has_served,
    "is_ready": (folder / "ready").exists(),
}
with (folder / "said").open("a") as file:
    file.write(json.dumps(said) + "\\n")
exec(sys.argv[2])
beginning.end()
"""
CRASH = """
(folder / "ready").touch()
if not beginning.set_aside:
    with beginning.under_way.loading(key_of(ModelSettings(name="a", source="fake")), "a") as load, load.at("building"):
        ctypes.string_at(0)
"""
WAIT = """
heard = []
def hear(number, frame):
    heard.append(number)
    (folder / f"heard {number}").touch()
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, hear)
(folder / "waits").touch()
while signal.SIGTERM not in heard:
    time.sleep(0.01)
"""

STUCK = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])  # as if a batch held the event loop
(folder / "waits").touch()
time.sleep(1000)
"""

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
"""Has a program be the first process of its own numbers."""
Start = Callable[..., "Program"]


class Program:
    """A process that does `work` in its child."""

    def __init__(self, folder: Path, work: str, *before: str, **environment: str) -> None:
        self.folder = folder
        command = [*before, sys.executable, "-c", PROGRAM, str(folder), work]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True
        )

    def said(self) -> list[dict[str, Any]]:
        """Returns what each child has said."""
        return [json.loads(line) for line in (self.folder / "said").read_text().splitlines()]

    def wait_for(self, condition: Callable[[], object]) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < give_up_at
            time.sleep(0.01)

    def wait(self) -> int:
        """Returns the exit status."""
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Program] = []

    def start(work: str, *before: str, **environment: str) -> Program:
        started.append(Program(tmp_path, work, *before, **environment))
        return started[-1]

    yield start
    for program in started:
        with program.process:
            program.process.kill()


def test_it_ends_as_the_process_that_serves(start: Start) -> None:
    program = start("beginning.end()\nos._exit(7)")
    assert program.process.communicate(timeout=PATIENCE_S)[1] == ""
    assert (program.process.returncode, len(program.said())) == (7, 1)


def test_a_process_that_ends_without_a_word_is_told_of(start: Start) -> None:
    program = start("os._exit(7)")
    assert "status 7" in program.process.communicate(timeout=PATIENCE_S)[1]
    assert (program.process.returncode, len(program.said())) == (7, 1)


@pytest.mark.parametrize(
    ("end", "said"),
    [("os._exit(0)", "status 0"), ("os._exit(3)", "status 3"), ("signal.alarm(1); time.sleep(30)", "signal 14")],
)
def test_a_model_whose_library_ends_the_process_is_set_aside(start: Start, end: str, said: str) -> None:
    program = start(CRASH.replace("ctypes.string_at(0)", end))
    assert program.wait() == 0, program.process.communicate()[1]
    (reason,) = program.said()[1]["set_aside"]
    assert said in reason


def test_an_end_with_status_0_that_no_model_has_caused_is_a_failure(start: Start) -> None:
    program = start("os._exit(0)")
    assert "status 0" in program.process.communicate(timeout=PATIENCE_S)[1]
    assert (program.process.returncode, len(program.said())) == (1, 1)


def test_a_server_that_crashes_again_and_again_gives_up() -> None:
    notes, last_words = under_way.create(), os.memfd_create("words")
    load = UnderWay(notes).loading(b"k" * under_way.KEY_BYTES, "k")
    load.__enter__()
    ends = json.dumps([time.monotonic()] * RestartPolicy().most, separators=(",", ":"))
    environment = {LEFT: f"{notes} {last_words} {ends} {{}}", parent.ENDED: f"{-signal.SIGSEGV} 1"}
    with pytest.raises(CrashedError) as raised:
        begin(ReadyFile(None), environment)
    assert raised.value.status == 128 + signal.SIGSEGV
    assert environment == {}


def test_a_process_that_stood_still_is_started_again_without_a_suspect(start: Start) -> None:
    end = f"os.kill(os.getpid(), {int(parent.SILENCED)})"
    program = start(f"if not (folder / 'again').exists():\n (folder / 'again').touch()\n {end}")
    assert program.wait() == 0, program.process.communicate()[1]
    assert [said["set_aside"] for said in program.said()] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_process_that_others_kill_is_not_started_again(start: Start, number: signal.Signals) -> None:
    program = start(f"(folder / 'ready').touch()\nos.kill(os.getpid(), {int(number)})")
    said = program.process.communicate(timeout=PATIENCE_S)[1]
    assert f"signal {int(number)} " in said, "it can't say so itself"
    assert program.process.returncode == 128 + number
    assert len(program.said()) == 1
    assert not (program.folder / "ready").exists(), "clients must not be sent to it"


def test_after_a_crash_it_is_started_again_without_what_caused_it(start: Start) -> None:
    program = start(CRASH)
    assert program.wait() == 0, program.process.communicate()[1]
    first, second = program.said()
    assert first["pid"] == second["pid"] == program.process.pid, "who started it knows one process"
    assert len({first["pid"], first["own"], second["own"]}) == 3
    assert first["set_aside"] == []
    (reason,) = second["set_aside"]
    assert "building" in reason
    assert "signal 11" in reason
    assert not second["has_served"]
    assert not second["is_ready"], "the ready file is gone as long as nothing serves"


def test_that_it_was_ready_is_known_after_a_crash(start: Start) -> None:
    program = start(f"beginning.service_manager.tell_ready('')\n{CRASH}")
    assert program.wait() == 0
    assert [said["has_served"] for said in program.said()] == [False, True]


def test_a_crash_that_no_model_has_caused_ends_it(start: Start) -> None:
    program = start("ctypes.string_at(0)")
    assert program.wait() == 128 + signal.SIGSEGV
    assert len(program.said()) == 1


def test_signals_reach_the_process_that_serves_from_a_small_one(start: Start) -> None:
    program = start(f"{WAIT}\nos._exit(40 + heard.count(signal.SIGHUP))")
    program.wait_for((program.folder / "waits").exists)
    parent = psutil.Process(program.process.pid)
    program.wait_for(lambda: "parent.py" in " ".join(parent.cmdline()))
    program.process.send_signal(signal.SIGHUP)
    program.wait_for((program.folder / f"heard {int(signal.SIGHUP)}").exists)
    assert parent.memory_info().rss < 20 * 2**20
    assert parent.num_threads() == 1
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 41


def test_a_crash_on_the_way_to_the_end_starts_nothing(start: Start) -> None:
    program = start(f"{WAIT}\n{CRASH}")
    program.wait_for((program.folder / "waits").exists)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGSEGV
    assert len(program.said()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_does_not_end_in_time_is_killed(start: Start, number: signal.Signals) -> None:
    program = start(STUCK, DRAIN_S="0.1")
    program.wait_for((program.folder / "waits").exists)
    program.process.send_signal(number)
    assert "has not ended in time" in program.process.communicate(timeout=PATIENCE_S)[1]
    assert program.process.returncode == 128 + signal.SIGKILL
    assert len(program.said()) == 1


def test_a_second_signal_ends_a_process_that_does_not_drain(start: Start) -> None:
    program = start(STUCK, DRAIN_S="1000")
    program.wait_for((program.folder / "waits").exists)
    program.process.terminate()
    time.sleep(2 * parent.SAME_SIGNAL_S)  # else it is the same signal
    program.process.terminate()
    assert program.wait() == 128 + signal.SIGKILL


def test_a_process_whose_event_loop_stands_still_is_started_again(start: Start) -> None:
    run = """
if not beginning.set_aside and len((folder / "said").read_text().splitlines()) < 4:
    beginning.pulse.beat()
    beginning.under_way.noted(b"k" * 16, "k", lambda: ctypes.PyDLL(None).sleep(1000), "mode eager", 1.0)()
"""
    program = start(run)
    said = program.process.communicate(timeout=PATIENCE_S)[1]
    assert program.process.returncode == 0, said
    assert said.count("has stood still for 0.7 s") == 3
    first, *_, last = program.said()
    assert first["set_aside"] == []
    (reason,) = last["set_aside"]
    assert "mode eager" in reason


def test_a_process_that_has_not_beaten_yet_may_take_its_time(start: Start) -> None:
    program = start(f"time.sleep({2 * parent.SILENT_LOOKS * 0.01})\nos._exit(7)")
    assert "stood still" not in program.process.communicate(timeout=PATIENCE_S)[1]
    assert program.process.returncode == 7


@pytest.mark.parametrize("before", [(), CONTAINER], ids=["", "container"])
def test_sigterm_while_it_starts_again_after_a_crash_ends_it(
    start: Start, tmp_path: Path, before: Sequence[str]
) -> None:
    if before and subprocess.run([*before, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this system lets nobody have processes of his own numbers")
    (tmp_path / "held").touch()
    program = start(CRASH, *before)
    program.wait_for((tmp_path / "imports").exists)
    (server,) = psutil.Process(program.process.pid).children() if before else [program.process]
    server.send_signal(signal.SIGTERM)
    (tmp_path / "held").unlink()
    assert program.wait() == 128 + signal.SIGTERM
    assert len(program.said()) == 1


def test_nothing_serves_on_once_the_parent_is_killed(start: Start) -> None:
    program = start(WAIT)
    program.wait_for((program.folder / "waits").exists)
    child = psutil.Process(program.said()[0]["own"])
    program.process.kill()
    child.wait(PATIENCE_S)


def test_the_service_manager_hears_the_process_that_serves_from_its_parent(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        manager.settimeout(PATIENCE_S)
        manager.bind(str(tmp_path / "notify"))
        program = start(
            f"beginning.service_manager.tell_ready('ready: a')\n{CRASH}", NOTIFY_SOCKET=str(tmp_path / "notify")
        )
        heard = []
        for _ in range(3):
            message, ancillary, _, _ = manager.recvmsg(4096, socket.CMSG_SPACE(12))
            assert int.from_bytes(ancillary[0][2][:4], sys.byteorder) == program.process.pid
            heard.append(message.decode())
    assert heard[0] == heard[2] == "READY=1\nSTATUS=ready: a"
    assert heard[1].startswith("WATCHDOG=1\n")
    assert program.wait() == 0
