"""How many calls there may be at a time, and how long one may wait for its client.

HTTP/2 lets a client send the headers of a call and no message, or leave an answer unread, for any number of calls,
while it answers every ping of keepalive. Such calls are ended after a time limit, and earlier where new ones find no
place.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Any, Final

from xlaserve.errors import QueueFull

RPC_TASK: Final = "rpc_task"
"""What grpcio 1.85 calls the task of a call, which waits for its end and refers to a second one, which answers it."""
STALL_CHECK_S: Final = 1.0
"""How often the time limit is checked."""
ROOM_SHARE: Final = 16
"""Calls that are ended together are at most all places divided by this: to find them takes as long as to find one."""

CallTask = asyncio.Task[Any]
"""The task that answers a call."""

log = logging.getLogger(__name__)


class CallAdmission:
    """Admits `max_calls` calls at a time.

    A call that transfers a message or an answer for longer than `max_transfer_s` is ended. Where there is no place for
    a new one, so are those that have transferred for longer than `crowded_transfer_s`, or else been idle for as long.
    `limit` names `max_calls` in refusals.
    """

    def __init__(
        self,
        max_calls: int,
        max_transfer_s: float,
        crowded_transfer_s: float,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[Collection[CallTask]], None] | None = None,
        *,
        limit: str = "max_concurrent_calls",
    ) -> None:
        self._max_calls = max_calls
        self._max_transfer_s = max_transfer_s
        self._crowded_transfer_s = min(crowded_transfer_s, max_transfer_s)
        self._clock = clock
        self._end = end or reset
        self._limit = limit
        self._calls: set[CallTask] = set()
        # Both in the order of their times.
        self._transfers: dict[CallTask, float] = {}
        self._idle: dict[CallTask, float] = {}
        self._ended = 0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        """Admits the current task's call, whose message is to arrive. Raises QueueFull."""
        if len(self._calls) >= self._max_calls:
            self.make_room()
            if len(self._calls) >= self._max_calls:
                raise QueueFull(f"{self._limit}: expected at most {self._max_calls} calls at a time, got one more")
        call = current_call()
        self._calls.add(call)
        self._transfers[call] = self._clock()
        call.add_done_callback(self._leave)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._end_stalled)

    def work(self, call: CallTask) -> None:
        """Notes that the server works on the call, and does not wait for its client."""
        self._transfers.pop(call, None)
        self._idle.pop(call, None)

    def transfer(self, call: CallTask) -> None:
        """Notes that an answer is on its way to the client."""
        self._transfers[call] = self._clock()

    def idle(self, call: CallTask) -> None:
        """Notes that nothing needs to be done until the client or the server says more."""
        self.work(call)
        self._idle[call] = self._clock()

    def make_room(self) -> None:
        """Ends some of the calls that keep others out, where there are any."""
        until = self._clock() - self._crowded_transfer_s
        stalled = chain(_since(self._transfers, until), _since(self._idle, until))
        self._end_all([*islice(stalled, max(1, self._max_calls // ROOM_SHARE))])

    def _end_stalled(self) -> None:
        self._end_all([*_since(self._transfers, self._clock() - self._max_transfer_s)])
        if self._ended:
            log.warning("ended %d calls that waited for their clients for too long", self._ended)
            self._ended = 0
        self._timer = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._end_stalled) if self._calls else None

    def _end_all(self, calls: Collection[CallTask]) -> None:
        if calls:
            self._ended += len(calls)
            for call in calls:
                self._leave(call)
            self._end(calls)

    def _leave(self, call: CallTask) -> None:
        self._calls.discard(call)
        self.work(call)


def current_call() -> CallTask:
    """Returns the task that answers the call in whose method this is."""
    task = asyncio.current_task()
    assert task is not None
    return task


def reset(calls: Collection[CallTask]) -> None:
    """Ends calls whose clients get CANCELLED, those whose answer gRPC holds included.

    grpcio has no method for it, but gRPC cancels a call that nothing refers to any more. (grpcio keeps a reference to a
    server's first call for good, and to the latest one until the next arrives.)
    """
    ids = set(map(id, calls))
    for task in asyncio.all_tasks():
        if task.get_name() == RPC_TASK and any(id(each) in ids for each in _held_by(task)):
            task.cancel()
    for call in calls:
        call.cancel()


def _held_by(task: asyncio.Task[Any]) -> Iterator[object]:
    """Yields what the variables of a coroutine refer to, which Cython does not show."""
    return chain.from_iterable(map(gc.get_referents, gc.get_referents(task.get_coro())))


def _since(times: dict[CallTask, float], until: float) -> Iterator[CallTask]:
    for call, began in times.items():
        if began > until:
            return
        yield call
