"""Targets that take an arm's requests in turn: how often is one of two called odd that is not, and one that is?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from tests.prove.queues import latencies_s
from tests.prove.registry import Row, Trials, part, share

from xlaserve_loadtest.analysis.parts import odd_parts
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse, LoadLine
from xlaserve_loadtest.record.requests import REQUEST, Status

SERVICE_S: Final = 0.005
CASES: Final[tuple[tuple[float, float, float, int, dict[str, float]], ...]] = (
    # utilisation, service time of the second over the first, what it fails more than 1%, requests, share of runs
    (0.3, 1.0, 0.0, 2000, {"at_most": 0.05}),
    (0.7, 1.0, 0.0, 2000, {"at_most": 0.05}),
    (0.9, 1.0, 0.0, 8000, {"at_most": 0.1}),
    (0.3, 1.5, 0.0, 2000, {"at_least": 0.9}),
    (0.3, 1.0, 0.04, 2000, {"at_least": 0.9}),
)


@part
def odd_targets(trials: Trials) -> Iterator[Row]:
    """Runs of one block that call one of two targets odd; each is a queue of its own with exponential service."""
    runs = trials.number(200)
    for utilisation, slow, fails, requests, limit in CASES:
        odd = sum(_is_odd(trials.random, utilisation, slow, fails, requests) for _ in range(runs))
        where = (
            f"utilisation {utilisation:g}, {requests:,} requests, the second {slow:g} times as slow, fails +{fails:.0%}"
        )
        yield share("one of two targets is called odd", where, odd, runs, **limit)


def _is_odd(random: np.random.Generator, utilisation: float, slow: float, fails: float, requests: int) -> bool:
    rate_per_s = 2 * utilisation / SERVICE_S
    due_s = np.cumsum(random.exponential(1 / rate_per_s, requests))
    rows = np.zeros(requests, REQUEST)
    rows["measured"] = True
    rows["target"] = np.arange(requests) % 2
    rows["scheduled_ns"] = rows["start_ns"] = due_s * 1e9
    for target, factor, failing in ((0, 1.0, 0.01), (1, slow, 0.01 + fails)):
        own = np.flatnonzero(rows["target"] == target)
        took_s = latencies_s(random, "M/M/1", utilisation * factor, rate_per_s / 2, due_s[own])
        rows["end_ns"][own] = (due_s[own] + took_s) * 1e9
        rows["status"][own] = np.where(random.random(own.size) < failing, Status.INTERNAL, Status.OK)
    end_ns = int(rows["scheduled_ns"].max()) + 1
    load = LoadLine("open", rate_per_s=rate_per_s, arrivals="poisson")
    block = BlockLine(0, "xla", load, 0, end_ns, GeneratorUse(1, 0.0, requests), window_ns=(0, end_ns))
    return bool(list(odd_parts([Sample(block, rows)], "target", ("a:1", "b:1"))))
