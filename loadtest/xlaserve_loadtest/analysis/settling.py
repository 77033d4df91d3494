"""Whether blocks are long enough for a queue to settle in them. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, t_quantile
from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.blocks import LoadLine

_CONFIDENCE: Final = 0.999
"""That latency grows within blocks: reports have many points, and one of a hundred would warn for nothing."""
_PARTS: Final = 3
"""Of a block: its first is compared with its last."""
_MIN_MEDIANS: Final = 4.0
"""Median latencies that a block lasts at least, or it holds only a few requests in a row."""
SETTLED_AFTER: Final = 12.0
"""Product of latency and requests under way, in whose time a queue that began empty settles: three relaxation times of
M/M/1, after which the mean of a block is within about 5% of what it would be in a run without end."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """Blocks that are too short for what was measured in them."""

    median_ms: float
    ends_ms: tuple[float, float] | None
    """Mean latency in the first third of the blocks and in the last, where it grows."""
    needs_s: float
    """How long blocks should be, at least: of a queue that still grows, not all is seen."""


def grows(blocks: Sequence[Nanoseconds], confidence: float) -> bool:
    """Whether latency is longer at the end of blocks than at their start, by what it does in each of them.

    False with fewer than 4 blocks of 3 requests. Latencies are in the order in which requests were due.
    """
    ends = [_ends(block) for block in blocks if block.size >= _PARTS]
    if len(ends) < MIN_BLOCKS:
        return False
    steps = np.array([last.mean() - first.mean() for first, last in ends])
    error = float(steps.std(ddof=1)) / math.sqrt(steps.size)
    # One side of a two-sided interval.
    return float(steps.mean()) > t_quantile(steps.size - 1, 2 * confidence - 1) * error


def unsettled(samples: Sequence[Sample]) -> Unsettled | None:
    """Returns how the blocks of one arm and load are too short; None where they are not, or there is only one."""
    windows = [sample for sample in samples if sample.seconds]
    blocks = [sample.successive_ns for sample in windows]
    if len(samples) == 1 or not any(block.size for block in blocks):
        return None
    # Of a typical block: one may have been interrupted.
    length_s = float(np.median([sample.seconds for sample in windows]))
    median_s, ends_ms = float(np.median(np.concatenate(blocks))) / 1e9, None
    needs_s = _MIN_MEDIANS * median_s
    if _is_even(samples[0].block.load) and grows(blocks, _CONFIDENCE):
        first_s, last_s = (float(np.concatenate(ends).mean()) / 1e9 for ends in zip(*map(_ends, blocks), strict=True))
        ends_ms = first_s * 1000, last_s * 1000
        rate_per_s = sum(sample.due for sample in windows) / sum(sample.seconds for sample in windows)
        needs_s = max(needs_s, 2 * length_s, SETTLED_AFTER * last_s * last_s * rate_per_s)
    return Unsettled(median_s * 1000, ends_ms, needs_s) if needs_s > length_s else None


def _is_even(load: LoadLine) -> bool:
    """Whether a load has the same rate from start to end, and a queue."""
    return load.type == "open" and load.arrivals in ("poisson", "constant") and not (load.ramp_per_s or load.stages)


def _ends(block: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    third = block.size // _PARTS
    return block[:third], block[block.size - third :]
