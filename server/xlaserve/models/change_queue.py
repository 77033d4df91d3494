"""The queue of changes of models, each model's one after the other, and work that several callers share."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Final, Generic, Literal, TypeVar

from xlaserve.errors import LoadEnded, QueueFull, ShuttingDown, XlaserveError

MAX_WAITING: Final = 8
"""Changes of one model that wait for the one under way: loads and unloads may be requested in turns."""

NO_MORE_LOADS: Final = "the server is shutting down; no model is loaded any more"

UNLOADED: Final = "model {} was unloaded while it was loading"

Kind = Literal["start", "load", "update", "unload"]
R = TypeVar("R")

log = logging.getLogger(__name__)


class Stop(threading.Event):
    """Set once no model is to be loaded any more. The one of a single load is also set where `all_loads` is."""

    def __init__(self, all_loads: Stop | None = None) -> None:
        super().__init__()
        self._all_loads = all_loads

    def is_set(self) -> bool:
        """Returns whether it is set, or `all_loads` is."""
        return super().is_set() or (self._all_loads is not None and self._all_loads.is_set())

    def check(self) -> None:
        """Raises ShuttingDown once it is set."""
        if self.is_set():
            raise ShuttingDown(NO_MORE_LOADS)


class _Change:
    def __init__(self, kind: Kind, work: Callable[[], Awaitable[None]], before: Iterable[_Change]) -> None:
        self.kind = kind
        self.has_begun = False
        self.is_dropped = False
        self.task: asyncio.Task[None] = asyncio.create_task(self._make(work, [change.task for change in before]))

    async def _make(self, work: Callable[[], Awaitable[None]], before: Collection[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        self.has_begun = True
        await work()


class ChangeQueue:
    """Makes one change of a model at a time, in the order in which they were asked for.

    Callers that ask for the same change one after the other share the one that waits for its turn, and it goes on when
    they give up. So however often one thing is asked for, it is done once more at most.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, list[_Change]] = {}
        """The changes of each model, the oldest first."""

    async def make(self, name: str, kind: Kind, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work` for the model once its turn has come, or waits for a call that does the same.

        Raises what that raises, QueueFull where too many changes of the model wait already, ShuttingDown, and
        LoadEnded where it was dropped.
        """
        under_way = self._under_way.setdefault(name, [])
        change = under_way[-1] if under_way else None
        if change is None or change.has_begun or change.kind != kind:
            if len(under_way) > MAX_WAITING:
                raise QueueFull(f"model {name}: {MAX_WAITING} loads and unloads wait already")
            change = _Change(kind, work, before=under_way)
            change.task.add_done_callback(partial(self._end, name, change))
            under_way.append(change)
        await asyncio.wait([change.task])  # the change goes on where this caller gives up
        if change.is_dropped:
            raise LoadEnded(UNLOADED.format(name))
        if change.task.cancelled():
            if kind == "unload":
                raise ShuttingDown("the server is shutting down; this change was not completed")
            raise ShuttingDown(NO_MORE_LOADS)
        change.task.result()

    def drop_loads(self, name: str) -> None:
        """Drops the loads of a model that wait for their turn, as it is to be unloaded."""
        for change in [*self._under_way.get(name, ())]:
            if not change.has_begun and change.kind != "unload":
                change.is_dropped = True
                change.task.cancel()
                self._under_way[name].remove(change)

    async def cancel(self) -> None:
        """Ends all changes; their callers get ShuttingDown."""
        if tasks := [change.task for under_way in self._under_way.values() for change in under_way]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _end(self, name: str, change: _Change, task: asyncio.Task[None]) -> None:
        if not change.is_dropped:
            self._under_way[name].remove(change)
        if not self._under_way.get(name, True):
            del self._under_way[name]
        # The caller may have given up, and then nobody else takes the error.
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, XlaserveError):
            log.error("model %s: a %s failed", name, change.kind, exc_info=error)


class Shared(Generic[R]):
    """Runs `work` on a thread, once at a time: all calls that come before it begins share its result or error."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._under_way: asyncio.Task[R] | None = None
        self._next: asyncio.Task[R] | None = None

    async def __call__(self) -> R:
        """Returns the result of the next run of `work`, or raises its error."""
        if self._next is None:
            self._next = asyncio.create_task(self._do(self._under_way))
        return await asyncio.shield(self._next)

    async def _do(self, before: asyncio.Task[R] | None) -> R:
        if before is not None:
            await asyncio.wait([before])
        self._under_way, self._next = self._next, None
        return await asyncio.to_thread(self._work)
