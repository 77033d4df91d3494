"""Latencies of simulated servers, whose true percentiles are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Final, Literal

import numpy as np

from xlaserve_loadtest.analysis.intervals import Floats
from xlaserve_loadtest.analysis.percentiles import Nanoseconds

Kind = Literal["independent", "M/M/1", "G/M/1", "M/D/1", "batches of 8", "stalls", "closed loop of 16"]

_BATCH: Final = 8
_SLOTS: Final = 16
_BURSTS: Final = 0.25
"""Shape of the gamma law of G/M/1's intervals between arrivals: their deviation is twice their mean."""
_STALL_EVERY: Final = 2000
_STALL: Final = 50
"""Requests that are due between two stalls, and in one, on average."""
_WARMUP_S: Final = 1.0
_BLOCK_WARMUP_S: Final = 0.25


def latencies_s(random: np.random.Generator, kind: Kind, utilisation: float, rate: float, due_s: Floats) -> Floats:
    """Returns latencies of requests that are due at `due_s`, of a server that begins idle."""
    mean_s = utilisation / rate
    match kind:
        case "independent":
            return random.exponential(mean_s, due_s.size)
        case "batches of 8":
            return _in_batches(due_s, _BATCH * mean_s)
        case "stalls":
            return _until_stall_ends(random, rate, due_s) + random.exponential(mean_s, due_s.size)
        case "closed loop of 16":
            # One server is always busy: a request waits for those of all slots.
            ends_s = np.cumsum(random.exponential(mean_s, due_s.size + _SLOTS))
            latencies: Floats = ends_s[_SLOTS:] - ends_s[:-_SLOTS]
            return latencies
    service_s = np.full(due_s.size, mean_s) if kind == "M/D/1" else random.exponential(mean_s, due_s.size)
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


def _until_stall_ends(random: np.random.Generator, rate: float, due_s: Floats) -> Floats:
    """Returns how long requests wait for the end of a stall, in which a server stands still."""
    gaps_s = random.exponential(_STALL_EVERY / rate, round(due_s[-1] * rate / _STALL_EVERY * 2) + 20)
    starts_s = np.cumsum(gaps_s)
    ends_s = np.maximum.accumulate(starts_s + random.exponential(_STALL / rate, starts_s.size))
    latest = np.searchsorted(starts_s, due_s) - 1
    waits_s: Floats = np.where(latest >= 0, np.maximum(ends_s[latest] - due_s, 0), 0)
    return waits_s


def _due_s(random: np.random.Generator, kind: Kind, rate: float, span_s: float) -> Floats:
    if kind != "G/M/1":
        return np.sort(random.uniform(0, span_s, random.poisson(rate * span_s)))
    due_s = np.cumsum(random.gamma(_BURSTS, 1 / rate / _BURSTS, round(rate * span_s * 1.5) + 100))
    return due_s[due_s < span_s]


def run(
    random: np.random.Generator, kind: Kind, utilisation: float, *, rate: float, seconds: float, blocks: int
) -> list[Nanoseconds]:
    """Returns the latencies of the blocks of a run; each block finds the server idle."""
    found = []
    for block in range(blocks):
        warmup_s = _BLOCK_WARMUP_S if block else _WARMUP_S
        due_s = _due_s(random, kind, rate, warmup_s + seconds / blocks)
        latencies = latencies_s(random, kind, utilisation, rate, due_s)
        found.append(np.round(latencies[due_s >= warmup_s] * 1e9).astype(np.int64))
    return found


def run_of_processes(
    random: np.random.Generator, between: float, *, processes: int, blocks: int, requests: int
) -> list[Nanoseconds]:
    """Returns the latencies of the blocks of several server processes, one process after the other.

    Logarithms of latencies deviate by 10%, those of a process's speed by `between`.
    """
    speeds = np.repeat(random.normal(0, between, processes), blocks)
    latencies = 1e7 * np.exp(speeds[:, None] + random.normal(0, 0.1, (speeds.size, requests)))
    return list(latencies.astype(np.int64))


def true_percentiles_of_processes_ns(between: float, percentiles: Sequence[float]) -> tuple[float, ...]:
    """Returns the percentiles of any number of such processes."""
    normal = NormalDist(0, math.hypot(0.1, between))
    return tuple(1e7 * math.exp(normal.inv_cdf(percentile / 100)) for percentile in percentiles)


@cache
def true_percentiles_ns(kind: Kind, utilisation: float, rate: float, percentiles: Sequence[float]) -> tuple[float, ...]:
    """Returns the percentiles of a run without end."""
    mean_s = utilisation / rate
    if kind in ("independent", "M/M/1", "G/M/1"):
        busy = {"independent": 0.0, "M/M/1": utilisation, "G/M/1": _busy_at_arrival(utilisation)}[kind]
        return tuple(-math.log1p(-percentile / 100) * mean_s / (1 - busy) * 1e9 for percentile in percentiles)
    random = np.random.default_rng(0)
    due_s = np.cumsum(random.exponential(1 / rate, 4_000_000))
    latencies = latencies_s(random, kind, utilisation, rate, due_s)[50_000:]
    return tuple(np.percentile(latencies * 1e9, percentiles).tolist())


def true_mean_s(kind: Literal["M/M/1", "G/M/1", "M/D/1"], utilisation: float, rate: float) -> float:
    """Returns the mean latency of a run without end."""
    mean_s = utilisation / rate
    if kind == "M/D/1":
        return mean_s * (1 + utilisation / 2 / (1 - utilisation))
    return mean_s / (1 - (utilisation if kind == "M/M/1" else _busy_at_arrival(utilisation)))


def _busy_at_arrival(utilisation: float) -> float:
    """Returns the share of requests that find G/M/1 busy: the root of the Laplace transform of the intervals."""
    busy = utilisation
    for _ in range(10_000):
        busy = (1 + (1 - busy) / (utilisation * _BURSTS)) ** -_BURSTS
    return busy
