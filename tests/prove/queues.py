"""Latencies of simulated queues, whose true percentiles are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal

import numpy as np

from xlaserve_loadtest.analysis.intervals import Floats
from xlaserve_loadtest.analysis.percentiles import Nanoseconds

Kind = Literal["independent", "M/M/1", "M/D/1", "batches of 8"]

_BATCH: Final = 8
_WARMUP_S: Final = 1.0
_BLOCK_WARMUP_S: Final = 0.25


def latencies_s(random: np.random.Generator, kind: Kind, utilisation: float, rate: float, due_s: Floats) -> Floats:
    """Returns latencies of requests that are due at `due_s`, of a server that begins idle."""
    mean_s = utilisation / rate
    if kind == "independent":
        return random.exponential(mean_s, due_s.size)
    if kind == "batches of 8":
        return _in_batches(due_s, _BATCH * mean_s)
    service_s = random.exponential(mean_s, due_s.size) if kind == "M/M/1" else np.full(due_s.size, mean_s)
    # Lindley's recursion: a wait is how far the work so far is above its lowest point.
    work_s = np.concatenate([[0.0], np.cumsum(service_s[:-1] - np.diff(due_s))])
    waits_s: Floats = work_s - np.minimum.accumulate(work_s)
    return waits_s + service_s


def _in_batches(due_s: Floats, batch_s: float) -> Floats:
    """Returns latencies of a server that takes what waits, at most eight, and always `batch_s` for it."""
    dues, ends_s = due_s.tolist(), np.empty(due_s.size)
    first, free_s = 0, 0.0
    while first < len(dues):
        began_s = max(free_s, dues[first])
        last = first + 1
        while last < len(dues) and last - first < _BATCH and dues[last] <= began_s:
            last += 1
        free_s = began_s + batch_s
        ends_s[first:last] = free_s
        first = last
    return ends_s - due_s


def run(
    random: np.random.Generator, kind: Kind, utilisation: float, *, rate: float, seconds: float, blocks: int
) -> list[Nanoseconds]:
    """Returns the latencies of the blocks of a run with Poisson arrivals; each block finds the server idle."""
    found = []
    for block in range(blocks):
        warmup_s = _BLOCK_WARMUP_S if block else _WARMUP_S
        span_s = warmup_s + seconds / blocks
        due_s = np.sort(random.uniform(0, span_s, random.poisson(rate * span_s)))
        latencies = latencies_s(random, kind, utilisation, rate, due_s)
        found.append(np.round(latencies[due_s >= warmup_s] * 1e9).astype(np.int64))
    return found


@cache
def true_percentiles_ns(kind: Kind, utilisation: float, rate: float, percentiles: Sequence[float]) -> tuple[float, ...]:
    """Returns the percentiles of a run without end."""
    mean_s = utilisation / rate
    if kind == "independent":
        return tuple(-math.log1p(-percentile / 100) * mean_s * 1e9 for percentile in percentiles)
    if kind == "M/M/1":
        return tuple(-math.log1p(-percentile / 100) * mean_s / (1 - utilisation) * 1e9 for percentile in percentiles)
    random = np.random.default_rng(0)
    due_s = np.cumsum(random.exponential(1 / rate, 2_000_000))
    latencies = latencies_s(random, kind, utilisation, rate, due_s)[50_000:]
    return tuple(np.percentile(latencies * 1e9, percentiles).tolist())
