"""Sends the requests of a plan and records how each ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Final

from xlaserve_loadtest.arrivals import Block, ClosedLoop
from xlaserve_loadtest.payload import Request
from xlaserve_loadtest.record import BlockRecord, Record, Status
from xlaserve_loadtest.target import Connection, ModelInfo, Target

FAILURE_PAUSE_S: Final = 0.05
"""How long a slot rests after a failure, so that a dead target is not asked thousands of times a second."""


async def run(
    plan: Sequence[Block],
    target: Target,
    model: ModelInfo,
    requests: Mapping[str, Sequence[Request]],
    arrivals: ClosedLoop,
    *,
    record: Record,
    on_block: Callable[[Block], None] = lambda block: None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> None:
    """Runs the blocks of `plan` one after the other, each over a fresh connection, and adds to `record` as it goes.

    `requests` holds what each arm sends in turn; `clock` counts monotonic nanoseconds. An arm of which nothing was
    answered in a block is left out from then on. What was recorded stands when this is cancelled.
    """
    feeds = {arm: cycle(sequence) for arm, sequence in requests.items()}
    silent: set[str] = set()
    for block in plan:
        if block.arm in silent:
            continue
        on_block(block)
        async with target.connect(model) as connection:
            runner = _ClosedLoopBlock(
                block, connection, feeds[block.arm], slots=arrivals.slots, record=record, clock=clock
            )
            await runner.run()
        if not runner.answered:
            silent.add(block.arm)


class _ClosedLoopBlock:
    """One block under a closed loop: warm-up, then a window, then load until every request of the window is answered.

    Load goes on in the end so that the last measured requests meet the same company as the others.
    """

    def __init__(
        self,
        block: Block,
        connection: Connection,
        feed: Iterator[Request],
        *,
        slots: int,
        record: Record,
        clock: Callable[[], int],
    ) -> None:
        self.answered = 0
        self._block = block
        self._connection = connection
        self._feed = feed
        self._record = record
        self._clock = clock
        self._entry = BlockRecord(block.index, block.arm, slots, start_ns=clock())
        self._unheard_slots = slots
        self._outstanding = 0
        self._gave_up = False

    async def run(self) -> None:
        """Runs the block to its end. Whatever the target does, that takes a few request deadlines at most."""
        self._record.blocks.append(self._entry)
        cpu_before_s = time.process_time()
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._entry.slots):
                slots.create_task(self._run_slot())
        self._entry.cpu_s = time.process_time() - cpu_before_s
        self._entry.end_ns = self._clock()

    async def _run_slot(self) -> None:
        due_ns = self._clock()
        due_ns = await self._cycle(due_ns)
        self._unheard_slots -= 1
        while not self._is_over(due_ns):
            due_ns = await self._cycle(due_ns)

    async def _cycle(self, due_ns: int) -> int:
        """Sends one request and returns when the slot's next one is due."""
        window = self._entry.window_ns
        measured = window is not None and window[0] <= due_ns < window[1]
        self._outstanding += measured
        request = next(self._feed)
        start_ns = self._clock()
        reply = await self._connection.send(request)
        end_ns = next_due_ns = self._clock()
        self._outstanding -= measured
        self._record.add(
            self._entry,
            measured=measured,
            scheduled_ns=due_ns,
            start_ns=start_ns,
            end_ns=end_ns,
            status=reply.status,
            images=request.images,
            stages=reply.stages,
            detail=reply.detail,
        )
        if reply.status == Status.OK:
            self.answered += 1
        else:
            await asyncio.sleep(FAILURE_PAUSE_S)
            next_due_ns = self._clock()
        if measured:
            self._entry.slot_ns += next_due_ns - due_ns
        return next_due_ns

    def _is_over(self, now_ns: int) -> bool:
        """Whether a slot that is free at `now_ns` has nothing more to send; opens the window when it is time."""
        window = self._entry.window_ns
        if window is None:
            warm_ns = self._entry.start_ns + round(self._block.warmup_s * 1e9)
            if self._unheard_slots or now_ns < warm_ns:
                return False
            if self.answered and not self._gave_up:
                self._entry.window_ns = (now_ns, now_ns + round(self._block.duration_s * 1e9))
            else:
                # For good: a late answer must not open the window for the slots that are left.
                self._gave_up = True
            return self._gave_up
        return now_ns >= window[1] and not self._outstanding
