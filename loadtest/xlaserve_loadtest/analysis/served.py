"""Outcomes of the requests that were due: answered or not, in time or not. Pure and seeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS
from xlaserve_loadtest.analysis.samples import Sample, rate

_SHUFFLES: Final = 4000


@dataclass(frozen=True, slots=True)
class Share:
    """How many of an arm's requests came to something, by what was drawn independently: server processes or blocks."""

    due: tuple[int, ...]
    served: tuple[int, ...]

    @classmethod
    def answered(cls, samples: Sequence[Sample]) -> Self:
        """Returns the share that was answered."""
        return cls._of(samples, [int(sample.answered.size) for sample in samples])

    @classmethod
    def in_time(cls, samples: Sequence[Sample]) -> Self:
        """Returns the share that was answered within the run's limit, its goodput; without a limit any answer is."""
        return cls._of(samples, [sample.in_time for sample in samples])

    @classmethod
    def _of(cls, samples: Sequence[Sample], served: Sequence[int]) -> Self:
        servers = [sample.block.server for sample in samples]
        # Requests of one server process fail together; too few processes leave nothing to compare.
        keys = servers if len(set(servers)) >= MIN_BLOCKS else range(len(samples))
        due_of, served_of = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
        for key, sample, count in zip(keys, samples, served, strict=True):
            due_of[key] += sample.due
            served_of[key] += count
        units = [key for key in due_of if due_of[key]]
        return cls(tuple(due_of[key] for key in units), tuple(served_of[key] for key in units))

    @property
    def value(self) -> float:
        """The share, from 0 to 1; 1 where nothing was due."""
        return sum(self.served) / sum(self.due) if self.due else 1.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Answers within the latency limit of the run."""

    limit_ms: float
    per_s: float
    """Requests that were answered within the limit, each second."""
    share: float
    """The same of all requests that were due, from 0 to 1."""


def goodput(samples: Sequence[Sample]) -> Goodput | None:
    """Returns the goodput of blocks; None where their run has no limit or they measured nothing."""
    limit_ns = samples[0].limit_ns
    if math.isinf(limit_ns) or not any(sample.seconds for sample in samples):
        return None
    in_time = rate(samples, "in time")
    return Goodput(limit_ns / 1e6, in_time.value if in_time else 0.0, Share.in_time(samples).value)


def difference(own: Share, other: Share, *, seed: int) -> tuple[float, float]:
    """Returns how much larger `own` is, and the probability of so large a difference between equal arms.

    By a permutation test: what if chance alone had said which units are whose? It makes no assumption on how requests
    of one unit fail together, and holds with few units and few failures.
    """
    found = own.value - other.value
    if not found or not own.due or not other.due:
        return found, 1.0
    due, served = np.array(own.due + other.due), np.array(own.served + other.served)
    places = np.tile(np.arange(due.size), (_SHUFFLES, 1))
    drawn = np.random.default_rng(seed).permuted(places, axis=1)[:, : len(own.due)]
    own_due, own_served = due[drawn].sum(axis=1), served[drawn].sum(axis=1)
    shuffled = own_served / own_due - (served.sum() - own_served) / (due.sum() - own_due)
    return found, (1 + int((np.abs(shuffled) >= abs(found) - 1e-12).sum())) / (1 + _SHUFFLES)
