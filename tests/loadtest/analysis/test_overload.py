from __future__ import annotations

import numpy as np
import pytest

from xlaserve_loadtest.analysis.overload import overload
from xlaserve_loadtest.analysis.samples import Sample, is_too_much
from xlaserve_loadtest.record.blocks import BlockLine, GeneratorUse, LoadLine
from xlaserve_loadtest.record.requests import REQUEST

SERVED_PER_S = 100.0
WARMUP_S, BLOCK_S, COOL_DOWN_S = 0.25, 1.0, 2.0


def queue(random: np.random.Generator, utilisation: float) -> list[Sample]:
    """Ten blocks of M/M/1, each from an empty queue."""
    load = LoadLine("open", rate_per_s=SERVED_PER_S * utilisation, arrivals="poisson")
    samples = []
    for index in range(10):
        length_s = WARMUP_S + BLOCK_S + COOL_DOWN_S
        due_s = np.sort(random.uniform(0, length_s, random.poisson(SERVED_PER_S * utilisation * length_s)))
        service_s = random.exponential(1 / SERVED_PER_S, due_s.size)
        done_s = np.cumsum(service_s)
        rows = np.zeros(due_s.size, REQUEST)
        rows["scheduled_ns"] = due_s * 1e9
        rows["end_ns"] = (done_s + np.maximum.accumulate(due_s - (done_s - service_s))) * 1e9
        rows["measured"] = (due_s >= WARMUP_S) & (due_s < WARMUP_S + BLOCK_S)
        window_ns = (round(WARMUP_S * 1e9), round((WARMUP_S + BLOCK_S) * 1e9))
        use = GeneratorUse(1, 0.1, sends=due_s.size)
        block = BlockLine(index, "xla", load, 0, round(length_s * 1e9), use, server=0, window_ns=window_ns)
        samples.append(Sample(block, rows))
    return samples


@pytest.mark.parametrize(("utilisation", "least", "most"), [(0.8, 0.0, 0.03), (0.95, 0.0, 0.1), (1.2, 0.9, 1.0)])
def test_a_queue_is_too_long_when_more_is_due_than_is_served(utilisation: float, least: float, most: float) -> None:
    random = np.random.default_rng(0)
    assert least <= np.mean([is_too_much(queue(random, utilisation)) for _ in range(100)]) <= most


def test_latency_grows_behind_a_queue_that_is_too_long() -> None:
    random = np.random.default_rng(0)
    found = [overload(queue(random, 1.5)) for _ in range(20)]
    assert all(each is not None and each.grows and not each.is_capped for each in found)
