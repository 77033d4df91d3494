from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xlaserve.engine import niceness
from xlaserve.engine.niceness import NICE, STARVATION_WINDOW_S, Starvation, hasten, lower, yield_to_traffic


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "is_starved"),
    [
        (0.0, 0.0, False),  # it waits for a download
        (5.0, 5.0, False),
        (0.4, 5.0, True),
        (0.6, 5.0, False),
        (0.1, 2.0, False),  # it hardly asked for more
    ],
)
def test_a_process_starves_that_waits_for_a_processor_most_of_the_time(
    ran_s: float, waited_s: float, is_starved: bool
) -> None:
    times_s, now_s = (0.0, 0.0), 0.0
    starvation = Starvation(0, lambda process: {"1": times_s}, lambda: now_s)
    for _ in range(3):
        times_s = (times_s[0] + ran_s, times_s[1] + waited_s)
        now_s += STARVATION_WINDOW_S / 2
        assert not starvation.is_starved(), "before the window has passed"
        now_s += STARVATION_WINDOW_S / 2
        assert starvation.is_starved() is is_starved


def test_threads_that_end_do_not_make_a_process_starve() -> None:
    looks = iter([{"main": (1.0, 0.0), "pool": (5.0, 1.0)}, {"main": (3.0, 3.0)}])
    now_s = 0.0
    starvation = Starvation(0, lambda process: next(looks), lambda: now_s)
    for _ in range(2):
        now_s += STARVATION_WINDOW_S
        assert not starvation.is_starved()


def test_the_kernel_tells_how_long_a_process_ran_and_waited() -> None:
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        [(ran_s, waited_s)] = niceness._times_s(process.pid).values()
        process.communicate(b"\n")
    assert ran_s >= 0.3
    assert waited_s >= 0
    assert not niceness._times_s(process.pid)


def test_a_process_that_can_not_run_when_idle_alone_is_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lower(process.pid, only_when_idle=True)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0) + NICE
        process.communicate(b"\n")


@pytest.mark.parametrize("told", [None, "0 0 0\n", "no numbers"])
def test_a_process_is_nice_where_starvation_would_go_unseen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None
) -> None:
    monkeypatch.setattr(niceness, "SCHEDSTAT", tmp_path / "schedstat")
    if told is not None:
        (tmp_path / "schedstat").write_text(told)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lower(process.pid, only_when_idle=True)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0) + NICE
        process.communicate(b"\n")


def test_a_process_that_is_nice_as_the_server_is_becomes_nicer() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, os.nice(0) + 5)
        lower(process.pid, only_when_idle=False)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0) + 5 + NICE
        process.communicate(b"\n")


def test_without_thread_priorities_no_process_priority_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "setpriority", lambda *arguments: pytest.fail(f"it set {arguments}"))
    yield_to_traffic()
    assert not caplog.records


@pytest.mark.parametrize("is_permitted", [True, False])
def test_all_threads_of_a_process_that_was_killed_are_to_run_as_others_do(
    monkeypatch: pytest.MonkeyPatch, is_permitted: bool
) -> None:
    asked = {}

    def set_scheduler(thread: int, policy: int, parameter: os.sched_param) -> None:
        asked[str(thread)] = policy
        if not is_permitted:
            raise PermissionError(1, "not permitted")

    code = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        threads = list(niceness._times_s(process.pid))
        monkeypatch.setattr(os, "sched_setscheduler", set_scheduler)
        hasten(process.pid)
        process.communicate(b"\n")
    hasten(process.pid)  # which has ended
    assert len(threads) == 2
    assert asked == dict.fromkeys(threads, os.SCHED_OTHER)


def test_only_the_thread_that_asks_yields_to_the_traffic() -> None:
    found = []

    def work() -> None:
        yield_to_traffic()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [NICE]
    assert os.nice(0) == 0
