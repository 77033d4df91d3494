"""Parts of an arm's requests that should fare alike: those to each of several targets, and from each of several
generators. One that is slow or fails more often is hidden in the figures of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.analysis.intervals import MIN_BLOCKS, Estimate, ratio
from xlaserve_loadtest.analysis.samples import Sample, latencies_ns
from xlaserve_loadtest.analysis.served import Share, difference
from xlaserve_loadtest.record import requests as record
from xlaserve_loadtest.record.lines import Header
from xlaserve_loadtest.record.requests import Rows, Status

SLICES: Final = 8
"""Stretches of time in which parts are compared at least, where there are fewer blocks."""
MARGIN: Final = 1.1
"""Ratio of medians that may be between parts which fare alike."""
FALSE_SHARE: Final = 0.01
"""Share of equal parts that may be called different in how often they fail."""

Column = Literal["target", "generator"]


@dataclass(frozen=True, slots=True)
class Odd:
    """A part that does not fare as the others."""

    name: str
    p50_ratio: Estimate | None
    """Its median latency over that of the others; None where they don't differ."""
    failed: tuple[float, float] | None
    """Its share of failed requests and that of the others; None where they don't differ."""

    def __str__(self) -> str:
        found = []
        if self.p50_ratio is not None:
            of = self.p50_ratio
            found.append(f"its p50 is {of.value:.3g} times that of the others, {of.low:.3g} to {of.high:.3g}")
        if self.failed is not None:
            found.append(f"{self.failed[0]:.2%} of its requests failed, {self.failed[1]:.2%} of the others'")
        return f"{self.name}: {' and '.join(found)}"


def part_names(column: Column, header: Header, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Returns the names of the parts of one arm's `samples`, by their index in `column`."""
    if not samples:
        return ()
    if column == "generator":
        return samples[0].generators
    return next(arm.targets for arm in header.arms if arm.name == samples[0].block.arm)


def odd_parts(samples: Sequence[Sample], column: Column, names: Sequence[str]) -> Iterator[Odd]:
    """Yields the parts whose median latency or share of failures differs from the others' by more than noise.

    `samples` are the blocks of one arm and load, and `column` says which of `names` a request belongs to.
    """
    if len(names) < 2:
        return
    slices = [rows for sample in samples for rows in _slices(sample, math.ceil(SLICES / len(samples)))]
    all_parts = {name: [rows[rows[column] == index] for rows in slices] for index, name in enumerate(names)}
    # With fewer slots than generators, some of these have nothing to send.
    sent = {name: part for name, part in all_parts.items() if any(rows.size for rows in part)}
    names, parts = tuple(sent), tuple(sent.values())
    if len(names) < 2:
        return
    ratios = _odd_medians(np.array([[_log_median(rows) for rows in part] for part in parts]))
    for index, name in enumerate(names):
        own = _failed(parts[index])
        rest = _failed([rows for other, part in enumerate(parts) if other != index for rows in part])
        gap, chance = difference(own, rest, seed=0)
        fails = gap > 0 and chance < FALSE_SHARE
        if index in ratios or fails:
            yield Odd(name, ratios.get(index), (own.value, rest.value) if fails else None)


def _odd_medians(logs: NDArray[np.float64]) -> dict[int, Estimate]:
    """Returns the ratio of each odd part's median to that of the others.

    `logs` are the logarithms of medians: a row for each part, a column for each slice, NaN without an answer.
    """
    logs = logs[:, ~np.isnan(logs).any(axis=0)]
    if logs.shape[1] < MIN_BLOCKS:
        return {}
    if len(logs) == 2:
        # Only the slower: the other is faster by the same.
        return {index: found for index in (0, 1) if _is_slow(found := ratio(logs[index] - logs[1 - index]))}
    # The middle one of several is what is usual, however far off one of them is.
    usual = np.median(logs, axis=0)
    odd = [index for index in range(len(logs)) if _is_apart(ratio(logs[index] - usual))]
    others = np.delete(logs, odd, axis=0).mean(axis=0) if len(odd) < len(logs) else usual
    return {index: ratio(logs[index] - others) for index in odd}


def _is_slow(of_p50: Estimate) -> bool:
    return of_p50.low is not None and of_p50.low > MARGIN


def _is_apart(of_p50: Estimate) -> bool:
    return _is_slow(of_p50) or (of_p50.high is not None and of_p50.high < 1 / MARGIN)


def _slices(sample: Sample, number: int) -> list[Rows]:
    """Returns the measured requests by equally long stretches of the window."""
    measured = record.measured(sample.rows)
    first_ns, last_ns = sample.block.window_ns or (0, 1)
    places = (measured["scheduled_ns"] - first_ns) * number // max(last_ns - first_ns, 1)
    places = np.clip(places, 0, number - 1)  # by another machine's clock, a due time may lie just outside
    return [measured[places == place] for place in range(number)]


def _log_median(rows: Rows) -> float:
    """Returns the logarithm of the median latency; NaN without an answer."""
    answered_ns = latencies_ns(rows[rows["status"] == Status.OK])
    return math.log(float(np.median(answered_ns))) if answered_ns.size else math.nan


def _failed(parts: Sequence[Rows]) -> Share:
    due = [(rows.size, int((rows["status"] != Status.OK).sum())) for rows in parts if rows.size]
    return Share(tuple(all_ for all_, _ in due), tuple(failed for _, failed in due))
