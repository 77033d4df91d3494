"""Means and ratios over blocks, with their intervals. Pure; docs/loadtest-method.md gives the reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.percentiles import Nanoseconds, at_nearest_rank
from xlaserve_loadtest.schedule.early_stopping import least_requests

_WILD_LOG: Final = math.log(1e6)
MIN_BLOCKS: Final = 4
"""Fewer give no interval: chance alone would make most of them agree."""

Floats = NDArray[np.float64]

_CONFIDENCE: Final = 0.95
_CLIP: Final = 2.0
"""Deviations from the centre at which a block counts no further."""
_INNER_SHARE: Final = 0.68
"""Share of the blocks whose distance from the median gives the deviation."""
_LEAST_DEVIATION: Final = 1 / 32
"""Of a block, in standard deviations: where all blocks but a few are equal, those few still give a width."""
_STEPS: Final = 50
_UNEVEN: Final = 2.5
"""How many times the robust variance a plain one is where a few units make most of it: a server stood still in them."""
_UNEVEN_CONFIDENCE: Final = 0.99
"""The confidence of Student's t that gives 95% then: while few pauses were seen, the spread is too small."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% interval over blocks."""

    value: float
    low: float | None
    """None where there were too few blocks for an interval."""
    high: float | None
    p_value: float | None = None
    """Probability that chance alone moves a ratio this far from 1; None without an interval, and of other figures."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts and times of the units of one side, which are blocks or server processes, in the order of the run."""

    amounts: Floats
    seconds: Floats

    @property
    def rate(self) -> float:
        """Amount for each second of the whole time."""
        return float(self.amounts.sum() / self.seconds.sum())

    def linearised(self) -> Floats:
        """Returns a value for each unit: their mean is the rate, and their spread gives its error.

        A unit counts by its time, so that one in which a server stood still counts as much as it lasted.
        """
        values: Floats = self.rate + (self.amounts - self.rate * self.seconds) / self.seconds.mean()
        return values

    def linearised_log(self) -> Floats:
        """Returns the same for the logarithm of the rate, which must not be 0."""
        values: Floats = math.log(self.rate) + (self.amounts - self.rate * self.seconds) / self.amounts.mean()
        return values


@dataclass(frozen=True, slots=True)
class _Mean:
    """A mean of one side's blocks."""

    value: float
    variance: float
    """Of the mean."""
    degrees: int
    """Degrees of freedom of the variance."""
    is_uneven: bool = False
    """Whether a few values make most of the variance."""


def estimate(values: Sequence[float] | Floats) -> Estimate:
    """Returns Huber's robust mean of `values`, one for each block, with its 95% interval.

    It is the mean, except that a block further than two deviations from the centre counts as if it lay there. Blocks
    are the samples, not requests, since requests of one block are not independent.
    """
    found = _estimate((np.asarray(values, np.float64),))
    return Estimate(found.value, found.low, found.high)


