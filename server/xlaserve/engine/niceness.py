"""Priorities of threads and processes, so that work beside the traffic leaves the processors to it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

NICE: Final = 10
"""The nice value above the traffic's: a thread gets a tenth of the time of a busy one. Not less: while it traces it
holds the interpreter's lock, and the event loop waits for it."""
MIN_SHARE: Final = 0.1
"""The share of one processor that NICE guarantees."""
STARVATION_WINDOW_S: Final = 5.0
WATCH_S: Final = 1.0

SCHEDSTAT: Final = Path("/proc/self/schedstat")
NS_PER_S: Final = 1e9

Times = Mapping[str, tuple[float, float]]
"""Seconds that each thread ran, and waited for a processor."""


def yield_to_traffic() -> None:
    """Makes the calling thread run at NICE, and the threads that it starts."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        _lower_priority(threading.get_native_id())


def lower(process: int, *, only_when_idle: bool) -> None:
    """Makes a process that has just been started run at NICE, or only while a processor is idle.

    Beside a process at NICE, requests to other models had a p99 2.1 times as high as alone on two cores, beside one
    that runs only when idle 1.7 times; a mere loop of that kind makes it 1.6 times (`python -m bench --only reload`).
    """
    if only_when_idle and _counts_waits():
        try:
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
            return
        except OSError as error:
            log.debug("the scheduler does not take SCHED_IDLE: %s", error.strerror)
    _lower_priority(process)


def hasten(process: int) -> None:
    """Gives a process that runs only when idle its share of the processors, as far as permissions allow.

    While no processor is idle, each of its threads may need half a minute even to end once it was killed.
    """
    _schedule(process, os.SCHED_OTHER)


def _lower_priority(process: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, process) + NICE)
    except OSError as error:
        log.warning("compiling in the background can't be made to yield to the traffic: %s", error.strerror)


class LowPriority:
    """Low priority of this process, from `begin` to `end`: of its threads, and of the threads that they start.

    Nothing changes where permissions would not let it end: a process of an ordinary user can't raise its priority
    again. Where the process gets next to no time, it runs at NICE instead.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._nice = 0
        """The nice value before it began."""
        self._has_begun = False
        self._changing = threading.Lock()

    def begin(self) -> None:
        """Begins low priority; called before other threads are started."""
        if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER or not _may_raise_priority():
            return
        self._nice, self._has_begun = os.getpriority(os.PRIO_PROCESS, 0), True
        if _counts_waits():
            _schedule(os.getpid(), os.SCHED_IDLE)
            threading.Thread(target=self._watch, name="priority", daemon=True).start()
        else:
            _renice(os.getpid(), self._nice + NICE)

    def end(self) -> None:
        """Ends low priority for all threads; may be called again."""
        with self._changing:
            if self._ended.is_set():
                return
            self._ended.set()
            if self._has_begun:
                _schedule(os.getpid(), os.SCHED_OTHER)
                _renice(os.getpid(), self._nice)

    def _watch(self) -> None:
        starvation = Starvation(os.getpid())
        while not self._ended.wait(WATCH_S):
            if starvation.is_starved():
                log.info("no processor is ever idle: models are loaded at low priority instead")
                with self._changing:
                    if not self._ended.is_set():
                        _renice(os.getpid(), self._nice + NICE)
                        _schedule(os.getpid(), os.SCHED_OTHER)
                return


def _may_raise_priority() -> bool:
    """Returns whether a thread may have its priority raised again; tries it on one."""
    returned = []

    def leave_and_return() -> None:
        thread = threading.get_native_id()
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, nice + NICE)
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            returned.append(True)

    trying = threading.Thread(target=leave_and_return)
    trying.start()
    trying.join()
    return bool(returned)


def _schedule(process: int, policy: int) -> None:
    _for_each_thread(process, lambda thread: os.sched_setscheduler(thread, policy, os.sched_param(0)))


def _renice(process: int, nice: int) -> None:
    _for_each_thread(process, lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice))


def _for_each_thread(process: int, change: Callable[[int], object]) -> None:
    """Changes all threads, twice: a thread that is started meanwhile has the priority of the one that started it."""
    for _ in range(2):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with suppress(OSError):  # it has ended
                change(int(thread.name))


class Starvation:
    """Detects that a process gets less than MIN_SHARE of the time it asks for, as the machine is never idle."""

    def __init__(
        self,
        process: int,
        times_s: Callable[[int], Times] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._times_s = times_s or _times_s
        self._clock = clock
        self._since = clock()
        self._before_s: Times = {}

    def is_starved(self) -> bool:
        """Returns whether the process starved in the last STARVATION_WINDOW_S; to be called several times in each
        window."""
        now = self._clock()
        if now - self._since < STARVATION_WINDOW_S:
            return False
        times_s = self._times_s(self._process)
        ran_s = waited_s = 0.0  # of the threads that still live
        for thread, (thread_ran_s, thread_waited_s) in times_s.items():
            before_s = self._before_s.get(thread, (0.0, 0.0))
            ran_s += thread_ran_s - before_s[0]
            waited_s += thread_waited_s - before_s[1]
        self._since, self._before_s = now, times_s
        return waited_s > STARVATION_WINDOW_S / 2 and ran_s < MIN_SHARE * waited_s


def _counts_waits() -> bool:
    """Returns whether the kernel counts how long threads wait; otherwise starvation could not be detected."""
    try:
        return any(map(int, SCHEDSTAT.read_text().split()))  # without its statistics, Linux gives zeros
    except (OSError, ValueError):
        return False


def _times_s(process: int) -> Times:
    """Returns the seconds for which each thread of a process ran, and waited for a processor: the first numbers of its
    schedstat, as sched-stats in Linux's documentation says."""
    times_s = {}
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran_ns, waited_ns, _ = map(int, file.read_text().split())
            times_s[file.parent.name] = ran_ns / NS_PER_S, waited_ns / NS_PER_S
    return times_s
