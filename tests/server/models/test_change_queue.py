"""ChangeQueue of models that come one after the other, and that nobody may wait for any more."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from xlaserve.errors import LoadEnded, ModelFailed, QueueFull, ShuttingDown
from xlaserve.models.change_queue import MAX_WAITING, ChangeQueue, Kind, Shared


class Work:
    """Something that ends when the test says so."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.begun = 0
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self._error = error

    async def __call__(self) -> None:
        self.begun += 1
        self.has_begun.set()
        await self.may_end.wait()
        if self._error:
            raise self._error("what went wrong")


async def test_loads_and_unloads_in_turns_are_refused_once_too_many_wait() -> None:
    changes, work = ChangeQueue(), Work()
    asked = [asyncio.create_task(changes.make("a", kind, work)) for _ in range(50) for kind in ("load", "unload")]
    await work.has_begun.wait()
    refused = asked[1 + MAX_WAITING :: 2]  # the others want what waits as the last
    for task in refused:
        with pytest.raises(QueueFull):
            await task
    work.may_end.set()
    await asyncio.gather(*(set(asked) - set(refused)))
    assert work.begun == 1 + MAX_WAITING
    await changes.make("a", "load", work)


@pytest.mark.parametrize(
    ("kind", "said"), [("load", "no model is loaded any more"), ("unload", "this change was not completed")]
)
async def test_a_change_that_a_stop_ends_is_told_what_did_not_come_of_it(kind: Kind, said: str) -> None:
    changes, work = ChangeQueue(), Work()
    asked = asyncio.create_task(changes.make("a", kind, work))
    await work.has_begun.wait()
    await changes.cancel()
    with pytest.raises(ShuttingDown, match=f"the server is shutting down; {said}"):
        await asked


@pytest.mark.parametrize(("error", "said"), [(ModelFailed, []), (ValueError, ["a load failed"])])
async def test_a_failure_that_nobody_awaits_is_logged_only_if_it_is_a_defect(
    error: type[Exception], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    changes, work = ChangeQueue(), Work(error)
    asked = asyncio.create_task(changes.make("a", "load", work))
    await work.has_begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    work.may_end.set()
    await changes.make("a", "unload", nothing)
    del asked
    gc.collect()
    await asyncio.sleep(0)
    assert [record.message.removeprefix("model a: ") for record in caplog.records] == said


async def test_work_is_shared_by_those_who_ask_before_it_begins_and_by_no_others() -> None:
    begun, may_go_on = threading.Semaphore(0), threading.Semaphore(0)
    times = 0

    def work() -> int:
        nonlocal times
        times += 1
        begun.release()
        assert may_go_on.acquire(timeout=20)
        if times == 2:
            raise ModelFailed("what went wrong")
        return times

    shared = Shared(work)
    first = [asyncio.create_task(shared()) for _ in range(3)]
    await asyncio.to_thread(begun.acquire)
    later = [asyncio.create_task(shared()) for _ in range(3)]
    await asyncio.sleep(0)
    later.pop().cancel()
    may_go_on.release(2)
    assert await asyncio.gather(*first) == [1, 1, 1]
    for task in later:
        with pytest.raises(ModelFailed):
            await task
    may_go_on.release()
    assert await shared() == 3


async def test_waiting_loads_are_dropped_and_what_follows_keeps_its_turn() -> None:
    changes, work = ChangeQueue(), Work()
    unloading, asked = asyncio.create_task(changes.make("a", "unload", work)), []
    await work.has_begun.wait()
    kinds: list[Kind] = ["load", "update"]
    for kind in kinds:
        asked.append(asyncio.create_task(changes.make("a", kind, nothing)))
        await asyncio.sleep(0)
    changes.drop_loads("a")
    last = asyncio.create_task(changes.make("a", "unload", work))
    for dropped in asked:
        with pytest.raises(LoadEnded):
            await dropped
    assert not last.done()
    assert work.begun == 1
    work.may_end.set()
    await asyncio.gather(unloading, last)
    assert work.begun == 2


async def nothing() -> None: ...
