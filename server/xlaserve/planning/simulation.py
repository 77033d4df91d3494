"""Simulations of a load on a number of servers, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Run
from xlaserve.engine.request import EngineRequest
from xlaserve.errors import XlaserveError
from xlaserve.planning.load import Load
from xlaserve.planning.measured_profile import Profile
from xlaserve.planning.virtual_device import MODE, SIDE, Device, LoopTime
from xlaserve.planning.virtual_time import VirtualTimeLoop

Balancing = Literal["round-robin", "random", "least-outstanding"]
BALANCINGS: Final[tuple[Balancing, ...]] = get_args(Balancing)

MOST_SERVERS: Final = 16
"""More are simulated as this many, with their share of the load: they do not know of each other, and how well a
balancer spreads load hardly changes from here on."""
WARM_UP: Final = 0.1
"""The share of the requests, from the first on, that only fill the queues."""
SAMPLES: Final = 1000
"""The number of times at which the queues are sampled."""


@dataclass(slots=True)
class Outcome:
    """The result of a simulated load."""

    latency_s: NDArray[np.float64]
    """Seconds of each request after warm-up; infinite where it was refused or late."""
    busy: float
    """Share of the lanes' time in which they ran batches."""
    queued_s: float
    """Expected seconds of queued work of a server, on average, as `xlaserve_queued_work_seconds` would show it."""
    images: Counter[int] = field(default_factory=Counter)
    """Images that ran, by bucket."""
    batches: Counter[int] = field(default_factory=Counter)
    """Batches that ran, by bucket."""

    def percentile_s(self, percent: float) -> float:
        """Returns the latency that `percent` of the requests did not exceed: one that was observed."""
        ordered = np.sort(self.latency_s)
        return float(ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)])

    @property
    def failed(self) -> float:
        """Share of the requests that were refused or late."""
        return float(np.isinf(self.latency_s).mean())

    @property
    def fill(self) -> float:
        """Images in a batch, on average."""
        return self.images.total() / max(1, self.batches.total())

    @property
    def padding(self) -> float:
        """Share of the rows that were padding."""
        rows = sum(bucket * count for bucket, count in self.batches.items())
        return 1 - self.images.total() / max(1, rows)


def simulate(
    profile: Profile,
    servers: int,
    load: Load,
    *,
    balancing: Balancing = "round-robin",
    deadline_s: float = math.inf,
    seed: int = 0,
) -> Outcome:
    """Runs `load` through `servers` servers like `profile`, each request to be answered within `deadline_s`."""
    if servers > MOST_SERVERS:
        load = _share(load, MOST_SERVERS / servers, seed)
        servers = MOST_SERVERS
    chance = Random(seed)

    async def run() -> Outcome:
        fleet = [_Server(profile, chance) for _ in range(servers)]
        return await _run(fleet, load, _chooser(balancing, chance), deadline_s)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


def _share(load: Load, share: float, seed: int) -> Load:
    """Returns a random part of the requests."""
    kept = np.random.default_rng(seed).random(len(load.at_s)) < share
    return Load(load.at_s[kept], load.images[kept])


class _Server:
    """One server: the time of its event loops for requests, and the engine. Made on a running loop in virtual time."""

    def __init__(self, profile: Profile, chance: Random) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.clock = loop.time
        self.outstanding = 0
        self.images: Counter[int] = Counter()
        self.batches: Counter[int] = Counter()
        self.lanes = Lanes(profile.lanes, clock=loop.time)
        self._profile = profile
        self._engine = LoopTime(loop, profile, chance)
        self._fronts = [LoopTime(loop, profile, chance) for _ in range(profile.fronts)] or [self._engine]
        self._turns = itertools.cycle(self._fronts)
        device = Device(loop, profile, chance, self._engine)
        self.batcher = Batcher(
            name="model",
            programs=device.programs(),
            lanes=self.lanes,
            worker=device,
            observer=self,
            max_images=profile.max_images,
            max_bytes=2**62,
            max_queue_delay_s=profile.max_queue_delay_s,
            clock=loop.time,
        )

    async def ask(self, images: int, deadline_s: float) -> float:
        """Returns the seconds that a request took; infinite where it was refused or late."""
        arrived = self.clock()
        self.outstanding += 1
        front, front_s, engine_s = next(self._turns), self._profile.front_s / 2, self._profile.engine_s / 2
        try:
            await front.take(front_s)
            if self._profile.fronts:
                await self._engine.take(engine_s)
            with self.batcher.admit(images, 0) as admitted:
                rows = admitted.buffer(images, (SIDE, SIDE))
                await admitted.run(EngineRequest(rows, MODE, arrived + deadline_s))
            if self._profile.fronts:
                await self._engine.take(engine_s, is_awake=True)
            await front.take(front_s, is_awake=not self._profile.fronts)
        except XlaserveError:
            return math.inf
        finally:
            self.outstanding -= 1
        took_s = self.clock() - arrived + self._profile.outside_s
        return took_s if took_s <= deadline_s else math.inf

    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: Run) -> None:
        """Counts a batch."""
        self.images[bucket.batch] += images
        self.batches[bucket.batch] += 1

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        """Never happens here."""


async def _run(
    servers: Sequence[_Server], load: Load, choose: Callable[[Sequence[_Server], int], _Server], deadline_s: float
) -> Outcome:
    loop = asyncio.get_running_loop()
    latency_s = np.zeros(len(load.at_s))
    queued_s: list[float] = []
    every = max(1, len(load.at_s) // SAMPLES)

    async def ask(number: int, server: _Server, images: int) -> None:
        latency_s[number] = await server.ask(images, deadline_s)

    asked: set[asyncio.Task[None]] = set()
    for number, (at, images) in enumerate(zip(load.at_s.tolist(), load.images.tolist(), strict=True)):
        if at > loop.time():
            await asyncio.sleep(at - loop.time())
        if number % every == 0:
            queued_s.append(sum(server.batcher.forecast.work_s() for server in servers) / len(servers))
        task = loop.create_task(ask(number, choose(servers, number), images))
        asked.add(task)
        task.add_done_callback(asked.discard)
    lane_s = sum(server.lanes.count for server in servers) * max(loop.time(), math.ulp(1.0))
    busy_s = sum(server.lanes.busy_s for server in servers)
    while asked:
        await asyncio.wait(asked)
    for server in servers:
        await server.batcher.drain(0.0)
    return Outcome(
        latency_s[int(WARM_UP * len(latency_s)) :],
        min(1.0, busy_s / lane_s),
        float(np.mean(queued_s)),
        sum((server.images for server in servers), Counter()),
        sum((server.batches for server in servers), Counter()),
    )


def _chooser(balancing: Balancing, chance: Random) -> Callable[[Sequence[_Server], int], _Server]:
    """Returns the function that chooses the server of a request, by the request's number."""
    choices: dict[Balancing, Callable[[Sequence[_Server], int], _Server]] = {
        "round-robin": lambda servers, number: servers[number % len(servers)],
        "random": lambda servers, number: chance.choice(servers),
        "least-outstanding": lambda servers, number: min(servers, key=lambda it: (it.outstanding, chance.random())),
    }
    return choices[balancing]
