"""Threads that decode and render for several models, in turns.

Models share the threads by start-time fair queueing, as they share the device (see `engine.batching.lanes`): each
image advances its model's virtual time by the CPU seconds that it takes, and a free thread takes an image of the model
whose virtual time is least. Within a model rendering goes before decoding, as such requests are nearly done, and
requests are served in their order.

The worst case: an image of a model that was idle waits until a thread is free, which is at most the rest of one image,
and then for at most one image of each other model that has work waiting, however long their queues are. A large image
may wait in addition until the images in flight have given their memory back.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from PIL import Image

from xlaserve.engine import gil
from xlaserve.engine.wait_margin import WaitMargin
from xlaserve.errors import DeadlineExceeded

Made = TypeVar("Made")

FRESH: Final = 0.1
"""Weight of the latest image in the expected time of a model's next one."""
_BLOCK_BYTES: Final = 64 * 1024 * 1024


class Rows:
    """The rows of one request: each is worked on once; they start in order and run on several threads."""

    __slots__ = ("count", "deadline", "made", "model", "settle", "taken", "unfinished", "work")

    def __init__(
        self, work: Callable[[int], object], count: int, deadline: float, settle: Callable[[Exception | None], None]
    ) -> None:
        self.work = work
        self.count = count
        self.deadline = deadline
        self.settle = settle
        """Called on any thread, perhaps more than once: with None once every row is made, or with an error."""
        self.made: list[Any] = [None] * count
        self.taken = 0
        self.unfinished = count
        self.model: _Model | None = None
        """The model in whose queue it waits."""


class DecodeForecast(NamedTuple):
    """The expected time until images are decoded."""

    expected_s: float
    waiting: int
    """Images of the model that are decoded before."""
    wait_margin: WaitMargin

    @property
    def likely_s(self) -> float:
        """Seconds within which they are most likely decoded."""
        return self.wait_margin.likely_s(self.expected_s)


class _Model:
    """One model's rows that wait for its turns."""

    def __init__(self) -> None:
        self.rendering: deque[Rows] = deque()
        self.decoding: deque[Rows] = deque()
        self.waiting = 0
        """Rows in `decoding`."""
        self.virtual_s = 0.0
        self.cost_s = 0.0
        """The expected CPU seconds of a row."""
        self.wait_margin = WaitMargin()
        """The margin of the requests that are decoded."""

    @property
    def next(self) -> deque[Rows]:
        return self.rendering or self.decoding

    def charge(self, charged_s: float, took_s: float) -> None:
        self.virtual_s += took_s - charged_s
        self.cost_s += (took_s - self.cost_s) * (FRESH if self.cost_s else 1)


