"""Simulations in virtual time: what a model answers, and to whom, when more is asked of it than it can do."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from tests.fakes import Executable, FakeWorker, Observer

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.queue import PATIENCE_S
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.engine.request import WEIGHTS, EncodedRequest, EngineRequest
from xlaserve.errors import DeadlineUnreachable, QueueFull, XlaserveError

COST_S = {1: 0.010, 4: 0.022, 8: 0.036}
BATCH_S = COST_S[8]
CAPACITY = 8 / BATCH_S
"""Images/s."""
PATIENT = math.inf
SPREAD = 0.2
"""By so much a batch may take more or less."""


class Outcome(NamedTuple):
    """The outcome of one request."""

    priority: int
    arrived: float
    ended: float
    deadline: float
    error: type[XlaserveError] | None

    @property
    def is_good(self) -> bool:
        return self.error is None and self.ended <= self.deadline

    @property
    def is_refused(self) -> bool:
        return self.error in (DeadlineUnreachable, QueueFull)


class Unsteady(Mapping[int, float]):
    """Costs that are never the same twice."""

    def __init__(self, cost_s: Mapping[int, float], spread: float) -> None:
        self._cost_s = cost_s
        self._spread = spread
        self._chance = random.Random(0)

    def __getitem__(self, bucket: int) -> float:
        return self._cost_s[bucket] * (1 + self._spread * self._chance.uniform(-1, 1))

    def __iter__(self) -> object:  # type: ignore[override]
        return iter(self._cost_s)

    def __len__(self) -> int:
        return len(self._cost_s)


class Server:
    """A model on a device whose batches take `takes_s`, and at warm-up took COST_S."""

    def __init__(
        self,
        echo: Callable[[Images], Outputs],
        pictures: Callable[[Iterable[int]], Images],
        *,
        lanes: Lanes | None = None,
        takes_s: Mapping[int, float] = COST_S,
        worker: FakeWorker | None = None,
        max_images: int = 100_000,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        self.lanes = lanes or Lanes(1)
        self.worker = worker or FakeWorker(loop, self.lanes.count, takes_s)
        self.pixels = pictures([1])
        executable = Executable(Mode.XLA, echo)
        programs = {(Mode.XLA, Bucket(batch, 2, 2)): Warmed(executable, Cost(s, s)) for batch, s in COST_S.items()}
        self.batcher = Batcher(
            name="model",
            programs=programs,
            lanes=self.lanes,
            worker=self.worker,
            observer=Observer(),
            max_images=max_images,
            max_bytes=10**9,
            clock=loop.time,
        )

    async def ask(self, within_s: float, priority: int = 2) -> Outcome:
        """Asks about one image, to be answered `within_s`."""
        arrived = self.clock()
        error: type[XlaserveError] | None = None
        try:
            self.batcher.admission.admit(1, 12)
            try:
                await self.batcher.run(EngineRequest((self.pixels,), Mode.XLA, arrived + within_s, priority))
            finally:
                self.batcher.admission.leave(1, 12)
        except XlaserveError as raised:
            error = type(raised)
        return Outcome(priority, arrived, self.clock(), arrived + within_s, error)

    async def load(
        self,
        times: float,
        seconds: float,
        within_s: Callable[[random.Random], float],
        priorities: Sequence[int] = (2,),
        seed: int = 0,
    ) -> list[Outcome]:
        """Sends requests at random, `times` as many as the device can answer, and returns what became of them."""
        chance = random.Random(seed)
        until = self.clock() + seconds
        asked = []
        while self.clock() < until:
            asked.append(asyncio.create_task(self.ask(within_s(chance), chance.choice(priorities))))
            await asyncio.sleep(chance.expovariate(times * CAPACITY))
        return await asyncio.gather(*asked)


Make = Callable[..., Server]


@pytest.fixture
def make(echo: Callable[[Images], Outputs], pictures: Callable[[Iterable[int]], Images], virtual_time: object) -> Make:
    def make_server(**options: object) -> Server:
        return Server(echo, pictures, **options)  # type: ignore[arg-type]

    return make_server


def always(seconds: float) -> Callable[[random.Random], float]:
    return lambda chance: seconds


def goodput(outcomes: Sequence[Outcome]) -> float:
    """Returns requests/s that were answered in time, over the time in which they arrived."""
    seconds = max(outcome.ended for outcome in outcomes) - outcomes[0].arrived
    return sum(outcome.is_good for outcome in outcomes) / seconds


DEADLINES = {
    "alike": always(0.5),
    "near": always(4 * BATCH_S),
    "mixed": lambda chance: chance.choice([0.15, 0.5, 2.0]),
}


@pytest.mark.parametrize("within_s", DEADLINES.values(), ids=DEADLINES)
@pytest.mark.parametrize("priorities", [(2,), (1, 2, 3)], ids=["one", "three"])
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_at_five_times_the_capacity_goodput_stays_and_the_rest_is_refused(
    make: Make, within_s: Callable[[random.Random], float], priorities: Sequence[int], lanes: int
) -> None:
    server = make(lanes=Lanes(lanes), takes_s=Unsteady(COST_S, SPREAD))
    found = {}
    for times in (0.9, 1.0, 2.0, 5.0):
        outcomes = await server.load(times * lanes, 5.0, within_s, priorities)
        found[times] = goodput(outcomes)
        accepted = [outcome for outcome in outcomes if not outcome.is_refused]
        assert all(outcome.ended <= outcome.deadline + BATCH_S * (1 + SPREAD) for outcome in accepted)
        assert sum(not outcome.is_good for outcome in accepted) <= 0.05 * len(accepted)
        assert all(outcome.ended == outcome.arrived for outcome in outcomes if outcome.is_refused)
    assert found[5.0] >= 0.95 * max(found.values())
    assert found[5.0] >= 0.9 * CAPACITY * lanes


async def test_priorities_get_their_shares_of_a_flood(make: Make) -> None:
    server = make()
    outcomes = await server.load(5.0, 10.0, always(0.5), list(WEIGHTS))
    good = Counter(outcome.priority for outcome in outcomes if outcome.is_good)
    for priority, weight in WEIGHTS.items():
        assert good[priority] / good.total() == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.1)


async def test_what_a_priority_does_not_need_goes_to_the_others(make: Make) -> None:
    server = make(takes_s=Unsteady(COST_S, SPREAD))
    few, flood = server.load(0.2, 10.0, always(0.5), [1]), server.load(5.0, 10.0, always(0.5), [3], seed=1)
    outcomes = [outcome for found in await asyncio.gather(few, flood) for outcome in found]
    good = Counter(outcome.priority for outcome in outcomes if outcome.is_good)
    asked = Counter(outcome.priority for outcome in outcomes)
    assert good[1] >= 0.99 * asked[1]
    assert good.total() / 10.0 >= 0.93 * CAPACITY


async def test_the_lowest_priority_is_served_beside_a_flood_of_the_highest(make: Make) -> None:
    server = make()
    flood = asyncio.create_task(server.load(5.0, 5.0, always(0.5), [1]))
    await asyncio.sleep(1.0)
    waited_s = []
    for _ in range(20):
        outcome = await server.ask(PATIENT, 3)
        assert outcome.is_good
        waited_s.append(outcome.ended - outcome.arrived)
    assert max(waited_s) <= 4 * BATCH_S
    await flood


async def test_a_request_without_a_deadline_is_served_beside_a_flood_with_them(make: Make) -> None:
    server = make()
    flood = asyncio.create_task(server.load(5.0, PATIENCE_S + 5.0, always(0.25)))
    await asyncio.sleep(1.0)
    outcome = await server.ask(PATIENT)
    assert outcome.ended - outcome.arrived <= PATIENCE_S + 2 * BATCH_S
    await flood


async def test_without_deadlines_the_queue_is_bounded_in_images_alone(make: Make) -> None:
    server = make(max_images=100)
    outcomes = await server.load(5.0, 5.0, always(PATIENT))
    assert {outcome.error for outcome in outcomes} == {None, QueueFull}
    assert goodput(outcomes) >= 0.95 * CAPACITY


@pytest.mark.parametrize("wrong", [0.1, 0.3, 5.0])
async def test_costs_that_were_measured_wrongly_are_no_hindrance_for_long(make: Make, wrong: float) -> None:
    server = make(takes_s={bucket: cost_s * wrong for bucket, cost_s in COST_S.items()})
    within_s = 0.5 * max(1.0, wrong)
    first = await server.ask(within_s)
    assert first.is_good, "a server where nothing waits refuses nothing"
    await server.load(2.0 / wrong, 10 * wrong, always(within_s))
    outcomes = await server.load(2.0 / wrong, 10 * wrong, always(within_s), seed=1)
    assert goodput(outcomes) >= 0.9 * CAPACITY / wrong


async def test_a_device_that_becomes_slower_costs_few_requests_their_deadline(make: Make) -> None:
    takes_s = dict(COST_S)
    server = make(takes_s=takes_s)
    await server.load(2.0, 5.0, always(0.5))
    takes_s.update({bucket: 3 * cost_s for bucket, cost_s in COST_S.items()})
    await server.load(2.0, 2.0, always(0.5))
    outcomes = await server.load(2.0, 10.0, always(0.5))
    late = [outcome for outcome in outcomes if not outcome.is_good and not outcome.is_refused]
    assert len(late) <= 0.05 * len(outcomes)
    assert goodput(outcomes) >= 0.9 * CAPACITY / 3


async def test_models_that_share_a_device_are_expected_to_be_served_in_turn(make: Make) -> None:
    one = make()
    other = make(lanes=one.lanes, worker=one.worker)
    loads = [server.load(3.0, 10.0, always(0.5), seed=seed) for seed, server in enumerate((one, other))]
    found = await asyncio.gather(*loads)
    for outcomes in found:
        late = [outcome for outcome in outcomes if not outcome.is_good and not outcome.is_refused]
        assert len(late) <= 0.05 * len(outcomes)
        assert goodput(outcomes) >= 0.9 * CAPACITY / 2


async def test_the_turns_of_other_models_are_expected_before_anything_is_learned(make: Make) -> None:
    one = make()
    other = make(lanes=one.lanes, worker=one.worker)
    within_s = 10 * BATCH_S
    flood = [asyncio.create_task(other.ask(PATIENT)) for _ in range(1000)]
    await asyncio.sleep(0)
    outcomes = await asyncio.gather(*(one.ask(within_s) for _ in range(20 * 8)))
    accepted = [outcome for outcome in outcomes if not outcome.is_refused]
    # What runs and is gathered ahead first, and then every other batch.
    assert 3 * 8 <= len(accepted) <= 5 * 8
    assert all(outcome.is_good for outcome in accepted)
    await asyncio.gather(*flood)


async def test_nothing_is_refused_while_nothing_waits(make: Make) -> None:
    server = make(takes_s=dict.fromkeys(COST_S, BATCH_S / 4))  # much less than at warm-up
    running = [asyncio.create_task(server.ask(PATIENT)) for _ in range(8)]
    await asyncio.sleep(BATCH_S / 16)
    assert server.batcher.waiting_images == 0
    assert (await server.ask(0.75 * BATCH_S)).is_good
    await asyncio.gather(*running)


async def test_a_nearer_deadline_does_not_make_late_what_was_accepted_before(make: Make) -> None:
    server = make()
    patient = [asyncio.create_task(server.ask(1.0)) for _ in range(int(0.6 * CAPACITY))]
    await asyncio.sleep(0)
    hasty = await server.load(5.0, 0.9, always(0.1))
    assert all(outcome.is_good for outcome in await asyncio.gather(*patient))
    assert sum(outcome.is_good for outcome in hasty) >= 0.25 * CAPACITY


async def test_a_refusal_says_by_how_much_the_deadline_would_be_missed(make: Make) -> None:
    server = make()
    waiting = [asyncio.create_task(server.ask(4.5 * BATCH_S)) for _ in range(8 * 3)]  # 8 run, and 8 are gathered ahead
    await asyncio.sleep(0)
    large = np.repeat(server.pixels, 8 * 10, axis=0)
    with pytest.raises(DeadlineUnreachable, match=r"the deadline is in 0.180 s, and the answer would take") as refused:
        await server.batcher.run(EngineRequest((large,), Mode.XLA, server.clock() + 5 * BATCH_S))
    assert refused.value.retry_after_s == pytest.approx((3 + 10 - 5) * BATCH_S, rel=0.15)
    await asyncio.gather(*waiting)


# Encoded images


def check(server: Server, within_s: float, *, decode_s: float, decoding: int) -> None:
    deadline = server.clock() + within_s
    server.batcher.forecast.check_encoded(EncodedRequest(1, deadline, 2, [(Mode.XLA, 2, 2)], decode_s, decoding))


async def test_images_that_could_not_be_decoded_in_time_are_refused(make: Make) -> None:
    server = make()
    check(server, 1.0, decode_s=0.9, decoding=50)
    with pytest.raises(DeadlineUnreachable):
        check(server, 1.0, decode_s=1.1, decoding=50)
    check(server, 1.0, decode_s=1.1, decoding=0)  # nothing waits
    check(server, PATIENT, decode_s=1.1, decoding=50)


async def test_what_is_decoded_before_has_to_run_before_as_well(make: Make) -> None:
    server = make()
    images = int(0.5 * CAPACITY)
    waiting = [asyncio.create_task(server.ask(0.75)) for _ in range(images)]
    await asyncio.sleep(0)
    check(server, 0.8, decode_s=0.0, decoding=0)
    check(server, 1.2, decode_s=0.1, decoding=images)
    with pytest.raises(DeadlineUnreachable):
        check(server, 0.8, decode_s=0.1, decoding=images)
    await asyncio.gather(*waiting)
