from __future__ import annotations

import asyncio
import gc
import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
from tests.fakes import Clock

from xlaserve.engine.gil import SHARED_SWITCH_S, SWITCH_S
from xlaserve.errors import DeadlineExceeded, InvalidImage
from xlaserve.images.threads import DecodingThreads, Rows, Turns

NEVER = float("inf")
PATIENCE_S = 20


class Bench:
    """Turns, and what they give in their order: a thread that works in virtual time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turns = Turns(self.clock)
        self.failed: list[Exception] = []

    def put(self, name: str, count: int, deadline: float = NEVER, *, is_rendering: bool = False) -> Rows:
        rows = Rows(lambda row: name, count, deadline, lambda error: self.failed.append(error) if error else None)
        self.turns.put(name, rows, is_rendering=is_rendering)
        return rows

    def take(self, images: int = 1, **costs_s: float) -> list[str]:
        """Works on the next images, each for its model's seconds; 1 where none are given."""
        names: list[str] = []
        while len(names) < images and (taken := self.turns.take()):
            rows, row, charge = taken
            name = str(rows.work(row))
            names.append(name)
            cost_s = costs_s.get(name, 1.0)
            self.clock.now += cost_s
            charge(cost_s)
        return names


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Turns.


def test_rows_of_one_model_come_in_the_order_of_its_requests(bench: Bench) -> None:
    first, second = bench.put("a", 2), bench.put("a", 2)
    taken = [bench.turns.take() for _ in range(5)]
    assert [(t[0], t[1]) for t in taken if t] == [(first, 0), (first, 1), (second, 0), (second, 1)]
    assert taken[4] is None


def test_one_image_waits_for_no_more_than_one_of_each_other_model(bench: Bench) -> None:
    for name in "abc":
        bench.put(name, 1000)
    bench.take(300)
    bench.put("new", 1)
    assert "new" in bench.take(4)


def test_models_share_by_seconds_and_not_by_images(bench: Bench) -> None:
    bench.put("slow", 1000)
    bench.put("fast", 1000)
    names = bench.take(440, slow=10.0, fast=1.0)
    assert names.count("fast") == pytest.approx(400, rel=0.05)


def test_a_model_saves_up_no_credit_while_it_is_idle(bench: Bench) -> None:
    bench.put("idle", 1)
    bench.put("busy", 1000)
    bench.take(500)
    bench.put("idle", 100)
    assert bench.take(100).count("idle") == pytest.approx(50, abs=1)


def test_several_threads_at_once_take_from_different_models(bench: Bench) -> None:
    """An image is charged its expected cost when it begins, not once its cost is known."""
    bench.put("a", 100)
    bench.put("b", 100)
    bench.take(10)
    under_way = [bench.turns.take() for _ in range(4)]
    assert sorted(str(t[0].work(0)) for t in under_way if t) == ["a", "a", "b", "b"]


def test_what_is_rendered_goes_before_what_is_decoded(bench: Bench) -> None:
    decoding = bench.put("a", 2)
    rendering = bench.put("a", 2, is_rendering=True)
    taken = [bench.turns.take() for _ in range(4)]
    assert [t[0] for t in taken if t] == [rendering, rendering, decoding, decoding]


def test_expected_decoding_time_follows_from_waiting_and_past_images(bench: Bench) -> None:
    assert bench.turns.expect("a", 3, 1)[:2] == (0.0, 0), "nothing is known"
    bench.put("a", 1)
    bench.take()
    bench.put("a", 5)
    assert bench.turns.expect("a", 3, 1)[:2] == (8.0, 5)
    assert bench.turns.expect("a", 3, 4)[:2] == (2.0, 5)
    bench.put("b", 1)
    assert bench.turns.expect("a", 3, 4)[:2] == (4.0, 5), "models take turns"
    bench.put("a", 9, is_rendering=True)
    assert bench.turns.expect("a", 3, 4).waiting == 5, "rendering is not decoding"


def test_dropped_rows_are_not_waited_for(bench: Bench) -> None:
    rows = bench.put("a", 5)
    bench.take(2)
    assert bench.turns.expect("a", 1, 1).waiting == 3
    bench.turns.drop(rows)
    assert bench.turns.expect("a", 1, 1).waiting == 0
    bench.put("a", 2, deadline=bench.clock.now)
    assert not bench.turns.take()
    assert bench.turns.expect("a", 1, 1).waiting == 0


def test_rows_whose_deadline_has_passed_are_failed_and_cost_nothing(bench: Bench) -> None:
    bench.put("a", 50, deadline=3.0)
    bench.put("b", 3)
    assert bench.take(100).count("a") <= 2
    assert [type(error) for error in bench.failed] == [DeadlineExceeded]


def test_dropped_rows_are_not_taken(bench: Bench) -> None:
    rows = bench.put("a", 50)
    bench.put("a", 1)
    bench.take(3)
    bench.turns.drop(rows)
    bench.turns.drop(rows)
    assert bench.take(100) == ["a"]


# Memory.


# Threads.


@pytest.fixture
def start() -> Iterator[Callable[[int], DecodingThreads]]:
    started = []

    def start(count: int) -> DecodingThreads:
        started.append(DecodingThreads(lambda: count))
        return started[-1]

    yield start
    for threads in started:
        threads.stop()


async def test_every_row_is_made_once_and_in_its_place(start: Callable[[int], DecodingThreads]) -> None:
    threads = start(3)
    made = await asyncio.gather(*(threads.map(n % 5, lambda row, n=n: (n, row), n, NEVER) for n in range(40)))  # type: ignore[misc]
    assert made == [[(n, row) for row in range(n)] for n in range(40)]


