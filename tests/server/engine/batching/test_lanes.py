from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from xlaserve.engine.batching.lanes import Lanes, Share


class Device:
    """Runs what was granted: as many batches at a time as it has lanes, for as long as each takes."""

    def __init__(self, count: int, ahead: int = 1) -> None:
        self.lanes = Lanes(count, ahead)
        self.most_under_way = 0
        self._under_way = 0
        self._free = asyncio.Semaphore(count)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, model: Model) -> asyncio.Task[None]:
        """Waits for the model's turn and starts its batch."""
        asked = asyncio.get_running_loop().time()
        await self.lanes.acquire(model.share)
        model.waits_s.append(asyncio.get_running_loop().time() - asked)
        model.share.virtual_s += model.cost_s
        task = asyncio.create_task(self._run(model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(self, model: Model) -> None:
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        async with self._free:
            await asyncio.sleep(model.cost_s)
            model.ran_s += model.cost_s
        self._under_way -= 1
        self.lanes.release()

    def is_idle(self) -> bool:
        """Whether all lanes and the place ahead of them can be had at once."""
        turns = [self.lanes.acquire(Share(lambda: True)) for _ in range(self.lanes.count + 1)]
        for turn in turns:
            with pytest.raises(StopIteration):
                turn.send(None)
        for _ in turns:
            self.lanes.release()
        return not self._under_way


class Model:
    """A model whose batches cost the same each."""

    def __init__(self, cost_s: float, *, is_full: bool = True) -> None:
        self.cost_s = cost_s
        self.share = Share(lambda: is_full)
        self.waits_s: list[float] = []
        self.ran_s = 0.0


async def keep_busy(device: Device, *models: Model) -> list[asyncio.Task[None]]:
    async def forever(model: Model) -> None:
        while True:
            await device.run(model)

    return [asyncio.create_task(forever(model)) for model in models]


async def stop(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def pass_all_ready() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_full_batches_take_every_lane_and_one_place_more(virtual_time: object, count: int) -> None:
    device = Device(count)
    busy = await keep_busy(device, *(Model(1.0) for _ in range(count + 3)))
    await asyncio.sleep(10)
    assert device.most_under_way == count + 1
    await stop(busy)


async def test_each_device_has_a_place_beside_its_lanes(virtual_time: object) -> None:
    device = Device(4, ahead=2)
    busy = await keep_busy(device, *(Model(1.0) for _ in range(8)))
    await asyncio.sleep(10)
    assert device.most_under_way == 4 + 2
    await stop(busy)
    device = Device(4, ahead=2)
    busy = await keep_busy(device, *(Model(1.0, is_full=False) for _ in range(8)))
    await asyncio.sleep(10)
    assert device.most_under_way == 4
    await stop(busy)


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_a_batch_that_is_not_full_waits_for_a_lane(virtual_time: object, count: int) -> None:
    device = Device(count)
    busy = await keep_busy(device, *(Model(1.0, is_full=False) for _ in range(count + 3)))
    await asyncio.sleep(10)
    assert device.most_under_way == count
    await stop(busy)


async def test_a_batch_that_becomes_full_is_granted_the_place(virtual_time: object) -> None:
    lanes = Lanes(1)
    is_full = False
    await lanes.acquire(Share(lambda: True))
    waiting = asyncio.create_task(lanes.acquire(Share(lambda: is_full)))
    await pass_all_ready()
    assert not waiting.done()
    is_full = True
    lanes.grant()
    await pass_all_ready()
    assert waiting.done()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("small_s", [0.25, 0.3125])  # always ends together with a large one, and rarely
async def test_busy_models_share_the_device_evenly_whatever_their_batches_cost(
    virtual_time: object, count: int, is_full: bool, small_s: float
) -> None:
    device = Device(count)
    small, large = Model(small_s, is_full=is_full), Model(2.0, is_full=is_full)
    busy = await keep_busy(device, small, large)
    await asyncio.sleep(1000)
    assert small.ran_s == pytest.approx(large.ran_s, abs=(count + 2) * large.cost_s)
    assert small.ran_s + large.ran_s == pytest.approx(1000 * count, abs=count * large.cost_s)
    await stop(busy)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("others", [1, 3])
async def test_busy_models_do_not_starve_a_quiet_one(
    virtual_time: object, count: int, is_full: bool, others: int
) -> None:
    device = Device(count)
    busy = await keep_busy(device, *(Model(1.0) for _ in range(others)))
    quiet = Model(0.25, is_full=is_full)
    for _ in range(200):
        await asyncio.sleep(3.375)
        await (await device.run(quiet))
    # What is under way: a batch in each lane, with one lane also one gathered ahead. Then those with as old a claim.
    under_way_s = 2.0 if count == 1 else 1.0
    assert max(quiet.waits_s) <= under_way_s + (others - 1) / count
    await stop(busy)


async def test_a_model_that_was_quiet_has_saved_up_no_credit(virtual_time: object) -> None:
    device = Device(1)
    busy, quiet = Model(1.0), Model(1.0)
    tasks = await keep_busy(device, busy)
    await asyncio.sleep(500)
    before_s = busy.ran_s
    tasks += await keep_busy(device, quiet)
    await asyncio.sleep(10)
    assert busy.ran_s - before_s == pytest.approx(quiet.ran_s, abs=2.0)
    await stop(tasks)


async def test_a_cancelled_wait_gives_up_its_turn(virtual_time: object) -> None:
    device = Device(1)
    running = await device.run(Model(1.0))
    waiting = asyncio.create_task(device.run(Model(1.0, is_full=False)))
    await pass_all_ready()
    await stop([waiting])
    await running
    assert device.is_idle()


async def test_a_turn_that_is_cancelled_as_it_comes_is_given_back(virtual_time: object) -> None:
    device = Device(1)
    await device.lanes.acquire(Share(lambda: False))
    waiting = asyncio.create_task(device.lanes.acquire(Share(lambda: False)))
    await pass_all_ready()
    device.lanes.release()
    await stop([waiting])
    assert waiting.cancelled()
    assert device.is_idle()


async def test_a_release_before_a_cancelled_wait_has_noticed_goes_to_the_next(virtual_time: object) -> None:
    lanes = Lanes(1)
    await lanes.acquire(Share(lambda: False))
    gone = asyncio.create_task(lanes.acquire(Share(lambda: False)))
    other = asyncio.create_task(lanes.acquire(Share(lambda: False)))
    await pass_all_ready()
    gone.cancel()
    lanes.release()
    await asyncio.wait([gone, other])
    assert gone.cancelled()
    assert not other.cancelled()


async def test_a_share_sees_how_many_lanes_run_batches_of_others(virtual_time: object) -> None:
    lanes = Lanes(2)
    seen = []
    for _ in range(3):
        await lanes.acquire(Share(lambda: True))
        seen.append(lanes.busy)
    assert seen == [0, 1, 1]


async def test_what_is_in_flight_is_expected_to_end_when_its_batches_should(virtual_time: object) -> None:
    lanes = Lanes(2)
    share = Share(lambda: True)
    assert lanes.try_acquire(share)
    lanes.began(4.0, 10.0)
    assert lanes.wait_s(10.0) == 0.0, "a lane is free"
    assert lanes.try_acquire(share)
    lanes.began(4.0, 10.0)
    assert lanes.wait_s(10.0) == 4.0
    assert lanes.wait_s(13.0) == 1.0
    lanes.ended(4.0, 3.0)
    assert lanes.wait_s(13.0) == 0.5
    assert lanes.wait_s(50.0) == 0.0
    lanes.began(4.0, 50.0)
    assert lanes.wait_s(50.0) == 2.0


async def test_a_share_counts_the_others_that_wait(virtual_time: object) -> None:
    lanes, shares = Lanes(1), [Share(lambda: False) for _ in range(3)]
    assert lanes.try_acquire(shares[0])
    waiting = [asyncio.create_task(lanes.acquire(share)) for share in shares]
    await asyncio.sleep(0)
    assert [lanes.count_others(share) for share in (*shares, Share(lambda: False))] == [2, 2, 2, 3]
    await stop(waiting)


async def test_a_share_that_waits_already_is_refused_and_keeps_its_turn(virtual_time: object) -> None:
    device = Device(1)
    running = await device.run(Model(1.0))
    share = Share(lambda: False)
    waiting = asyncio.create_task(device.lanes.acquire(share))
    await pass_all_ready()
    with pytest.raises(RuntimeError, match="waits for a lane already"):
        await device.lanes.acquire(share)
    await asyncio.wait([running])
    await waiting
    device.lanes.release()
    assert device.is_idle()


async def test_a_share_that_cannot_say_whether_it_is_full_costs_no_lane(virtual_time: object) -> None:
    device = Device(1)
    await device.lanes.acquire(Share(lambda: False))

    def fail() -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        await device.lanes.acquire(Share(fail))
    device.lanes.release()
    assert device.is_idle()


def test_a_device_without_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one lane"):
        Lanes(0)


async def test_busy_seconds_are_those_of_lanes_in_use() -> None:
    now = 0.0
    lanes = Lanes(2, ahead=1, clock=lambda: now)
    first, second, ahead = (Share(lambda: True) for _ in range(3))
    await lanes.acquire(first)
    now = 1.0
    assert lanes.busy_s == 1.0
    await lanes.acquire(second)
    await lanes.acquire(ahead)  # is gathered, and has no lane yet
    now = 3.0
    assert lanes.busy_s == 1.0 + 2 * 2.0
    for _ in range(3):
        lanes.release()
    now = 9.0
    assert lanes.busy_s == 5.0