class Turns:
    """The models' rows that wait, and the order in which they are taken. Not locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._models: dict[Hashable, _Model] = {}
        self._busy: set[_Model] = set()
        self._virtual_s = 0.0

    def put(self, name: Hashable, rows: Rows, *, is_rendering: bool = False) -> None:
        """Adds rows of the model `name`."""
        model = rows.model = self._models.setdefault(name, _Model())
        if model not in self._busy:
            self._busy.add(model)
            model.virtual_s = max(model.virtual_s, self._virtual_s)  # next; idle time earns no credit
        if is_rendering:
            model.rendering.append(rows)
        else:
            model.decoding.append(rows)
            model.waiting += rows.count

    def take(self) -> tuple[Rows, int, Callable[[float], None]] | None:
        """Returns the next row, and a function to be called with the CPU seconds that it took; None where nothing
        waits.

        Rows whose deadline has passed are failed instead.
        """
        while self._busy:
            model = min(self._busy, key=lambda model: model.virtual_s)
            rows = model.next[0]
            if rows.deadline <= self._clock():
                self.drop(rows)
                rows.settle(late())
                continue
            row = rows.taken
            rows.taken += 1
            if not model.rendering:
                model.waiting -= 1
            if rows.taken == rows.count:
                self.drop(rows)
            self._virtual_s = max(self._virtual_s, model.virtual_s)
            expected_s = model.cost_s
            model.virtual_s += expected_s
            return rows, row, partial(model.charge, expected_s)
        return None

    def expect(self, name: Hashable, count: int, threads: int) -> DecodeForecast:
        """Returns the forecast for `count` more images of the model `name` on so many threads."""
        model = self._models.setdefault(name, _Model())
        others = len(self._busy) - (model in self._busy)
        rounds = max(1.0, (model.waiting + count) / threads)
        return DecodeForecast(rounds * model.cost_s * (1 + others), model.waiting, model.wait_margin)

    def drop(self, rows: Rows) -> None:
        """Takes `rows` out, if they still wait."""
        if (model := rows.model) is None:
            return
        rows.model = None
        if rows in model.rendering:
            model.rendering.remove(rows)
        else:
            model.decoding.remove(rows)
            model.waiting -= rows.count - rows.taken
        if not model.next:
            self._busy.remove(model)


def late() -> DeadlineExceeded:
    """Returns the error for rows whose deadline has passed."""
    return DeadlineExceeded("the deadline passed before every image was decoded and rendered")


class DecodingThreads:
    """Threads that decode and render, as many as `count` returns. They start with the first work, and end where it
    falls.

    `count` is called with a lock held, on any thread.
    """

    def __init__(self, count: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._count = count
        self._clock = clock
        self._turns = Turns(clock)
        self._changed = threading.Condition()
        self._started = 0
        self._is_stopped = False
        _give_back_large_images()

    @property
    def count(self) -> int:
        """The number of threads that there should be."""
        return self._count()

    async def map(
        self, model: Hashable, work: Callable[[int], Made], count: int, deadline: float, *, is_rendering: bool = False
    ) -> list[Made]:
        """Returns the results of `work` for each row from 0 to `count` - 1, which run on several threads.

        `deadline` is in seconds of the clock: DeadlineExceeded is raised as soon as it has passed. Where a row fails,
        its error is raised at once. Then, and where the caller is cancelled, no further row begins.
        """
        if not count:
            return []
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if settled.done():
                return
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        def settle_soon(error: Exception | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, error)

        rows = Rows(work, count, deadline, settle_soon)
        began = self._clock()
        with self._changed:
            self._start()
            forecast = self._turns.expect(model, count, self.count)
            self._turns.put(model, rows, is_rendering=is_rendering)
            self._changed.notify(count)
        timer = None if deadline == float("inf") else loop.call_later(deadline - self._clock(), settle, late())
        try:
            await settled
        finally:
            if timer:
                timer.cancel()
            with self._changed:
                self._turns.drop(rows)
            if forecast.expected_s and not is_rendering and (not rows.unfinished or self._clock() >= deadline):
                forecast.wait_margin.observe(forecast.expected_s, self._clock() - began)
        return rows.made

    def expect(self, model: Hashable, count: int) -> DecodeForecast:
        """Returns the forecast for `count` more images of `model`."""
        with self._changed:
            return self._turns.expect(model, count, self.count)

    def stop(self) -> None:
        """Ends each thread after its current row; rows that wait are dropped."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _start(self) -> None:
        while self._started < self.count:  # where the system gives no thread, the next request tries again
            threading.Thread(target=self._serve, name=f"decode-{self._started}", daemon=True).start()
            self._started += 1

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            rows, row, charge = taken
            error: Exception | None = None
            began = time.thread_time()
            try:
                with gil.shared():
                    rows.made[row] = rows.work(row)
            except Exception as raised:
                error = raised
            with self._changed:
                charge(time.thread_time() - began)
                rows.unfinished -= 1
                if error is not None:
                    self._turns.drop(rows)
            if error is not None or not rows.unfinished:
                rows.settle(error)
            del taken, rows, charge, error  # no images are kept while this waits

    def _take(self) -> tuple[Rows, int, Callable[[float], None]] | None:
        with self._changed:
            while not self._is_stopped:
                if self._started > self.count:
                    self._started -= 1
                    self._changed.notify()  # another one, as it may have been this one that was told of work
                    return None
                if taken := self._turns.take():
                    return taken
                self._changed.wait()
        return None


def _give_back_large_images() -> None:
    """Has Pillow keep large images in blocks that glibc maps one by one, unless the environment sets their size.

    Its blocks of 16 MiB come from the heap of the thread that decodes. A small one that is allocated behind them keeps
    all of them from the system, for each thread.
    """
    if "PILLOW_BLOCK_SIZE" not in os.environ:  # which Pillow reads itself
        Image.core.set_block_size(_BLOCK_BYTES)  # type: ignore[attr-defined]