def share(mean: float, count: int) -> Estimate:
    """Returns the mean of `count` independent values from 0 to 1, with its 95% interval, Wilson's of a share.

    That is of ones and zeros: values between them vary less, so that for them it is too wide rather than too narrow.
    """
    if not count:
        return Estimate(math.nan, None, None)
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    scale = 1 + z**2 / count
    centre = (mean + z**2 / (2 * count)) / scale
    half = z / scale * math.sqrt(mean * (1 - mean) / count + z**2 / (4 * count**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def rate_over_time(work: Work) -> Estimate:
    """Returns the rate over the whole time of all units, with its 95% interval."""
    found = _estimate((work.linearised(),), _plain_mean)
    return Estimate(found.value, None if found.low is None else max(found.low, 0.0), found.high)


def ratio_over_time(arm: Work, baseline: Work, *, paired: bool = True) -> Estimate | None:
    """Returns the ratio of two rates over the whole time of all units, with its 95% interval; None where one is 0.

    Where `paired`, units of the same place are pairs.
    """
    if not (arm.amounts.sum() and baseline.amounts.sum()):
        return None
    sides = arm.linearised_log(), baseline.linearised_log()
    return _exp(_estimate((sides[0] - sides[1],) if paired else sides, _plain_mean))


def ratio(log_ratios: Sequence[float] | Floats) -> Estimate:
    """Returns the robust geometric mean of ratios, given by their logarithms, with its 95% interval."""
    return _exp(_estimate((np.asarray(log_ratios, np.float64),)))


def unpaired_ratio(arm_logs: Floats, baseline_logs: Floats) -> Estimate:
    """Returns the ratio of two robust geometric means over blocks that are not pairs, with its 95% interval.

    As `ratio`, with the errors of a Welch test.
    """
    return _exp(_estimate((arm_logs, baseline_logs)))


def percentile_ratio(
    arm: Sequence[Nanoseconds],
    baseline: Sequence[Nanoseconds],
    percentile: float,
    *,
    paired: bool = True,
) -> Estimate | None:
    """Returns the ratio of a percentile of `arm`'s latencies to that of `baseline`, with its 95% interval.

    Each sequence has one array for each block; where `paired`, blocks of the same place are pairs. It is the robust
    geometric mean over blocks; where they are too short for the percentile, over groups of neighbours. None where
    either side has too few answers.
    """
    if min(sum(block.size for block in blocks) for blocks in (arm, baseline)) < least_requests(percentile):
        return None
    groups = (
        _groups([arm, baseline], percentile)
        if paired
        else [*_groups([arm], percentile), *_groups([baseline], percentile)]
    )
    arm_logs, baseline_logs = (
        np.array([math.log(at_nearest_rank(np.sort(group), percentile)) for group in side]) for side in groups
    )
    return ratio(arm_logs - baseline_logs) if paired else unpaired_ratio(arm_logs, baseline_logs)


def _groups(sides: Sequence[Sequence[Nanoseconds]], percentile: float) -> list[list[Nanoseconds]]:
    """Joins neighbouring blocks, all sides alike, until each group should have an answer above the percentile."""
    needs = 1 / (1 - percentile / 100) - 1e-6
    groups: list[list[list[Nanoseconds]]] = []
    is_open = False
    for blocks in zip(*sides, strict=True):
        if is_open:
            for parts, block in zip(groups[-1], blocks, strict=True):
                parts.append(block)
        else:
            groups.append([[block] for block in blocks])
        is_open = any(sum(part.size for part in parts) < needs for parts in groups[-1])
    if is_open and len(groups) > 1:
        # The rest is too short for a group of its own.
        for parts, rest in zip(groups[-2], groups.pop(), strict=True):
            parts.extend(rest)
    return [[np.concatenate(group[side]) for group in groups] for side in range(len(sides))]


def _estimate(sides: Sequence[Floats], mean_of: Callable[[Floats], _Mean] | None = None) -> Estimate:
    """Returns the mean of the first side, less that of the second where there is one, with its interval.

    Means are Huber's, unless `mean_of` makes others.
    """
    means = [(mean_of or _robust_mean)(side) for side in sides]
    value = means[0].value - sum(mean.value for mean in means[1:])
    if min(side.size for side in sides) < MIN_BLOCKS:
        return Estimate(value, None, None)
    variance = sum(mean.variance for mean in means)
    error = math.sqrt(variance)
    if error <= abs(value) * 1e-12:
        return Estimate(value, value, value, p_value=0.0 if value else 1.0)
    # Welch and Satterthwaite's, rounded down.
    degrees = math.floor(variance**2 / sum(mean.variance**2 / mean.degrees for mean in means) + 1e-9)
    confidence = _UNEVEN_CONFIDENCE if any(mean.is_uneven for mean in means) else _CONFIDENCE
    half = t_quantile(degrees, confidence) * error
    # As much larger as the interval is wider: it is 5% where the interval ends at 0.
    p_value = (1 - t_probability(degrees, abs(value) / error)) * (1 - _CONFIDENCE) / (1 - confidence)
    return Estimate(value, value - half, value + half, min(p_value, 1.0))


def _plain_mean(values: Floats) -> _Mean:
    count = values.size
    if count < MIN_BLOCKS:
        return _Mean(float(values.mean()) if count else math.nan, math.nan, 0)
    variance = float(values.var(ddof=1)) / count
    return _Mean(float(values.mean()), variance, count - 1, variance > _UNEVEN * _robust_mean(values).variance)


def _robust_mean(values: Floats) -> _Mean:
    """Returns Huber's M-estimate of location, and its variance by the usual sandwich.

    The scale is what holds 68% of the distances from the median: unlike the median distance it is not 0 where the
    values take only a few steps.
    """
    count = values.size
    centre = float(np.median(values)) if count else math.nan
    if count < MIN_BLOCKS:
        return _Mean(float(values.mean()) if count else math.nan, math.nan, 0)
    inner = math.ceil(_INNER_SHARE * count)
    distances = np.sort(np.abs(values - centre))
    deviation = float(distances[inner - 1]) / NormalDist().inv_cdf((1 + inner / (count + 1)) / 2)
    limit = _CLIP * max(deviation, _LEAST_DEVIATION * float(values.std(ddof=1)))
    for _ in range(_STEPS):
        off = values - centre
        step = float(np.clip(off, -limit, limit).sum()) / max(int((np.abs(off) <= limit).sum()), inner)
        centre += step
        if abs(step) <= 1e-9 * limit:
            break
    off = values - centre
    inside = max(int((np.abs(off) <= limit * (1 + 1e-9)).sum()), inner)
    squares = float((np.clip(off, -limit, limit) ** 2).sum())
    return _Mean(centre, squares * count / (count - 1) / inside**2, inside - 1)


def t_probability(degrees: int, distance: float) -> float:
    """Returns the probability that a Student's t lies within `distance` of 0."""
    # The finite series for whole degrees of freedom: M. Abramowitz and I. A. Stegun, 26.7.3 and 26.7.4.
    angle = math.atan(distance / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for step in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


@cache
def t_quantile(degrees: int, confidence: float) -> float:
    """Returns the distance from 0 within which a Student's t lies with the probability `confidence`."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(degrees, middle) < confidence else (low, middle)
    return high


def _exp(log: Estimate) -> Estimate:
    """Returns a ratio of its logarithm; bounds are limited to a millionfold: extreme blocks would overflow a float."""

    def limited(value: float) -> float:
        return math.exp(max(-_WILD_LOG, min(_WILD_LOG, value)))

    low, high = (None if bound is None else limited(bound) for bound in (log.low, log.high))
    return Estimate(limited(log.value), low, high, log.p_value)
