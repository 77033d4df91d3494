"""Sends the requests of one block, and records how each ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.lines import REQUEST, Rows, Status
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
    """Answers since the last look."""

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
    """What one generator did in a block."""

    rows: Rows = field(default_factory=lambda: np.empty(0, REQUEST))
    """Requests; the coordinator fills in `block`."""
    sends: int = 0
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
        """What an open loop waits with; None where time is virtual, or the system has none."""
        self._rows: list[tuple[Any, ...]] = []
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
        result.rows = np.array(self._rows, REQUEST)
        # By the clock of the schedule: to shift times to another's may move a request over an edge of the window.
        first_ns, last_ns = self.window or (0, 0)
        due_ns = result.rows["scheduled_ns"]
        result.rows["measured"] = (due_ns >= first_ns) & (due_ns < last_ns)
        result.dropped_models = [model for due_ns, model in self._dropped if first_ns <= due_ns < last_ns]
        return result

    def live(self) -> Live:
        """Returns the answers since the last call. Raises TargetError where there was none for too long."""
        if self._is_abandoned:
            raise TargetError(f"nobody looked at the answers for {MAX_SILENCE_S:g} s: the load was ended")
        self._has_looked = True
        rows = self._rows[self._seen :]
        self._seen += len(rows)
        first_ns, last_ns = self.window or (0, 0)
        ended = [
            ((end_ns - due_ns) / 1e6, images, first_ns <= due_ns < last_ns, status is Status.OK)
            for _, _, due_ns, _, end_ns, status, images, *_ in rows
        ]
        answered = [(latency_ms, images, measured) for latency_ms, images, measured, is_right in ended if is_right]
        dropped = self._dropped[self._seen_dropped :]
        self._seen_dropped += len(dropped)
        return Live(
            sum(images for _, images, _ in answered),
            np.array([latency_ms for latency_ms, _, _ in answered], np.float32),
            len(rows) - len(answered),
            np.array([measured for _, _, measured in answered], np.bool_),
            sum(images for _, images, measured in answered if measured),
            sum(measured and not is_right for _, _, measured, is_right in ended),
            sum(first_ns <= due_ns < last_ns for due_ns, _ in dropped),
        )

    async def _run(self, start_ns: int) -> None:
        async with asyncio.TaskGroup() as sends:
            if self._task.schedule_ns is not None:
                self.is_warm.set()
                self._dispatcher = sends.create_task(self._dispatch(sends, start_ns, self._task.schedule_ns.tolist()))
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
            if status is not Status.OK and not self._is_over:
                await asyncio.sleep(FAILURE_PAUSE_S)
                due_ns = self._clock()

    async def _dispatch(self, sends: asyncio.TaskGroup, start_ns: int, schedule_ns: Sequence[int]) -> None:
        """Sends on schedule, whether or not earlier requests were answered."""
        sent = 0
        # What is dropped is passed over: each request is due at a time of its own.
        for offset_ns, request in zip(schedule_ns, self._feed, strict=True):
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
        self._rows.append(
            (0, False, due_ns, start_ns, end_ns, status, request.images, request.model, target, 0, *stages)
        )
        if status is Status.OK:
            self.answered += 1
        else:
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
