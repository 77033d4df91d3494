"""Sends the requests of one block, and records how each ended."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.requests import ANSWERED, REQUEST, Rows, Status
from xlaserve_loadtest.run.alarm import Alarm
from xlaserve_loadtest.run.strain import Strain, StrainWatch
from xlaserve_loadtest.schedule.arrivals import Places, Schedule
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Connection, TargetError

FAILURE_PAUSE_S: Final = 0.05
"""How long a closed loop's slot rests after a failure: a dead target must not get thousands of requests a second."""
LATE_NS: Final = 1_000_000
MAX_SILENCE_S: Final = 30.0
"""How long a closed loop goes on while its coordinator, which stands still, does not look at the answers."""

ALARM_SPIN_NS: Final = 300_000
"""How long before a send is due the clock is polled, where an alarm wakes the sender, which takes a while."""

_POLL_S: Final = 0.01
_LOOK_S: Final = 1.0
_LISTED: Final = 4096
_CODES: Final = {"b1": "?", "u1": "B", "u4": "I", "i8": "q", "f4": "f"}
_pack_row: Final = struct.Struct("=" + "".join(_CODES[REQUEST[name].str[1:]] for name in REQUEST.names or ())).pack
"""Makes the bytes of a row of REQUEST: a tuple of Python's numbers would take five times the memory."""

Window = tuple[int, int]
Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Task:
    """One worker's share of a block."""

    arm: str
    targets: tuple[str, ...]
    """Addresses or other names of the worker's targets."""
    slots: int = 0
    """Slots of a closed loop; 0 makes it an open one."""
    schedule_ns: Schedule | None = None
    """When requests of an open loop are due: nanoseconds after the start."""
    requests: Places | None = None
    """Which they are, as in `arrivals.Sends`; None where `schedule_ns` is None."""
    late_ns: float = LATE_NS
    max_in_flight: int = 0
    """Limit of an open loop: requests due beyond it are dropped."""


@dataclass(frozen=True, slots=True)
class Live:
    """Answers since the last look, those that differ from what the same request got alone among them."""

    images: int
    latencies_ms: NDArray[np.float32]
    """Latencies of the answered requests."""
    errors: int
    measured: NDArray[np.bool_]
    """Which of these latencies are of requests that were due in the window."""
    measured_images: int = 0
    measured_errors: int = 0
    dropped: int = 0
    """Requests that were due in the window and could not be sent."""

    @classmethod
    def of(cls, looks: Sequence[Live]) -> Live:
        """Returns what several generators saw."""
        return cls(
            sum(look.images for look in looks),
            np.concatenate([look.latencies_ms for look in looks]),
            sum(look.errors for look in looks),
            np.concatenate([look.measured for look in looks]),
            sum(look.measured_images for look in looks),
            sum(look.measured_errors for look in looks),
            sum(look.dropped for look in looks),
        )


@dataclass
class Result:
    """The work of one generator in a block."""

    sends: int = 0
    """Requests that ended."""
    late_sends: int = 0
    dropped_models: list[int] = field(default_factory=list)
    """Models of the requests that were due in the window and could not be sent."""
    compared: int = 0
    """Answers that were compared with what the same request got alone."""
    differing: int = 0
    """Answers of these that differ."""
    cpu_s: float = 0.0
    strain: Strain = field(default_factory=Strain)
    failures: dict[Status, tuple[int, str]] = field(default_factory=dict)
    """The number of failures and the first message, by status."""
    generator: str = ""
    """HOST:PORT of a generator on another machine; empty for this machine."""
    clock_error_ms: float = 0.0
    """How far its times may be off at most, where its clock drifted evenly."""
    clock_drift_ms: float = 0.0
    """How far its clock drifted from the coordinator's in the block."""


