"""Costs of batches: measured at warm-up, and updated by every batch of the traffic.

The cost that plans use is the whole turn of a batch, from being taken from the queue to its jobs being settled:
gathered, handed over, executed and given back, without the time that it waited, gathered ahead, for a lane. Warm-up
measures executions alone, so that OVERHEAD_S is added until the traffic has shown how long the rest takes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Final, NamedTuple

from xlaserve.engine.batching.observed import Observed, Parts, Recent
from xlaserve.engine.buckets.choice import OVERHEAD_S
from xlaserve.engine.buckets.planner import Cost, Planner

BRIEF_S: Final = 50e-6
"""A program that takes no longer runs on the event loop, where a request fills it and a lane is free: to hand a batch
to a thread and back, and to switch between threads, takes as long."""

NEWEST: Final = 1 / 8
"""The part of an estimate that the newest batch makes."""

MAX_JUMP: Final = 1.5
"""A batch counts as at most this factor above or below its estimate: a single one moves that by 6 %."""

DRIFT: Final = 0.1
"""Plans are made again when an estimate has moved by this part since the last one."""

REPLAN_S: Final = 1.0
"""Seconds between two plans at least: it takes the event loop a millisecond or two."""

CHEAPEST_FACTOR: Final = 0.95
"""The factor of `Costs.lower_cheapest`."""


class Turn(NamedTuple):
    """The time of batches of one bucket from the queue to their answers."""

    cost: Cost
    """The cost that plans expect, in which the newest batches count most."""
    observed: Observed
    """Times of the latest batches, part by part."""


class Costs:
    """The costs of one mode and resolution on a device with `lanes` lanes, and the planner for them.

    `warmed` maps each bucket's batch to the seconds that it runs, as warm-up measured them.
    """

    def __init__(self, warmed: Mapping[int, Cost], lanes: int) -> None:
        self._lanes = lanes
        self._parts = [_parts(running, lanes) for running in range(1, lanes + 1)]
        self._warmed: dict[int, Cost] = {}
        self._turns: dict[int, Cost] = {}
        self._recent: dict[int, Recent] = {}
        self._planned: dict[int, Cost] = {}
        self._planner: Planner | None = None
        self._known: set[int] = set()
        """Buckets that ran since they were added; of them `_seen` since the last plan."""
        self._seen: set[int] = set()
        self._least_s = math.inf
        self._planned_at: float | None = None
        self.add(warmed)

    def add(self, warmed: Mapping[int, Cost]) -> None:
        """Adds buckets, or replaces them, and plans with them."""
        self._warmed.update(warmed)
        self._turns.update({bucket: self._initial_turn(bucket) for bucket in warmed})
        self._recent.update({bucket: Recent(cost, self._lanes) for bucket, cost in warmed.items()})
        self._seen -= warmed.keys()
        self._known -= warmed.keys()
        self.brief = frozenset(bucket for bucket, cost in self._warmed.items() if cost.loaded_s <= BRIEF_S)
        """The buckets whose run takes less than a hand-over to a thread."""
        self._least_s = min(self._least_s, *(cost.alone_s for cost in warmed.values()))
        self.cheapest_s = self._least_s
        """The least time for an image that was ever seen, so that one slow batch never has requests refused."""
        self._plan()

    @property
    def planner(self) -> Planner:
        """The planner for the costs as they were when they last had drifted.

        Made when it is asked for, so that a model with many modes and resolutions does not make all at once.
        """
        if self._planner is None:
            self._planner = Planner(self._planned, self._lanes)
        return self._planner

    def retire(self, batch: int) -> list[int]:
        """Plans without the buckets from `batch` on, unless there is none smaller. Returns those that were removed."""
        retired = [bucket for bucket in self._warmed if bucket >= batch]
        if len(retired) == len(self._warmed):
            return []
        for bucket in retired:
            del self._warmed[bucket], self._turns[bucket], self._recent[bucket]
            self._known.discard(bucket)
            self._seen.discard(bucket)
        self.brief -= set(retired)
        if retired:
            self._plan()
        return retired

    @property
    def smallest(self) -> int:
        """The smallest bucket."""
        return min(self._warmed)

    @property
    def largest(self) -> int:
        """The largest bucket."""
        return max(self._warmed)

    def fitting(self, images: int) -> int:
        """Returns the smallest bucket that holds so many images, of which there are at most `largest`."""
        return min(bucket for bucket in self._warmed if bucket >= images)

    def turn_s(self, bucket: int, running: int) -> float:
        """Returns the seconds that a batch is expected to take when `running` lanes run, this one included."""
        return self._turns[bucket].at(running, self._lanes)

    def turns(self) -> Mapping[int, Turn]:
        """Returns the time of a batch of each bucket from the queue to its answers."""
        return {bucket: Turn(self._turns[bucket], recent.observed()) for bucket, recent in self._recent.items()}

    def note(self, bucket: int, parts: Parts) -> None:
        """Adds the times of a batch, part by part, to the latest of its bucket."""
        if bucket in self._recent:  # else it was retired meanwhile
            self._recent[bucket].add(parts)

    def observe(self, bucket: int, running: int, *, turn_s: float, execute_s: float, now: float) -> None:
        """Updates the costs with a batch that began when `running` lanes ran, its own included."""
        self._least_s = self.cheapest_s = min(self._least_s, execute_s)
        if bucket not in self._turns:  # it was retired meanwhile
            return
        turns = self._turns[bucket]
        ratio = turn_s / turns.at(running, self._lanes)
        change = NEWEST * (min(max(ratio, 1 / MAX_JUMP), MAX_JUMP) - 1)
        alone, loaded = self._parts[running - 1]
        turns = self._turns[bucket] = Cost(turns[0] * (1 + alone * change), turns[1] * (1 + loaded * change))
        self._seen.add(bucket)
        self._known.add(bucket)
        if self._planned_at is None:
            self._planned_at = now
        if now - self._planned_at >= REPLAN_S and _has_moved(turns, self._planned[bucket]):
            self._planned_at = now
            self._estimate_unseen()
            self._plan()

    def lower_cheapest(self) -> None:
        """Lowers `cheapest_s` until the next batch: a request was refused for a cost that may have changed."""
        self.cheapest_s *= CHEAPEST_FACTOR

    def _estimate_unseen(self) -> None:
        """Estimates again the cost of buckets that have not run since the last plan.

        Otherwise a bucket that was slow for a while would never be tried again. The buckets that ran show how the
        machine has changed since warm-up. Where they take longer, the cause may be those buckets alone, so half of it
        counts.
        """
        changes = [
            [now / then for now, then in zip(self._turns[b], self._initial_turn(b), strict=True)] for b in self._seen
        ]
        factors = [statistics.geometric_mean(ends) for ends in zip(*changes, strict=True)]
        factors = [min(factor, math.sqrt(factor)) for factor in factors]
        for bucket in self._turns.keys() - self._seen:
            guess = Cost(
                *(seconds * factor for seconds, factor in zip(self._initial_turn(bucket), factors, strict=True))
            )
            if bucket in self._known:
                guess = Cost(*map(statistics.geometric_mean, zip(guess, self._turns[bucket], strict=True)))
            self._turns[bucket] = guess
        self._seen.clear()

    def _initial_turn(self, bucket: int) -> Cost:
        alone_s, loaded_s = self._warmed[bucket]
        return Cost(alone_s + OVERHEAD_S, loaded_s + OVERHEAD_S)

    def _plan(self) -> None:
        self._planned = dict(self._turns)
        self._planner = None


def _parts(running: int, lanes: int) -> tuple[float, float]:
    """Returns the changes of the costs alone and loaded with which the interpolated cost at `running` lanes changes by
    1.

    Each of the two changes in proportion to its weight there.
    """
    loaded = (running - 1) / (lanes - 1) if lanes > 1 else 0.5
    whole = loaded**2 + (1 - loaded) ** 2
    return (1 - loaded) / whole, loaded / whole


def _has_moved(cost: Cost, planned: Cost) -> bool:
    return any(abs(now_s - then_s) > DRIFT * then_s for now_s, then_s in zip(cost, planned, strict=True))
