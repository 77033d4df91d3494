"""Servers of known service times, simulated: what a search finds on them can be compared with the truth."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.requests import REQUEST
from xlaserve_loadtest.schedule.search import Slo, TriedRate

Seconds = NDArray[np.float64]
Queue = Callable[[Seconds, np.random.Generator], Seconds]
"""Returns each request's time in the system from their arrivals, ascending. A server alone serves about 1/s."""


def one_server(draw: Callable[[np.random.Generator, int], Seconds]) -> Queue:
    """Returns a first-come-first-served queue before one server, by Lindley's recursion: `draw` gives service times."""

    def times(arrivals: Seconds, random: np.random.Generator) -> Seconds:
        service = draw(random, arrivals.size)
        steps = np.concatenate([[0.0], np.cumsum(service[:-1] - np.diff(arrivals))])
        waits: Seconds = steps - np.minimum(np.minimum.accumulate(steps), 0.0)
        return waits + service

    return times


def several_servers(servers: int) -> Queue:
    """Returns M/M/c where c servers of 1/c each serve 1/s together."""

    def times(arrivals: Seconds, random: np.random.Generator) -> Seconds:
        service = random.exponential(servers, arrivals.size)
        free = [0.0] * servers
        ended = np.empty(arrivals.size)
        for number, (at, length) in enumerate(zip(arrivals.tolist(), service.tolist(), strict=True)):
            end = max(at, heapq.heappop(free)) + length
            heapq.heappush(free, end)
            ended[number] = end
        return ended - arrivals

    return times


def in_batches(largest: int, base: float, each: float) -> Queue:
    """Returns a server that takes all that wait, at most `largest`, and serves b of them in `base + b * each`."""

    def times(arrivals: Seconds, random: np.random.Generator) -> Seconds:
        ended = np.empty(arrivals.size)
        first, now = 0, 0.0
        while first < arrivals.size:
            now = max(now, float(arrivals[first]))
            last = min(int(np.searchsorted(arrivals, now, side="right")), first + largest)
            now += base + (last - first) * each
            ended[first:last] = now
            first = last
        return ended - arrivals

    return times


MM1 = one_server(lambda random, number: random.exponential(1.0, number))
MD1 = one_server(lambda random, number: np.ones(number))
STALLS = one_server(lambda random, number: np.where(random.random(number) < 0.005, 30.0, 0.855))
"""One request in 200 takes 35 times as long as the others."""
MM4 = several_servers(4)
BATCHES = in_batches(8, base=4.0, each=0.5)
QUEUES: dict[str, Queue] = {"M/M/1": MM1, "M/D/1": MD1, "M/M/4": MM4, "batches of 8": BATCHES, "stalls": STALLS}


def quantile(queue: Queue, rate: float, percentile: float, requests: int, seed: int = 0) -> float:
    """Returns a percentile of the time in the system from one long run."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, requests))
    return float(np.percentile(queue(arrivals, random)[requests // 20 :], percentile))


def with_spells(every_s: float, slow_s: float, times: float, speed: float) -> Callable[[float], Queue]:
    """Returns M/M/1 whose requests take `times` as long for `slow_s` of each `every_s`, from a time in s on."""

    def from_time(now_s: float) -> Queue:
        def times_of(arrivals: Seconds, random: np.random.Generator) -> Seconds:
            is_slow = (arrivals / speed + now_s) % every_s < slow_s
            return one_server(lambda random, number: random.exponential(1.0, number) * np.where(is_slow, times, 1.0))(
                arrivals, random
            )

        return times_of

    return from_time


@dataclass
class SimulatedTarget:
    """What a `Search` measures: `queue` sped up to serve `speed` requests a second."""

    queue: Queue
    speed: float
    slo: Slo
    random: np.random.Generator
    warmup_s: float = 0.5
    seconds: float = 0.0
    """How long all runs took."""
    tried: list[tuple[float, bool]] = field(default_factory=list)
    """Rates, and whether the run was a confirming one."""
    queue_at: Callable[[float], Queue] | None = None
    """The queue by the time in s at which a run begins, where it depends on that."""
    phase_s: float = 0.0

    async def __call__(self, rate_per_s: float, seconds: float, confirms: bool) -> TriedRate:
        warmup_s = max(self.warmup_s, 0.05 * seconds if confirms else 0.0)
        whole_s = warmup_s + seconds
        queue = self.queue_at(self.phase_s + self.seconds) if self.queue_at else self.queue
        self.seconds += whole_s
        self.tried.append((rate_per_s, confirms))
        number = self.random.poisson(rate_per_s * whole_s)
        arrivals_s = np.sort(self.random.random(number)) * whole_s
        rows = np.zeros(number, REQUEST)
        if number:
            latencies_s = queue(arrivals_s * self.speed, self.random) / self.speed
            rows["scheduled_ns"] = rows["start_ns"] = arrivals_s * 1e9
            rows["end_ns"] = (arrivals_s + latencies_s) * 1e9
            rows["measured"] = arrivals_s >= warmup_s
        return TriedRate.of(rate_per_s, self.slo, rows, (int(warmup_s * 1e9), int(whole_s * 1e9)), 0)
