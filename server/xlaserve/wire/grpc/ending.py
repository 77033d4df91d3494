"""Ends calls from outside, for which grpcio has no method.

A call without an answer is refused through the state that its task refers to. One whose answer gRPC holds is reset, by
dropping all references to it. Where grpcio is not what it was, a call's task is cancelled, which frees what it held,
and its client waits until its own deadline.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from xlaserve.admission.calls import CallTask
from xlaserve.errors import QueueFull
from xlaserve.wire.grpc.refused_call import abort

RPC_TASK: Final = "rpc_task"
"""Name that grpcio 1.85 gives the task of a call, which awaits its end and refers to the task that answers it."""
REFUSE_S: Final = 1.0
"""How long gRPC may take to send a refusal; it sends none where an answer is before it."""


log = logging.getLogger(__name__)


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
    try:
        state = next((held for held in _held_by(call) if isinstance(held, cygrpc.RPCState)), None)
        if state is None:
            return call.done()
        context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
    except (AttributeError, TypeError) as error:
        log.error("a call can't be refused with a reason: grpcio is not what it was: %s", error)
        return False
    call.cancel()
    await asyncio.wait((call,), timeout=REFUSE_S)  # else its method would see that the call is aborted, an error there
    try:
        async with asyncio.timeout(REFUSE_S):
            await abort(context, QueueFull(reason))
    except grpc.aio.AbortError:
        return True
    except Exception:
        return False


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
