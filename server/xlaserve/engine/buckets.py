"""The planner: which buckets the waiting images run in.

Pure functions of what warm-up measured. A bucket's cost depends on how many lanes are busy: two lanes of a CPU hardly
slow each other down, two lanes of a GPU share one processor. Warm-up measures each bucket alone and with all lanes
running; costs between are interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

BRIEF_S: Final = 50e-6
"""What it takes to hand a batch to a thread and back, and to switch between threads."""


class Cost(NamedTuple):
    """Median seconds to run one bucket."""

    alone_s: float
    loaded_s: float
    """With every lane of the device running it."""

    def at(self, running: int, lanes: int) -> float:
        """Returns seconds when `running` of `lanes` run, this one included."""
        share = (running - 1) / (lanes - 1) if lanes > 1 else 0.0
        return self.alone_s + share * (self.loaded_s - self.alone_s)


class Step(NamedTuple):
    """Images `start` to `stop` (exclusive) of those that wait run together, padded to `bucket` rows."""

    start: int
    stop: int
    bucket: int


class Sequences:
    """The cheapest sequence of buckets, one after the other, for any number of images.

    Exact: least[n] = min over buckets b of cost[b] + least[n - b], with least[n <= 0] = 0. The table grows as it is
    asked. It never falls with n, because what runs n + 1 images runs n as well.
    """

    def __init__(self, cost_s: Mapping[int, float]) -> None:
        self._cost_s = dict(sorted(cost_s.items(), reverse=True))
        self._least_s = [0.0]
        self._last = [0]
        self._largest = [0]

    def least_s(self, images: int) -> float:
        """Returns the seconds that the cheapest sequence for `images` takes."""
        self._grow(images)
        return self._least_s[images]

    def largest(self, images: int) -> int:
        """Returns the largest bucket of the cheapest sequence for `images`."""
        self._grow(images)
        return self._largest[images]

    def steps(self, images: int) -> tuple[Step, ...]:
        """Returns the cheapest sequence, the largest bucket first: only its last step is padded."""
        self._grow(images)
        buckets = []
        remaining = images
        while remaining > 0:
            buckets.append(self._last[remaining])
            remaining -= buckets[-1]
        steps = []
        start = 0
        for bucket in sorted(buckets, reverse=True):
            stop = min(start + bucket, images)
            steps.append(Step(start, stop, bucket))
            start = stop
        return tuple(steps)

    def _grow(self, images: int) -> None:
        for n in range(len(self._least_s), images + 1):
            # On equal cost the larger bucket: fewer batches.
            last = min(self._cost_s, key=lambda bucket: self._with_last(bucket, n))
            self._least_s.append(self._with_last(last, n))
            self._last.append(last)
            self._largest.append(max(last, self._largest[max(0, n - last)]))

    def _with_last(self, bucket: int, images: int) -> float:
        return self._cost_s[bucket] + self._least_s[max(0, images - bucket)]


class Planner:
    """Plans for one mode and resolution of one model on a device with `lanes` lanes.

    `costs` maps each bucket's batch to its measured cost.
    """

    def __init__(self, costs: Mapping[int, Cost], lanes: int) -> None:
        if not costs:
            raise ValueError("a planner needs at least one bucket")
        self.largest = max(costs)
        self.best = min(costs, key=lambda bucket: (costs[bucket].loaded_s / bucket, -bucket))
        """The bucket with the most images a second: to wait for more than fill it gains nothing."""
        self.cheapest_s = min(cost.alone_s for cost in costs.values())
        """No image is answered in less."""
        self.brief = frozenset(bucket for bucket, cost in costs.items() if cost.loaded_s <= BRIEF_S)
        """The buckets whose run takes less than a hand-over to a thread."""
        self._costs = dict(costs)
        self._lanes = lanes
        self._sequences = [
            Sequences({bucket: cost.at(running, lanes) for bucket, cost in costs.items()})
            for running in range(1, lanes + 1)
        ]

    def cost_s(self, bucket: int, running: int) -> float:
        """Returns seconds for one run of `bucket` when `running` lanes run."""
        return self._costs[bucket].at(running, self._lanes)

    def plan(self, images: int, free_lanes: int, busy_lanes: int = 0) -> tuple[tuple[Step, ...], ...]:
        """Returns for each lane to use the steps that it runs in turn; together they cover `images` in order, once.

        Chooses how many of the `free_lanes` finish all images soonest. Lanes are alike, so an even split is best: the
        images of the fullest lane, ceil(images / used), are the least that any split leaves, and a sequence's cost
        never falls with its images.
        """
        used, sequences = self._split(images, free_lanes, busy_lanes)
        edges = [-(-images * lane // used) for lane in range(used + 1)]
        return tuple(
            tuple(Step(start + first, start + last, bucket) for first, last, bucket in sequences.steps(stop - start))
            for start, stop in pairwise(edges)
        )

    def next_step(self, images: int, free_lanes: int, busy_lanes: int = 0) -> Step:
        """Returns the step to start now, the first of the plan; the rest is planned again when a lane is free."""
        used, sequences = self._split(images, free_lanes, busy_lanes)
        share = -(-images // used)
        bucket = sequences.largest(share)
        return Step(0, min(bucket, share), bucket)

    def share(self, images: int, free_lanes: int, busy_lanes: int = 0) -> int:
        """Returns how many of `images` the fullest lane of the plan runs, `next_step` first."""
        used, _ = self._split(images, free_lanes, busy_lanes)
        return -(-images // used)

    def _split(self, images: int, free_lanes: int, busy_lanes: int) -> tuple[int, Sequences]:
        """Returns how many lanes to use, and the sequences for so many."""
        if images < 1 or free_lanes < 1 or free_lanes + busy_lanes > self._lanes:
            raise ValueError(f"no plan for {images} images on {free_lanes} free and {busy_lanes} busy lanes")
        used = min(
            range(1, min(free_lanes, images) + 1),
            key=lambda lanes: self._sequences[busy_lanes + lanes - 1].least_s(-(-images // lanes)),
        )
        return used, self._sequences[busy_lanes + used - 1]
