from __future__ import annotations

import numpy as np
import pytest
from tests.required import required

from xlaserve_loadtest.analysis.percentile_bounds import PercentileBounds, correlation_requests
from xlaserve_loadtest.analysis.percentiles import Nanoseconds


def independent(count: int, seed: int = 0) -> Nanoseconds:
    return (np.random.default_rng(seed).exponential(10e6, count)).astype(np.int64)


def wandering(count: int, requests: int) -> Nanoseconds:
    """Latencies that stay about the same for so many requests."""
    levels = np.random.default_rng(0).exponential(10e6, -(-count // requests))
    return np.repeat(levels, requests)[:count].astype(np.int64)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 13])
def test_ranks_stand_on_both_sides_of_the_percentile(parts: int) -> None:
    bounds = PercentileBounds(np.array_split(independent(4000), parts))
    for percentile in (50, 90, 95):
        low, high = bounds.ranks(percentile)
        assert low is not None
        assert high is not None
        assert 0.8 * percentile * 40 < low < percentile * 40 < high <= 4000
    assert bounds.ranks(99.9)[1] is None


def test_latencies_that_stay_alike_for_long_have_wider_bounds() -> None:
    widths = []
    for latencies in (independent(20_000), wandering(20_000, 100)):
        low, high = PercentileBounds([latencies]).ranks(50)
        assert low is not None
        assert high is not None
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_a_short_run_has_upper_bounds_only_with_independent_latencies() -> None:
    assert None not in PercentileBounds([independent(500)]).ranks(50)
    low, high = PercentileBounds([wandering(500, 10)]).ranks(50)
    assert low is not None
    assert high is None
    assert None not in PercentileBounds([wandering(20_000, 10)]).ranks(50)


def test_blocks_in_which_latency_still_grows_have_no_upper_bounds() -> None:
    blocks = np.split(independent(20_000), 100)
    assert None not in PercentileBounds(blocks).ranks(50)
    low, high = PercentileBounds([block + np.arange(block.size) * 10_000 for block in blocks]).ranks(50)
    assert low is not None
    assert high is None


def test_differing_server_processes_widen_the_bounds() -> None:
    servers = [block % 6 for block in range(24)]
    blocks = [independent(500, block) * (5 + server) // 5 for block, server in enumerate(servers)]
    (low, high), (wide_low, wide_high) = PercentileBounds(blocks).ranks(50), PercentileBounds(blocks, servers).ranks(50)
    assert required(wide_high) - required(wide_low) > 3 * (required(high) - required(low))


def test_what_tells_nothing_has_no_bounds() -> None:
    assert PercentileBounds([wandering(4000, 1000)]).ranks(50) == (None, None)
    assert PercentileBounds([np.arange(4000)]).ranks(50) == (None, None)
    assert PercentileBounds([]).ranks(50) == (None, None)
    assert PercentileBounds([np.array([1, 2, 3])]).ranks(50) == (None, None)


def test_latencies_that_are_all_alike_have_bounds() -> None:
    low, high = PercentileBounds([np.full(1000, 5)] * 4).ranks(50)
    assert low is not None
    assert high is not None
    assert low < 2000 < high


@pytest.mark.parametrize("requests", [1, 10, 100])
def test_the_correlation_is_found(requests: int) -> None:
    found = correlation_requests([wandering(20_000, requests)])
    assert requests * 0.8 < found < requests * 1.6 + 2
