"""Means and ratios over blocks, with their intervals. Pure and seeded; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.percentiles import Nanoseconds, at_nearest_rank, least_count

_WILD_LOG: Final = math.log(1e6)
MIN_BLOCKS: Final = 4
"""Fewer give no interval: a resample of them would too often be one block repeated."""

Floats = NDArray[np.float64]

_RESAMPLES: Final = 4000
_CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval over blocks."""

    value: float
    low: float | None
    """None where there were too few blocks for an interval."""
    high: float | None


def estimate(values: Sequence[float] | Floats, *, seed: int) -> Estimate:
    """Returns the mean of `values`, one for each block, with its 95% interval by a symmetric bootstrap-t.

    Blocks are resampled, not requests, since requests of one block are not independent. Of the methods tried, this
    is the one whose coverage is as stated with few blocks.
    """
    return _estimate((np.asarray(values, np.float64),), seed)


def ratio(log_ratios: Sequence[float] | Floats, *, seed: int) -> Estimate:
    """Returns the geometric mean of ratios, given by their logarithms, with its 95% interval."""
    return _exp(estimate(log_ratios, seed=seed))


def unpaired_ratio(arm_logs: Floats, baseline_logs: Floats, *, seed: int) -> Estimate:
    """Returns the ratio of two geometric means over blocks that are not pairs, with its 95% interval.

    As `estimate`, with both sides resampled on their own and the errors of a Welch test.
    """
    return _exp(_estimate((arm_logs, baseline_logs), seed))


def pooled_percentile_ratio(
    arm: Sequence[Nanoseconds], baseline: Sequence[Nanoseconds], percentile: float, *, seed: int, paired: bool = True
) -> Estimate | None:
    """Returns the ratio of a percentile of all latencies of `arm` to that of `baseline`, with its 95% interval.

    Each sequence has one array for each block; where `paired`, blocks of the same place are pairs. None where either
    has too few answers. A block enters by its jackknife pseudo-value: how the percentile of all blocks together
    changes when it is left out.
    """
    if min(sum(block.size for block in blocks) for blocks in (arm, baseline)) < least_count(percentile):
        return None
    (arm_log, arm_pseudo), (base_log, base_pseudo) = (_pseudo_logs(blocks, percentile) for blocks in (arm, baseline))
    value = math.exp(arm_log - base_log)
    if not (np.isfinite(arm_pseudo).all() and np.isfinite(base_pseudo).all()):
        return Estimate(value, None, None)
    interval = (
        ratio(arm_pseudo - base_pseudo, seed=seed) if paired else unpaired_ratio(arm_pseudo, base_pseudo, seed=seed)
    )
    if interval.low is None or interval.high is None:
        return Estimate(value, None, None)
    # The interval of the pseudo-values, about the ratio of the figures that stand in the report.
    return Estimate(value, interval.low * value / interval.value, interval.high * value / interval.value)


def _pseudo_logs(blocks: Sequence[Nanoseconds], percentile: float) -> tuple[float, Floats]:
    """Returns the logarithm of a percentile of all blocks, and the pseudo-value of each block."""
    latencies = np.concatenate(blocks)
    order = np.argsort(latencies, kind="stable")
    latencies = latencies[order]
    origin = np.repeat(np.arange(len(blocks)), [block.size for block in blocks])[order]
    whole = math.log(at_nearest_rank(latencies, percentile))
    without = [at_nearest_rank(latencies[origin != left_out], percentile) for left_out in range(len(blocks))]
    return whole, len(blocks) * whole - (len(blocks) - 1) * np.log(np.array(without))


def _estimate(sides: Sequence[Floats], seed: int) -> Estimate:
    """Returns the mean of the first side, less that of the second where there is one, with its interval."""
    value = float(sides[0].mean() - sum(side.mean() for side in sides[1:]))
    if min(side.size for side in sides) < MIN_BLOCKS:
        return Estimate(value, None, None)
    error = math.sqrt(sum(side.var(ddof=1) / side.size for side in sides))
    if error <= abs(value) * 1e-12:
        return Estimate(value, value, value)
    random = np.random.default_rng(seed)
    resampled = [side[random.integers(0, side.size, (_RESAMPLES, side.size))] for side in sides]
    errors = np.sqrt(sum(side.var(axis=1, ddof=1) / side.shape[1] for side in resampled))
    off = np.abs(resampled[0].mean(axis=1) - sum(side.mean(axis=1) for side in resampled[1:]) - value)
    # In units of its error; a resample of one block repeated has none and counts as infinitely far off.
    distance = np.full(off.size, np.inf)
    np.divide(off, errors, out=distance, where=errors > error * 1e-9)
    half = float(np.quantile(distance, _CONFIDENCE, method="inverted_cdf")) * error
    return Estimate(value, value - half, value + half) if math.isfinite(half) else Estimate(value, None, None)


def _exp(log: Estimate) -> Estimate:
    """Returns a ratio of its logarithm; bounds are limited to a millionfold: extreme blocks would overflow a float."""
    bounds = (log.low, log.high)
    low, high = (None if bound is None else math.exp(max(-_WILD_LOG, min(_WILD_LOG, bound))) for bound in bounds)
    return Estimate(math.exp(log.value), low, high)
