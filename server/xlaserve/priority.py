"""How work beside the traffic leaves the processors to it."""

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
"""How much nicer than the traffic: a thread gets a tenth of what a busy one gets. Not less: while it traces it holds
the interpreter's lock, and the event loop waits for it."""
MIN_SHARE: Final = 0.1
"""What NICE guarantees, of one processor."""
STARVATION_WINDOW_S: Final = 5.0

SCHEDSTAT: Final = Path("/proc/self/schedstat")
NS_PER_S: Final = 1e9

Times = Mapping[str, tuple[float, float]]
"""For each thread."""


def yield_to_traffic() -> None:
    """Makes the calling thread run at NICE, and the threads that it starts."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        _be_nice(threading.get_native_id())


def lower(process: int, *, only_when_idle: bool) -> None:
    """Makes a process that has just been started run at NICE, or only while a processor is idle.

    Beside a process at NICE, requests to other models had a p99 2.1 times as high as alone on two cores, beside one
    that runs only when idle 1.7 times; a mere loop of that kind makes it 1.6 times (`python -m bench --only reload`).
    """
    if only_when_idle and _tells_waits():
        try:
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
            return
        except OSError as error:
            log.debug("the scheduler does not take SCHED_IDLE: %s", error.strerror)
    _be_nice(process)


def hasten_end(process: int) -> None:
    """Gives a process that was killed its share of the processors again, as far as permissions allow.

    While no processor is idle, each thread of one that runs only when idle may need half a minute to end.
    """
    for thread in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def _be_nice(process: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, process) + NICE)
    except OSError as error:
        log.warning("compiling in the background can't be made to yield to the traffic: %s", error.strerror)


class Starvation:
    """Tells whether a process gets less than MIN_SHARE of what it asks for: the machine is never idle."""

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
        """Returns what the last window of STARVATION_WINDOW_S showed; to be asked several times in each."""
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


def _tells_waits() -> bool:
    """Returns whether the kernel tells how long threads wait: where it does not, starvation would go unseen."""
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
