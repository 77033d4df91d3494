"""Times of batches in traffic: observed, charged, and remembered for simulations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from tests.server.engine.batching.served_model import COST_S, SQUARE, Make, Model, flood

from xlaserve.config import Mode
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.observed import Parts
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.errors import DeadlineExceeded


async def test_a_bucket_that_turns_out_slow_in_traffic_gives_way(virtual_time: object, make: Make) -> None:
    cost_s = dict(COST_S)
    model = make(cost_s=cost_s)
    cost_s[8] = 9.0
    for _ in range(30):
        await model.answer(range(8))
    assert model.started[0].bucket == 8
    assert model.started[-1].bucket == 4


async def test_time_that_a_batch_waits_for_a_lane_is_not_charged(virtual_time: object, make: Make) -> None:
    model = make()
    await flood([(model, SQUARE)], 100.0)
    costs = model.batcher._queues.by_shape[Mode.XLA, *SQUARE].costs
    assert costs.turn_s(8, 1) == pytest.approx(COST_S[8], rel=0.01)


async def test_requests_refused_for_a_wrongly_measured_time_are_tried_again(virtual_time: object, make: Make) -> None:
    model = make(cost_s={1: 1.0})
    model.worker._cost_s = {1: 0.25}
    loop = asyncio.get_running_loop()
    outcomes: list[object] = []
    for _ in range(30):
        asked = model.answer([1], deadline=loop.time() + 0.5)
        outcomes += await asyncio.gather(asked, return_exceptions=True)
    refused = [isinstance(outcome, DeadlineExceeded) for outcome in outcomes]
    assert refused == sorted(refused, reverse=True)
    assert 0 < sum(refused) < 20


async def test_batch_times_are_kept_with_the_number_of_lanes_busy_meanwhile(
    virtual_time: object, echo: Callable[[Images], Outputs], pictures: Callable[[Iterable[int]], Images]
) -> None:
    model = Model(echo, pictures, lanes=Lanes(2, clock=asyncio.get_running_loop().time), cost_s={1: 0.5})
    remembered: list[Parts] = []
    for queue in model.batcher._queues.by_shape.values():
        queue.costs.note = lambda bucket, parts: remembered.append(parts)  # type: ignore[method-assign]
    alone = model.ask([1])
    await asyncio.sleep(0.25)
    beside = model.ask([2])
    await asyncio.gather(alone, beside)
    await asyncio.gather(*(model.ask([number]) for number in range(4)))  # one is gathered ahead meanwhile
    assert [parts.lanes for parts in remembered] == pytest.approx([1.5, 1.5, 2, 2, 2, 2])
    assert [parts.own_s for parts in remembered] == pytest.approx([0.5] * 6)
    assert [parts.started_s + parts.returned_s for parts in remembered] == pytest.approx([0.0] * 6)
