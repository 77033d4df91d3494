"""What several fronts have in use together."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import Clock

from xlaserve.admission import shared_counts
from xlaserve.admission.caller import Caller, Limit, Origin, Role
from xlaserve.admission.calls import STALL_CHECK_S, CallAdmission, CallTask
from xlaserve.admission.image_memory import ImageMemory
from xlaserve.admission.limits import Limiter
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.admission.shared_counts import Kind, SharedCounts
from xlaserve.errors import LimitExceeded, QueueFull
from xlaserve.planning.virtual_time import VirtualTimeLoop

FRONTS = 3
PATIENCE_S = 30.0
KILLS = 20
LIMIT = Limit(images_per_s=2, burst_images=6, max_images=4)
CALLERS = (
    Caller("shop", frozenset([Role.INFER]), limits=(LIMIT, Limit(models=("digits",), images_per_s=1, burst_images=4))),
    Caller("10.0.0.1", frozenset([Role.INFER]), limits=(LIMIT,), origin=Origin.ADDRESS),
)
HAMMER = """
import sys, time
from xlaserve.admission.caller import Caller, Limit
from xlaserve.admission.limits import Limiter
from xlaserve.admission.shared_counts import Kind, SharedCounts

file, fronts, front = map(int, sys.argv[1:])
usage = SharedCounts(file, fronts, front)
limiter = Limiter(time.perf_counter, usage=usage)
callers = [Caller(f"caller {number}", frozenset(), limits=(Limit(max_images=10**6),)) for number in range(50)]
held = usage.amount(Kind.HELD_BYTES)
print("ready", flush=True)
while True:
    for caller in callers:
        with limiter.hold(caller, "digits", 3):
            held.own += 1000
            held.own -= 1000
"""
SPENT_IMAGES = 20_000
SPEND = f"""
import sys
from xlaserve.admission.caller import Caller, Limit
from xlaserve.admission.limits import Limiter
from xlaserve.errors import LimitExceeded
from xlaserve.admission.shared_counts import Kind, SharedCounts

file, fronts, front = map(int, sys.argv[1:])
usage = SharedCounts(file, fronts, front)
limiter = Limiter(lambda: 1.0, usage=usage)
caller = Caller("shop", frozenset(), limits=(Limit(images_per_s=1.0, burst_images={SPENT_IMAGES}),))
started = usage.amount(Kind.CALLS)
started.own = 1
while started.total < fronts:
    pass  # so that all begin at the same time
taken = 0
try:
    while True:
        with limiter.hold(caller, "digits", 1):
            taken += 1
except LimitExceeded:
    print(taken)
