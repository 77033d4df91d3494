"""The planner: which buckets the waiting images run in.

Pure functions of the cost of a batch of each bucket. The cost depends on how many lanes are busy: two lanes of a CPU
hardly slow each other down, two lanes of a GPU share one processor. A cost is known for one lane alone and for all
lanes running; costs between are interpolated.

Costs are measured, so small differences are noise and must not decide. Among plans that cost nearly the same, the
planner pads less (PADDING_PRICE) while lanes are free, and runs more images together (NEAR_TIE) where none is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PADDING_PRICE: Final = 0.1
"""A padded batch counts as dearer by the ratio of its padding to its images, and by this at most."""

NEAR_TIE: Final = 0.05
"""The part by which a plan with larger batches may cost more than the cheapest, where all lanes are busy."""

MIN_PLANNED: Final = 256
"""Tables go up to this many images at least. A plan for more begins with batches of the best bucket."""

MAX_LEVELS: Final = 8
"""Numbers of running lanes that have plans of their own; on a device with more lanes, neighbours share plans."""

Seconds = NDArray[np.float64]


class Cost(NamedTuple):
    """Seconds that one batch of a bucket takes."""

    alone_s: float
    loaded_s: float
    """Seconds with every lane of the device running it."""

    def at(self, running: int, lanes: int) -> float:
        """Returns seconds when `running` of `lanes` run, this one included."""
        share = (running - 1) / (lanes - 1) if lanes > 1 else 0.0
        return self.alone_s + share * (self.loaded_s - self.alone_s)


class Step(NamedTuple):
    """The batch to start now: the first `images` that wait, padded to `bucket` rows."""

    images: int
    bucket: int
    share: int
    """Images that the lane runs in all by the plan, these included."""


class Sequences:
    """The cheapest sequences of buckets, one after the other, for any number of images.

    Exact up to MIN_PLANNED images, and twice the largest bucket:
    least[n] = min over buckets b of cost[b] + least[n - b], with least[n <= 0] = 0. It never falls with n, because what
    runs n + 1 images runs n as well. `priced` is the same with the price of padding, which only a last batch has.
    """

    def __init__(self, cost_s: Mapping[int, float], tables: tuple[list[float], list[float]] | None = None) -> None:
        self._cost_s = dict(sorted(cost_s.items(), reverse=True))
        self._best = max(cost_s, key=lambda bucket: (bucket / cost_s[bucket], bucket))
        if tables is None:
            ((least_s, priced_s),) = _tables([cost_s])
        else:
            least_s, priced_s = tables
        self._least_s = least_s
        self._priced_s = priced_s

    def least_s(self, images: int) -> float:
        """Returns the seconds that the cheapest sequence for `images` takes."""
        beyond = max(0, -(-(images - len(self._least_s) + 1) // self._best))
        return beyond * self._cost_s[self._best] + self._least_s[images - beyond * self._best]

    def buckets(self, images: int) -> list[int]:
        """Returns the sequence to run. Only its last bucket is padded."""
        buckets = []
        while images > 0:
            buckets.append(self.first(images))
            images -= buckets[-1]
        return buckets

    def first(self, images: int, slack: float = 0.0) -> int:
        """Returns the first bucket of the sequence to run.

        Of the buckets whose sequence is dearer than the cheapest by the part `slack` at most, the one that runs the
        most images, and of several the smallest.
        """
        if images >= len(self._priced_s):
            return self._best
        limit_s = self._priced_s[images] * (1 + slack + 1e-9)
        found = 0
        for bucket, cost_s in self._cost_s.items():  # the largest first
            if bucket < images and found:
                break
            padded = bucket > images
            total_s = cost_s * _price(bucket, images) if padded else cost_s + self._priced_s[images - bucket]
            if total_s <= limit_s:
                found = bucket
        return found or self._best  # none where costs are so far apart that the table's rounding counts


class Planner:
    """Plans for one mode and resolution of one model on a device with `lanes` lanes.

    `costs` maps each bucket's batch to its cost. Making a planner takes a millisecond or two; a plan takes little.
    """

    def __init__(self, costs: Mapping[int, Cost], lanes: int) -> None:
        if not costs:
            raise ValueError("a planner needs at least one bucket")
        self.largest = max(costs)
        least_s = min(cost.loaded_s / bucket for bucket, cost in costs.items())
        self.best = max(bucket for bucket in costs if costs[bucket].loaded_s / bucket <= least_s * (1 + NEAR_TIE))
        """The largest bucket with nearly the most images a second: to wait for more than fill it gains nothing."""
        self._lanes = lanes
        self.batch_s = costs[self.best].loaded_s
        """Seconds that a batch of the bucket `best` takes with all lanes running."""
        levels = min(lanes, MAX_LEVELS)
        costs_s = [{bucket: cost.at(level, levels) for bucket, cost in costs.items()} for level in range(1, levels + 1)]
        of_level = [Sequences(cost_s, tables) for cost_s, tables in zip(costs_s, _tables(costs_s), strict=True)]
        self._sequences = [of_level[running * (levels - 1) // max(1, lanes - 1)] for running in range(lanes)]

    def next_step(self, images: int, free_lanes: int, busy_lanes: int = 0) -> Step:
        """Returns the step to start now; the rest is planned again when a lane is free.

        Chooses how many of the `free_lanes` finish all images soonest. Lanes are alike, so an even split is best: the
        images of the fullest lane, ceil(images / used), are the least that any split leaves, and a sequence's cost
        never falls with its images.
        """
        if images < 1 or free_lanes < 1 or free_lanes + busy_lanes > self._lanes:
            raise ValueError(f"no plan for {images} images on {free_lanes} free and {busy_lanes} busy lanes")
        used = min(
            range(1, min(free_lanes, images) + 1),
            key=lambda lanes: self._sequences[busy_lanes + lanes - 1].least_s(-(-images // lanes)),
        )
        share = -(-images // used)
        bucket = self._sequences[busy_lanes + used - 1].first(share, NEAR_TIE if free_lanes == 1 else 0.0)
        return Step(min(bucket, share), bucket, share)

    def seconds(self, images: int) -> float:
        """Returns the seconds in which all lanes together run `images`."""
        return self._sequences[-1].least_s(-(-images // self._lanes))


def with_bucket(least_s: Seconds, batch: int, cost_s: Seconds) -> Seconds:
    """Returns the seconds `[..., n]` of the cheapest sequences for n images from 0, after any number of batches.

    These are full batches of one bucket, which costs `cost_s` `[...]`.
    """
    # A row for each number of batches; in a row the rest, n modulo the batch, is run as before. Down a column the least
    # of all numbers of batches is a running minimum.
    size = least_s.shape[-1]
    rows = (size - 1) // batch + 1
    table = np.full((*least_s.shape[:-1], rows * batch), np.inf)
    table[..., :size] = least_s
    spent_s = cost_s[..., None, None] * np.arange(rows)[:, None]
    table = table.reshape(*least_s.shape[:-1], rows, batch) - spent_s
    table = np.minimum.accumulate(table, axis=-2) + spent_s
    return table.reshape(*least_s.shape[:-1], -1)[..., :size]


def _price(bucket: int, images: int) -> float:
    """Returns the factor by which a padded batch counts as dearer."""
    return 1 + PADDING_PRICE * min(1.0, (bucket - images) / images)


def _tables(costs_s: Sequence[Mapping[int, float]]) -> list[tuple[list[float], list[float]]]:
    """Returns `least` and `priced` of `Sequences` for each of `costs_s`, which are of the same buckets."""
    buckets = sorted(costs_s[0])
    size = max(MIN_PLANNED, 2 * buckets[-1]) + 1
    least_s = np.full((2, len(costs_s), size), np.inf)
    least_s[..., 0] = 0.0
    cost_of = {bucket: np.array([cost_s[bucket] for cost_s in costs_s]) for bucket in buckets}
    for bucket in buckets:  # one batch, which may be padded
        prices = np.array([_price(bucket, images) for images in range(1, bucket)])
        padded_s = np.stack([np.ones_like(prices), prices])[:, None, :] * cost_of[bucket][:, None]
        np.minimum(least_s[..., 1:bucket], padded_s, out=least_s[..., 1:bucket])
    for bucket in buckets:
        least_s = with_bucket(least_s, bucket, np.stack([cost_of[bucket]] * 2))
    least_s[0] = np.minimum.accumulate(least_s[0, :, ::-1], axis=-1)[:, ::-1]  # what rounding made fall
    return list(zip(*least_s.tolist(), strict=True))
