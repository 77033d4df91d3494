"""How many calls there may be at a time, and how long one may wait for its client.

HTTP/2 lets a client send the headers of a call and no message, or leave an answer unread, for any number of calls,
while it answers every ping of keepalive. Such calls are ended after a time limit, and earlier where new ones find no
place.

grpcio has no method that ends a call from outside. A call without an answer is refused through the state that its task
refers to. One whose answer gRPC holds is reset, by dropping all references to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from xlaserve.errors import QueueFull
from xlaserve.rpc.refusal import explain

RPC_TASK: Final = "rpc_task"
"""What grpcio 1.85 calls the task of a call, which waits for its end and refers to a second one, which answers it."""
STALL_CHECK_S: Final = 1.0
"""How often the time limit is checked."""
ROOM_SHARE: Final = 16
"""Transfers that are ended together are at most all places divided by this: to reset them takes as long as one."""
REFUSE_S: Final = 1.0
"""How long gRPC may take to send a refusal; it sends none where an answer is before it."""

CallTask = asyncio.Task[Any]
"""The task that answers a call."""

log = logging.getLogger(__name__)


class CallAdmission:
    """Admits `max_calls` calls at a time.

    A call that transfers a message or an answer for longer than `max_transfer_s` is ended. Where there is no place for
    a new call, those that have transferred for longer than `crowded_transfer_s` are ended, some at a time. If there are
    none, the call that has been idle for longest is ended, provided that this was longer than `crowded_transfer_s`.
    `limit` names `max_calls` in refusals.
    """

    def __init__(
        self,
        max_calls: int,
        max_transfer_s: float,
        crowded_transfer_s: float,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[Collection[CallTask], str], None] | None = None,
        *,
        limit: str = "max_concurrent_calls",
    ) -> None:
        self._max_calls = max_calls
        self._max_transfer_s = max_transfer_s
        self._crowded_transfer_s = min(crowded_transfer_s, max_transfer_s)
        self._clock = clock
        self._end = end or Ending()
        self._limit = limit
        self._calls: set[CallTask] = set()
        # Both in the order of their times.
        self._transfers: dict[CallTask, float] = {}
        self._idle: dict[CallTask, float] = {}
        self._ended: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        """Admits the current task's call, whose message is to arrive. Raises QueueFull."""
        if len(self._calls) >= self._max_calls:
            self._make_room()
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
        self.work(call)
        self._transfers[call] = self._clock()

    def idle(self, call: CallTask) -> None:
        """Notes that nothing needs to be done until the client or the server says more."""
        self.work(call)
        self._idle[call] = self._clock()

    def _make_room(self) -> None:
        until = self._clock() - self._crowded_transfer_s
        stalled = [*islice(_since(self._transfers, until), max(1, self._max_calls // ROOM_SHARE))]
        stalled = stalled or [*islice(_since(self._idle, until), 1)]
        self._end_all(stalled, f"{self._limit}: gave way to a new call, as there were {self._max_calls}")

    def _end_stalled(self) -> None:
        stalled = [*_since(self._transfers, self._clock() - self._max_transfer_s)]
        self._end_all(stalled, f"max_transfer_s: expected each message and answer within {self._max_transfer_s:g} s")
        for reason, count in self._ended.items():
            log.warning("ended %d calls that waited for their clients: %s", count, reason)
        self._ended.clear()
        self._timer = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._end_stalled) if self._calls else None

    def _end_all(self, calls: Collection[CallTask], reason: str) -> None:
        if calls:
            self._ended[reason] += len(calls)
            for call in calls:
                self._leave(call)
            self._end(calls, reason)

    def _leave(self, call: CallTask) -> None:
        self._calls.discard(call)
        self.work(call)


def current_call() -> CallTask:
    """Returns the task that answers the call in whose method this is."""
    task = asyncio.current_task()
    assert task is not None
    return task


class Ending:
    """Ends calls: refuses those that have no answer yet, resets the others."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def __call__(self, calls: Collection[CallTask], reason: str) -> None:
        """Ends them soon."""
        task = asyncio.create_task(self._end(calls, reason))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _end(self, calls: Collection[CallTask], reason: str) -> None:
        are_refused = await asyncio.gather(*(_refuse(call, reason) for call in calls))
        reset([call for call, is_refused in zip(calls, are_refused, strict=True) if not is_refused])


async def _refuse(call: CallTask, reason: str) -> bool:
    """Returns False where an answer was sent already."""
    state = next((held for held in _held_by(call) if isinstance(held, cygrpc.RPCState)), None)
    if state is None:
        return call.done()
    call.cancel()
    await asyncio.wait((call,), timeout=REFUSE_S)  # else its method would see that the call is aborted, an error there
    context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(REFUSE_S):
            await context.abort(*explain(QueueFull(reason)))
    except grpc.aio.AbortError:
        return True
    except Exception:
        return False
    raise AssertionError("abort raises")


def reset(calls: Collection[CallTask]) -> None:
    """Ends calls whose answer gRPC holds; a client that reads on gets CANCELLED.

    gRPC cancels a call that nothing refers to any more. (grpcio keeps a reference to a server's first call for good,
    and to the latest one until the next arrives.)
    """
    if not calls:
        return
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