class Sender:
    """Sends the load of one block.

    Load goes on after the window so that the last measured requests have as many batch-mates as the others.
    """

    def __init__(
        self, task: Task, connection: Connection, feed: Iterator[Request], clock: Clock, spin_s: float
    ) -> None:
        self.window: Window | None = None
        self.is_warm = asyncio.Event()
        self.is_settled = asyncio.Event()
        self.answered = 0
        self._task = task
        self._send_to = connection.send
        self._feed = feed
        self._clock = clock
        self._spin_s = spin_s
        self._alarm: Alarm | None = None
        """The alarm that an open loop waits for; None where time is virtual, or the system has none."""
        self._rows = bytearray()
        """Rows of REQUEST, in the order in which they ended."""
        self._dropped: list[tuple[int, int]] = []
        """When each request that could not be sent was due, and its model."""
        self._seen = self._seen_dropped = 0
        self._measured_under_way = 0
        self._is_over = False
        self._is_abandoned = False
        self._has_looked = False
        self._result = Result()
        self._cpu_before_s = 0.0
        self._watch = StrainWatch(clock)
        self._main: asyncio.Task[None] | None = None
        self._dispatcher: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._next_due_ns = math.inf
        """When an open loop's next request is due."""

    def begin(self, start_ns: int) -> None:
        """Starts sending at `start_ns`."""
        self._cpu_before_s = time.process_time()
        self._watch.start()
        if self._task.schedule_ns is not None and self._clock is time.monotonic_ns:
            self._alarm = Alarm.or_none()
        if self._task.slots:  # a schedule ends by itself
            self._guard = asyncio.create_task(self._end_when_abandoned())
        self._main = asyncio.create_task(self._run(start_ns))

    async def finish(self, *, at_once: bool) -> Result:
        """Stops sending, and waits for requests under way, unless `at_once`."""
        self._is_over = True
        for task in (self._dispatcher, self._guard):
            if task:
                task.cancel()
        if self._main:
            if at_once:
                self._main.cancel()
            # This cancels the block's task, not its caller.
            await asyncio.wait((self._main,))
            if not self._main.cancelled():
                self._main.result()
        if self._alarm:
            self._alarm.close()
        result = self._result
        result.cpu_s = time.process_time() - self._cpu_before_s
        result.strain = self._watch.stop()
        # By the clock of the schedule: to shift times to another's may move a request over an edge of the window.
        rows = self.rows()
        rows["measured"] = self._is_measured(rows)
        first_ns, last_ns = self.window or (0, 0)
        result.dropped_models = [model for due_ns, model in self._dropped if first_ns <= due_ns < last_ns]
        return result

    def rows(self, first: int = 0) -> Rows:
        """Returns the requests that ended, from the index `first` on; the coordinator fills in `block`.

        They are views: none may be kept while requests are under way.
        """
        return np.frombuffer(self._rows, REQUEST)[first:]

    def _is_measured(self, rows: Rows) -> NDArray[np.bool_]:
        first_ns, last_ns = self.window or (0, 0)
        due_ns = rows["scheduled_ns"]
        measured: NDArray[np.bool_] = (due_ns >= first_ns) & (due_ns < last_ns)
        return measured

    def live(self) -> Live:
        """Returns the answers since the last call. Raises TargetError where there was none for too long."""
        if self._is_abandoned:
            raise TargetError(f"nobody looked at the answers for {MAX_SILENCE_S:g} s: the load was ended")
        self._has_looked = True
        rows = self.rows(self._seen)
        self._seen += len(rows)
        measured, is_answered = self._is_measured(rows), np.isin(rows["status"], ANSWERED)
        dropped = self._dropped[self._seen_dropped :]
        self._seen_dropped += len(dropped)
        first_ns, last_ns = self.window or (0, 0)
        return Live(
            int(rows["images"][is_answered].sum()),
            ((rows["end_ns"] - rows["scheduled_ns"])[is_answered] / 1e6).astype(np.float32),
            int((~is_answered).sum()),
            measured[is_answered],
            int(rows["images"][is_answered & measured].sum()),
            int((measured & ~is_answered).sum()),
            sum(first_ns <= due_ns < last_ns for due_ns, _ in dropped),
        )

    async def _run(self, start_ns: int) -> None:
        async with asyncio.TaskGroup() as sends:
            if self._task.schedule_ns is not None:
                self.is_warm.set()
                self._dispatcher = sends.create_task(self._dispatch(sends, start_ns, self._task.schedule_ns))
                return
            await self._sleep_until(start_ns)
            self._unheard = self._task.slots
            for _ in range(self._task.slots):
                sends.create_task(self._run_slot())

    async def _end_when_abandoned(self) -> None:
        """Counts turns of the loop instead of time, as a look may wait while this process is busy itself."""
        silent_turns = 0
        while silent_turns * _LOOK_S < MAX_SILENCE_S:
            self._has_looked = False
            await asyncio.sleep(_LOOK_S)
            silent_turns = 0 if self._has_looked else silent_turns + 1
        self._is_over = self._is_abandoned = True

    async def _run_slot(self) -> None:
        """Sends one request after the other until the block is over."""
        due_ns = self._clock()
        is_heard = False
        while not self._is_over:
            status, due_ns = await self._send(due_ns, next(self._feed))
            if not is_heard:
                is_heard = True
                self._unheard -= 1
                if not self._unheard:
                    self.is_warm.set()
            if status not in ANSWERED and not self._is_over:
                await asyncio.sleep(FAILURE_PAUSE_S)
                due_ns = self._clock()

    async def _dispatch(self, sends: asyncio.TaskGroup, start_ns: int, schedule_ns: Schedule) -> None:
        """Sends on schedule, whether or not earlier requests were answered."""
        sent = 0
        # What is dropped is passed over: each request is due at a time of its own.
        for offset_ns, request in zip(listed(schedule_ns), self._feed, strict=True):
            self._next_due_ns = due_ns = start_ns + offset_ns
            # Yields at least once, so that sent requests progress even when the generator is behind.
            await asyncio.sleep(0)
            await self._sleep_until(due_ns)
            if sent - self._result.sends >= self._task.max_in_flight:
                self._dropped.append((due_ns, request.model))
                continue
            sent += 1
            sends.create_task(self._send(due_ns, request))
            self._check_settled(self._clock())
        self._next_due_ns = math.inf
        # The window may still move to an earlier end.
        while self.window is None or self._clock() < self.window[1]:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._check_settled(self._clock())

    async def _send(self, due_ns: int, request: Request) -> tuple[Status, int]:
        """Sends one request; returns how it ended and when."""
        window = self.window
        measured = window is not None and window[0] <= due_ns < window[1]
        self._measured_under_way += measured
        start_ns = self._clock()
        status, stages, detail, target, arrived_ns = await self._send_to(request)
        end_ns = arrived_ns or self._clock()
        self._measured_under_way -= measured
        self._result.sends += 1
        self._result.late_sends += start_ns - due_ns > self._task.late_ns
        self._rows += _pack_row(
            0, False, due_ns, start_ns, end_ns, status, request.images, request.model, target, 0, *stages
        )
        self.answered += status in ANSWERED
        if status is not Status.OK:
            count, first = self._result.failures.get(status, (0, detail))
            self._result.failures[status] = (count + 1, first)
        self._check_settled(end_ns)
        return status, end_ns

    def _check_settled(self, now_ns: int) -> None:
        window = self.window
        if window and min(now_ns, self._next_due_ns) >= window[1] and not self._measured_under_way:
            self.is_settled.set()

    async def _sleep_until(self, due_ns: int) -> None:
        if self._alarm and (before_ns := due_ns - ALARM_SPIN_NS) > self._clock():
            await self._alarm.wait_until(before_ns)
        while (left_s := (due_ns - self._clock()) / 1e9) > 0:  # noqa: ASYNC110 - time, not an event, is waited for
            await asyncio.sleep(left_s - self._spin_s if left_s > self._spin_s else 0)


def listed(values: NDArray[np.integer[Any]]) -> Iterator[int]:
    """Yields values as Python's numbers, some at a time: all those of a long block would take much memory."""
    for first in range(0, len(values), _LISTED):
        yield from values[first : first + _LISTED].tolist()
