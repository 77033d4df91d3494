from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xlaserve import priority
from xlaserve.priority import NICE, STARVATION_WINDOW_S, Starvation, lower, yield_to_traffic


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
        [(ran_s, waited_s)] = priority._times_s(process.pid).values()
        process.communicate(b"\n")
    assert ran_s >= 0.3
    assert waited_s >= 0
    assert not priority._times_s(process.pid)


def test_a_process_that_can_not_run_when_idle_alone_is_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lower(process.pid, only_when_idle=True)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0) + NICE
        process.communicate(b"\n")


def test_a_process_is_nice_where_starvation_would_go_unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(priority, "TELLS_WAITS", tmp_path / "schedstat")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lower(process.pid, only_when_idle=True)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.nice(0) + NICE
        process.communicate(b"\n")


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