async def test_threads_yield_the_interpreter_more_often_while_they_work(
    start: Callable[[int], DecodingThreads],
) -> None:
    intervals = await start(2).map("m", lambda row: sys.getswitchinterval(), 20, NEVER)
    assert intervals == [pytest.approx(SHARED_SWITCH_S)] * 20
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


async def test_requests_slower_than_expected_raise_the_expectation(start: Callable[[int], DecodingThreads]) -> None:
    threads = start(1)
    for _ in range(30):
        await threads.map("a", lambda row: time.sleep(0.01), 1, NEVER)  # hardly any processor time
    assert threads.expect("a", 1).likely_s > 0.008


async def test_rows_are_made_side_by_side(start: Callable[[int], DecodingThreads]) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)
    await start(3).map("a", lambda row: together.wait(), 3, NEVER)


async def test_surplus_threads_end_and_no_row_waits_for_them() -> None:
    counts = [8]
    threads = DecodingThreads(lambda: counts[0])

    def work(row: int) -> threading.Thread:
        time.sleep(0.02)
        return threading.current_thread()

    async def at_once() -> int:
        """Returns on how many threads rows were made side by side."""
        return len({*await threads.map("a", work, 16, NEVER)})

    async with asyncio.timeout(PATIENCE_S):
        numbers = [await at_once()]
        counts[0] = 2
        for _ in range(20):  # each thread that ends leaves the row that it was told of to another
            await threads.map("a", lambda row: None, 1, NEVER)
        numbers.append(await at_once())
        assert threads.expect("a", 8).expected_s == pytest.approx(4 * threads.expect("a", 2).expected_s)
        counts[0] = 3
        numbers.append(await at_once())
    threads.stop()
    assert numbers == [8, 2, 3]


async def test_the_first_error_fails_the_rows_and_no_further_one_begins(
    start: Callable[[int], DecodingThreads],
) -> None:
    begun = []

    def work(row: int) -> None:
        begun.append(row)
        if row == 2:
            raise InvalidImage("no image")

    threads = start(1)
    with pytest.raises(InvalidImage, match="no image"):
        await threads.map("a", work, 100, NEVER)
    assert begun == [0, 1, 2]
    assert await threads.map("a", lambda row: row, 1, NEVER) == [0]


async def test_a_cancelled_caller_leaves_nothing_behind(start: Callable[[int], DecodingThreads]) -> None:
    class Image:
        pass

    begun, go_on = threading.Event(), threading.Event()
    made = []

    def work(row: int) -> None:
        made.append(row)
        begun.set()
        assert go_on.wait(PATIENCE_S)

    threads = start(1)
    image = Image()
    gone = weakref.ref(image)
    first = asyncio.create_task(threads.map("a", work, 3, NEVER))
    second = asyncio.create_task(threads.map("a", lambda row, image=image: image, 3, NEVER))  # type: ignore[misc]
    del image
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    del first, second, task
    await asyncio.sleep(0)  # asyncio keeps the last error until then
    gc.collect()
    assert gone() is None
    go_on.set()
    await threads.map("a", lambda row: row, 1, NEVER)
    assert made == [0]


async def test_a_request_is_answered_at_its_deadline_though_a_row_is_under_way(
    start: Callable[[int], DecodingThreads],
) -> None:
    go_on = threading.Event()
    threads = start(1)
    try:
        with pytest.raises(DeadlineExceeded):
            await threads.map("a", lambda row: go_on.wait(PATIENCE_S), 2, time.perf_counter() + 0.05)
    finally:
        go_on.set()


async def test_threads_that_could_not_be_started_are_started_by_the_next_request(
    start: Callable[[int], DecodingThreads], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = start(2)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no thread"):
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
        await decoding.map("a", lambda row: pytest.fail("nobody waits for this"), 2, NEVER)
    together = threading.Barrier(2, timeout=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await decoding.map("a", lambda row: together.wait(), 2, NEVER)


async def test_no_rows_are_made_at_once(start: Callable[[int], DecodingThreads]) -> None:
    assert await start(1).map("a", lambda row: row, 0, NEVER) == []


async def test_threads_end_when_they_are_stopped(start: Callable[[int], DecodingThreads]) -> None:
    before = set(threading.enumerate())
    threads = start(4)
    await threads.map("a", lambda row: row, 8, NEVER)
    own = set(threading.enumerate()) - before
    assert len(own) == 4
    threads.stop()
    for thread in own:
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not any(thread.is_alive() for thread in own)


KEPT_AFTER_A_LARGE_IMAGE = """
from PIL import Image
from xlaserve.engine.memory import keep_freed_memory, resident_bytes
from xlaserve.images.threads import DecodingThreads

keep_freed_memory()
DecodingThreads(lambda: 1)
before = resident_bytes()
large = Image.new("RGB", (8000, 4000))
behind = Image.new("L", (8, 8))
assert resident_bytes() - before > 100 * 2**20
del large
print(resident_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_a_large_image_is_given_back_though_a_small_one_stays() -> None:
    command, environment = (sys.executable, "-c", KEPT_AFTER_A_LARGE_IMAGE), dict(os.environ)
    environment.pop("PILLOW_BLOCK_SIZE", None)
    kept = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(kept) < 32 * 2**20
    of_pillow = {**environment, "PILLOW_BLOCK_SIZE": "16m"}
    kept = subprocess.run(command, env=of_pillow, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(kept) > 64 * 2**20, "what the environment says goes first"
