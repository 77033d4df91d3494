"""Turns of a model's queues and of models on one device, and the demand that is counted."""

from __future__ import annotations

import asyncio

import pytest
from tests.server.engine.batching.served_model import COST_S, SQUARE, TALL, WIDE, Make, flood, numbers_of

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Warmed


async def test_a_busy_model_does_not_starve_a_quiet_one(virtual_time: object, make: Make) -> None:
    busy = make()
    quiet = make(lanes=busy.lanes, worker=busy.worker)

    async def flood() -> None:
        while True:
            await busy.answer(range(8))

    floods = [asyncio.create_task(flood()) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(7.25)
        assert (await quiet.answer([1])).timings.queue_s <= 2 * COST_S[8]
    for task in floods:
        task.cancel()
    await asyncio.wait(floods)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("recorded", [0.5, 2.0, 10.0])
async def test_equal_batches_get_equal_turns_whatever_warm_up_recorded(
    virtual_time: object, make: Make, lanes: int, recorded: float
) -> None:
    one = make(lanes=Lanes(lanes))
    wrong_s = {bucket: seconds * recorded for bucket, seconds in COST_S.items()}
    other = make(lanes=one.lanes, worker=one.worker, cost_s=wrong_s)
    await flood([(one, SQUARE), (other, SQUARE)], 400.0)
    turns = [len(model.observer.ran) for model in (one, other)]
    assert sum(turns) >= lanes * 400.0 / COST_S[8] * 0.9
    assert turns[0] == pytest.approx(turns[1], rel=0.1)


async def test_resolutions_of_equal_batch_times_get_equal_turns(virtual_time: object, make: Make) -> None:
    model = make(sizes=(SQUARE,), max_images=10_000)
    wide = {
        (Mode.XLA, Bucket(bucket, *WIDE)): Warmed(model.executables[Mode.XLA], Cost(seconds * 2, seconds * 2))
        for bucket, seconds in COST_S.items()
    }
    model.batcher.add(wide)
    answered = await flood([(model, SQUARE), (model, WIDE)], 400.0)
    assert answered[0] == pytest.approx(answered[1], rel=0.1)
    assert sum(answered) >= 400.0 / COST_S[8] * 0.9


async def test_images_of_different_resolutions_never_share_a_batch(virtual_time: object, make: Make) -> None:
    model = make(sizes=(SQUARE, WIDE))
    sizes = [(SQUARE, WIDE)[number % 2] for number in range(30)]
    asks = [model.ask([number], size=size) for number, size in enumerate(sizes)]
    assert [numbers_of(result) for result in await asyncio.gather(*asks)] == [[number] for number in range(30)]
    assert all(len({number % 2 for number in batch.numbers}) == 1 for batch in model.started)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("floods", [(SQUARE,), (SQUARE, TALL)])
async def test_a_flood_in_one_resolution_delays_another_by_a_bounded_time(
    virtual_time: object, make: Make, lanes: int, floods: tuple[tuple[int, int], ...]
) -> None:
    model = make(lanes=Lanes(lanes), sizes=(SQUARE, WIDE, TALL), max_images=10_000)

    async def flood(size: tuple[int, int]) -> None:
        while True:
            await model.answer(range(8), size=size)

    tasks = [asyncio.create_task(flood(size)) for size in floods for _ in range(200)]
    # What runs, what is gathered ahead, and a batch of each other resolution.
    bound_s = COST_S[8] * (2 + len(floods))
    for pause in (0.25, 7.25, 1.0, 3.5) * 5:
        await asyncio.sleep(pause)
        assert model.batcher.waiting_images >= 100 * 8
        assert (await model.answer([1], size=WIDE)).timings.queue_s <= bound_s
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_resolution_that_was_quiet_is_served_next_but_saves_up_no_credit(
    virtual_time: object, make: Make
) -> None:
    model = make(sizes=(SQUARE, WIDE))
    await model.answer(range(8), size=WIDE)
    for _ in range(20):
        await model.answer(range(8))
    asks = [model.answer([number] * 8, size=size) for number, size in enumerate([SQUARE] * 10 + [WIDE] * 10)]
    await asyncio.gather(*asks)
    in_turn = [number for pair in zip(range(10, 20), range(10), strict=True) for number in pair]
    assert [batch.numbers[0] for batch in model.started[21:]] == in_turn


async def test_demand_is_what_waited_for_the_lane_and_counts_each_image_once(virtual_time: object, make: Make) -> None:
    model = make()
    first = model.ask([0])
    await asyncio.sleep(0.5)
    await asyncio.gather(first, model.ask(range(11)))
    # 8 of 11 left first, and then the other 3.
    assert model.batcher.live().demand == {(2, 2): {1: 1, 11: 8, 3: 3}}


async def test_demand_that_several_free_lanes_share_is_one_lanes_part(virtual_time: object, make: Make) -> None:
    model = make(lanes=Lanes(2), sizes=(SQUARE, WIDE))
    await asyncio.gather(*(model.ask([number]) for number in range(8)))
    await model.answer([1], size=WIDE)
    assert model.batcher.live().demand == {SQUARE: {4: 8}, WIDE: {1: 1}}
