"""Figures with their uncertainty. Pure and seeded; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]
from numpy.typing import NDArray

_WILD_LOG: Final = math.log(1e6)
PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0, 99.9)
MIN_BLOCKS: Final = 4
"""Fewer give no interval: a resample of them would too often be one block repeated."""

Floats = NDArray[np.float64]
Nanoseconds = NDArray[np.int64]

_RESAMPLES: Final = 4000
_CONFIDENCE: Final = 0.95
_SIGNIFICANT_FIGURES: Final = 3
_KEPT_BITS: Final = 11
"""HdrHistogram's resolution for three significant figures: 2 x 10^3 counters, rounded up to a power of two."""
_HIGHEST_NS: Final = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval over blocks."""

    value: float
    low: float | None
    """None where there were too few blocks for an interval."""
    high: float | None


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile of latency with its 95% confidence bounds."""

    name: str
    """Name such as "p99"."""
    percentile: float
    """From 0 to 100."""
    value_ms: float | None
    """None where there were too few answers to support it."""
    low_ms: float | None
    high_ms: float | None
    """None where the bound lies beyond the values seen."""
    needs: int
    """Number of answers needed to support it."""


def least_count(percentile: float, confidence: float = 0.99) -> int:
    """Returns how many answers a percentile needs to be supported with `confidence`.

    It is the least n for which the greatest of n answers lies above the percentile with that probability; the same
    counts as MLPerf's early stopping: 44 for p90, 90 for p95, 459 for p99.
    """
    return math.ceil(math.log(1 - confidence) / math.log(percentile / 100))


class Latencies:
    """Latencies in nanoseconds as an HdrHistogram of three significant figures."""

    def __init__(self, latencies_ns: Nanoseconds) -> None:
        self.count = int(latencies_ns.size)
        self._histogram = HdrHistogram(1, _HIGHEST_NS, _SIGNIFICANT_FIGURES)
        # Rounded down within the histogram's own resolution: a call for each distinct value instead of each answer.
        values = np.clip(latencies_ns, 1, _HIGHEST_NS)
        shift = np.maximum(np.frexp(values.astype(np.float64))[1] - _KEPT_BITS, 0)
        distinct, counts = np.unique(values >> shift << shift, return_counts=True)
        for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._histogram.record_value(value, count)

    def value_ms(self, percentile: float) -> float:
        """Returns the latency at `percentile` (0 to 100), whether the sample supports it or not."""
        return self._at_rank_ms(_nearest_rank(self.count, percentile))

    def percentile(self, percentile: float) -> Percentile:
        """Returns a percentile with its bounds, where there are enough answers."""
        name, needs = f"p{percentile:g}", least_count(percentile)
        if self.count < needs:
            return Percentile(name, percentile, None, None, None, needs)
        low, high = bounding_ranks(self.count, percentile / 100)
        return Percentile(
            name,
            percentile,
            self.value_ms(percentile),
            self._at_rank_ms(low) if low else None,
            self._at_rank_ms(high) if high else None,
            needs,
        )

    def _at_rank_ms(self, rank: int) -> float:
        # The histogram rounds a percentage to the nearest rank; a quarter less keeps it from the next one.
        return float(self._histogram.get_value_at_percentile((rank - 0.25) / self.count * 100)) / 1e6


def bounding_ranks(count: int, quantile: float) -> tuple[int | None, int | None]:
    """Returns the ranks (from 1) of the order statistics that hold the quantile between them with 95% confidence.

    How many of `count` independent answers lie below a quantile is binomial for any distribution. None where the bound
    lies beyond the least or the greatest.
    """
    spread = math.sqrt(count * quantile * (1 - quantile))
    first = max(0, math.floor(count * quantile - 8 * spread) - 8)
    last = min(count, math.ceil(count * quantile + 8 * spread) + 8)
    log_weights = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(quantile)
        + (count - k) * math.log1p(-quantile)
        for k in range(first, last + 1)
    ]
    cumulative = np.cumsum(np.exp(log_weights))
    tail = (1 - _CONFIDENCE) / 2
    low = first + int(np.searchsorted(cumulative, tail))
    high = first + int(np.searchsorted(cumulative, 1 - tail)) + 1
    return low or None, high if high <= count else None


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
    whole = math.log(_at_nearest_rank(latencies, percentile))
    without = [_at_nearest_rank(latencies[origin != left_out], percentile) for left_out in range(len(blocks))]
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


def _at_nearest_rank(ordered: Nanoseconds, percentile: float) -> float:
    if not ordered.size:
        return math.nan
    return float(max(ordered[_nearest_rank(ordered.size, percentile) - 1], 1))


def _nearest_rank(count: int, percentile: float) -> int:
    # Rounded first: 99.9% of 20,000 is 19,980, and a hair more in binary.
    return max(math.ceil(round(count * percentile / 100, 6)), 1)


def _exp(log: Estimate) -> Estimate:
    """Returns a ratio of its logarithm; bounds are limited to a millionfold: extreme blocks would overflow a float."""
    bounds = (log.low, log.high)
    low, high = (None if bound is None else math.exp(max(-_WILD_LOG, min(_WILD_LOG, bound))) for bound in bounds)
    return Estimate(math.exp(log.value), low, high)
