from __future__ import annotations

import numpy as np
import pytest

from xlaserve_loadtest.analysis.percentiles import Latencies
from xlaserve_loadtest.schedule.early_stopping import least_requests

MS = 1_000_000


@pytest.mark.parametrize(("percentile", "count"), [(50, 7), (90, 44), (95, 90), (99, 459), (99.9, 4603)])
def test_least_counts_are_those_of_early_stopping(percentile: float, count: int) -> None:
    assert least_requests(percentile) == count
    told = [Latencies(np.full(size, MS, np.int64)).percentile(percentile).value_ms for size in (count - 1, count)]
    assert told == [None, 1.0]


@pytest.mark.parametrize("scale_ns", [2_000, 300_000, 20 * MS, 5_000 * MS])
def test_percentiles_are_exact_at_any_scale(scale_ns: int) -> None:
    latencies_ns = (np.random.default_rng(1).lognormal(0, 1, 20_000) * scale_ns).astype(np.int64)
    found = Latencies(latencies_ns)
    for percentile in (50, 90, 95, 99, 99.9):
        true_ns = np.sort(latencies_ns)[round(20_000 * percentile / 100) - 1]
        assert found.value_ms(percentile) == true_ns / MS


def test_what_was_not_answered_ranks_above_all_answers() -> None:
    found = Latencies(np.full(980, MS, np.int64), np.full(20, MS // 2, np.int64))
    assert (found.count, found.answered) == (1000, 980)
    p95, p99 = found.percentile(95), found.percentile(99)
    assert p95.value_ms == 1
    assert not p95.is_lower_bound
    # It failed after 0.5 ms, and had no answer even when the slowest of the others had one.
    assert (p99.value_ms, p99.high_ms, p99.is_lower_bound) == (1, None, True)


def test_nothing_and_the_impossible_are_survived() -> None:
    assert Latencies(np.empty(0, np.int64)).percentile(50).value_ms is None
    assert Latencies(np.array([-5, 0, 2**62], np.int64)).count == 3