"""


@contextmanager
def table(fronts: int = FRONTS) -> Iterator[Callable[[int], SharedCounts]]:
    """Yields what gives each front, by number, its own view of one table."""
    file = shared_counts.create(fronts)
    try:
        yield lambda front: SharedCounts(file, fronts, front)
    finally:
        os.close(file)


@pytest.fixture
def fronts() -> Iterator[list[SharedCounts]]:
    with table() as of:
        yield [of(front) for front in range(FRONTS)]


class House:
    """Limiters of fronts with one table, and one that has seen all that they have: they must say the same."""

    def __init__(self, of: Callable[[int], SharedCounts]) -> None:
        self.clock = Clock(100.0)
        self._of = of
        self._supervisor = of(0)
        self._limiters = [Limiter(self.clock, usage=of(front)) for front in range(FRONTS)]
        self._alone = Limiter(self.clock)
        self._under_way: list[tuple[int, ExitStack, ExitStack]] = []
        self._dead: list[ExitStack] = []

    def ask(self, front: int, caller: Caller, images: int, model: str) -> None:
        answers = []
        held = ExitStack(), ExitStack()
        for limiter, stack in zip((self._limiters[front], self._alone), held, strict=True):
            try:
                stack.enter_context(limiter.hold(caller, model, images))
            except LimitExceeded as refused:
                answers.append(refused.retry_after_s)
            else:
                answers.append(0.0)
        assert answers[0] == pytest.approx(answers[1])
        if answers == [0.0, 0.0]:
            self._under_way.append((front, *held))

    def end(self, which: int, *, is_refused: bool) -> None:
        if self._under_way:
            _, *held = self._under_way.pop(which % len(self._under_way))
            for stack in held:
                _end(stack, is_refused=is_refused)

    def kill(self, front: int) -> None:
        """What it has under way never ends there."""
        for killed, left, held in self._under_way:
            if killed == front:
                self._dead.append(left)  # else it would end
                _end(held, is_refused=False)
        self._under_way = [one for one in self._under_way if one[0] != front]
        self._supervisor.clear(front)
        self._limiters[front] = Limiter(self.clock, usage=self._of(front))


def _end(stack: ExitStack, *, is_refused: bool) -> None:
    if not is_refused:
        stack.close()
        return
    with pytest.raises(QueueFull), stack:
        raise QueueFull("full")


front_numbers = st.integers(0, FRONTS - 1)
steps = st.one_of(
    st.tuples(
        st.just("ask"), front_numbers, st.sampled_from(CALLERS), st.integers(1, 4), st.sampled_from(["digits", "noop"])
    ),
    st.tuples(st.just("end"), st.integers(0, 100), st.booleans()),
    st.tuples(st.just("kill"), front_numbers),
    st.tuples(st.just("wait"), st.floats(0, 3)),
)


@given(st.lists(steps, max_size=60))
def test_fronts_killed_at_any_time_keep_the_limits_of_one_process(said: list[Any]) -> None:
    with table() as of:
        house = House(of)
        for step, *arguments in said:
            house.clock.now += 1e-6  # no two fronts decide at the same time
            match step:
                case "ask":
                    house.ask(*arguments)
                case "end":
                    house.end(arguments[0], is_refused=arguments[1])
                case "kill":
                    house.kill(*arguments)
                case "wait":
                    house.clock.now += arguments[0]


def test_processes_that_are_killed_leave_nothing_in_use() -> None:
    file = shared_counts.create(FRONTS)
    supervisor = SharedCounts(file, FRONTS)
    mine = supervisor.amount(Kind.HELD_BYTES)
    mine.own = 7
    caller = Caller("caller 7", frozenset(), limits=(Limit(max_images=10**6),))
    limiter = Limiter(Clock(1.0), usage=supervisor)
    command = [sys.executable, "-c", HAMMER, str(file), str(FRONTS)]
    try:
        with limiter.hold(caller, "digits", 5):
            for kill in range(KILLS // (FRONTS - 1)):
                running = [
                    subprocess.Popen([*command, str(front)], stdout=subprocess.PIPE, pass_fds=[file])
                    for front in range(1, FRONTS)
                ]
                for front, process in enumerate(running, 1):
                    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                    threading.Event().wait(0.001 * kill)
                    process.kill()
                    process.wait()
                    process.stdout.close()
                    supervisor.clear(front)
                assert mine.total == 7
                under_way = [
                    supervisor.listed.look(f"file:caller {number}\0" + "0\0*").under_way for number in range(50)
                ]
                assert under_way == [0] * 7 + [5] + [0] * 42
    finally:
        os.close(file)


def test_a_count_that_another_front_changed_last_is_what_holds(fronts: list[SharedCounts]) -> None:
    one = fronts[0].listed.look("shop")
    assert not one.is_known
    one.begin(3, 5.0, at=1.0)
    fronts[1].listed.look("shop").begin(4, 6.0, at=2.0)
    seen = fronts[2].listed.look("shop")
    assert (seen.under_way, seen.level, seen.at) == (7, 2.0, 2.0)
    one.end(3)
    seen = fronts[2].listed.look("shop")
    assert (seen.under_way, seen.level, seen.at) == (4, 2.0, 2.0)
    one.give_back(3)
    assert fronts[2].listed.look("shop").level == 5.0
    assert not fronts[2].others.look("shop").is_known


def test_what_fronts_take_at_the_same_moment_is_all_counted(fronts: list[SharedCounts]) -> None:
    for account in [front.listed.look("shop") for front in fronts]:
        account.begin(2, 5.0, at=1.0)
    seen = fronts[0].listed.look("shop")
    assert (seen.under_way, seen.level, seen.at) == (6, -1.0, 1.0)


def test_busy_fronts_let_a_caller_have_its_burst_and_no_more() -> None:
    file = shared_counts.create(FRONTS)
    command = [sys.executable, "-c", SPEND, str(file), str(FRONTS)]
    try:
        with ExitStack() as running:
            spenders = [
                subprocess.Popen([*command, str(front)], stdout=subprocess.PIPE, pass_fds=[file])
                for front in range(FRONTS)
            ]
            for spender in spenders:
                running.callback(spender.kill)
            taken = sum(int(spender.communicate(timeout=PATIENCE_S)[0]) for spender in spenders)
    finally:
        os.close(file)
    # Each may find the first image and the last one at the same moment as others.
    assert SPENT_IMAGES <= taken <= SPENT_IMAGES + 2 * FRONTS


async def test_messages_of_all_fronts_are_bounded_together(fronts: list[SharedCounts]) -> None:
    one, other = (MessageMemory(400, 100, 10**12, lambda: 0, usage=front) for front in fronts[:2])
    one.take(300)
    with pytest.raises(QueueFull, match="101 more bytes exceed max_inflight_bytes 400; 300 are held"):
        other.take(101)
    other.take(100)
    assert (one.held_bytes, other.held_bytes) == (300, 100)
    assert one.is_crowded and other.is_crowded
    fronts[2].clear(0)
    other.take(300)
    other.release(400)
    other.expect(4)
    assert one.is_crowded
    other.end_expecting()
    assert not one.is_crowded


async def test_a_front_finds_places_that_calls_of_another_no_longer_need(
    virtual_time: VirtualTimeLoop, fronts: list[SharedCounts]
) -> None:
    clock = asyncio.get_running_loop().time
    one, other = (CallAdmission(2, 100.0, 5.0, clock, max_per_address=2, usage=front) for front in fronts[:2])

    def cancel(calls: Collection[CallTask], reason: str) -> None:
        for ended in calls:
            ended.cancel()

    async def call(admission: CallAdmission) -> None:
        admission.enter(cancel)
        admission.locate("10.0.0.1")
        await asyncio.Event().wait()

    async def refused(admission: CallAdmission) -> bool:
        task: CallTask = asyncio.create_task(call(admission))
        under_way.append(task)
        await asyncio.sleep(0)
        return task.done() and isinstance(task.exception(), QueueFull)

    under_way: list[CallTask] = []
    assert not await refused(one)
    assert not await refused(one)
    await asyncio.sleep(10)
    assert await refused(other)
    await asyncio.sleep(2 * STALL_CHECK_S)
    assert under_way[0].cancelled()
    assert not await refused(other)
    assert await refused(other)
    for task in under_way:
        task.cancel()


async def test_calls_of_an_address_are_bounded_at_all_fronts_together(
    virtual_time: VirtualTimeLoop, fronts: list[SharedCounts]
) -> None:
    clock = asyncio.get_running_loop().time
    one, other = (CallAdmission(100, 100.0, 5.0, clock, max_per_address=1, usage=front) for front in fronts[:2])
    first, second = asyncio.Event(), asyncio.Event()

    async def call(admission: CallAdmission, ending: asyncio.Event) -> None:
        admission.enter(lambda calls, reason: None)
        admission.locate("10.0.0.1")
        await ending.wait()

    under_way = asyncio.create_task(call(one, first))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_calls_per_address: expected at most 1 calls"):
        await call(other, second)
    first.set()
    await under_way
    second.set()
    await call(other, second)


def test_decoding_at_one_front_waits_for_the_memory_of_another_in_turn(fronts: list[SharedCounts]) -> None:
    memories = [ImageMemory(100, front) for front in fronts]
    order: list[int] = []
    ready = [threading.Event() for _ in fronts]

    def hold(front: int) -> None:
        ready[front].set()
        with memories[front].hold(100):
            order.append(front)

    def waits(front: int) -> bool:
        return fronts[front].amount(Kind.DECODE_WAITS_SINCE).own > 0

    with memories[0].hold(1):
        waiting = []
        for front in (2, 1):
            waiting.append(threading.Thread(target=hold, args=(front,)))
            waiting[-1].start()
            while not waits(front):
                ready[front].wait(0.001)
        assert order == []
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert order == [2, 1]
    assert fronts[0].amount(Kind.DECODE_BYTES).total == 0


def test_all_see_how_many_fronts_there_are_of_those_that_have_a_row(fronts: list[SharedCounts]) -> None:
    assert [front.serving for front in fronts] == [FRONTS] * FRONTS
    fronts[0].serving = 1
    fronts[1].amount(Kind.CALLS).own = 7
    fronts[1].clear(1)
    assert [front.serving for front in fronts] == [1] * FRONTS
    assert SharedCounts().serving == 1
