from __future__ import annotations

import math

import numpy as np
import pytest

from xlaserve_loadtest.record import BlockRecord, Record, Status
from xlaserve_loadtest.stats import least_count, percentile_ms, ratio_to, summarize

MS = 1_000_000


def add(record, block, latency_ms, *, status=Status.OK, measured=True, images=1, **more):
    """Adds a request that took up its slot for as long as it took."""
    if measured:
        block.slot_ns += round(latency_ms * MS)
    record.add(
        block,
        measured=measured,
        scheduled_ns=5,
        start_ns=7,
        end_ns=5 + round(latency_ms * MS),
        status=status,
        images=images,
        **more,
    )


def block_of(record, arm="xla", *, slots=1):
    block = BlockRecord(len(record.blocks), arm, slots, start_ns=0, window_ns=(0, 1), end_ns=10**9, cpu_s=0.25)
    record.blocks.append(block)
    return block


def summary(record, arm="xla"):
    return summarize(arm, record.blocks, record.requests())


@pytest.mark.parametrize(("percentile", "count"), [(50, 7), (90, 44), (95, 90), (99, 459), (99.9, 4603)])
def test_least_counts_are_those_of_early_stopping(percentile, count):
    assert least_count(percentile) == count


@pytest.mark.parametrize("percentile", [50, 90, 95, 99])
def test_a_percentile_is_told_only_where_the_sample_supports_it(percentile):
    enough = least_count(percentile)
    assert percentile_ms(np.full(enough, MS, np.int64), percentile) == 1.0
    assert percentile_ms(np.full(enough - 1, MS, np.int64), percentile) is None


def test_a_percentile_is_a_latency_that_was_seen():
    latencies_ns = np.arange(1, 1001, dtype=np.int64) * MS
    np.random.default_rng(0).shuffle(latencies_ns)
    assert [percentile_ms(latencies_ns, q) for q in (50, 90, 95, 99)] == [500.0, 900.0, 950.0, 990.0]


def test_latency_counts_from_the_time_a_request_was_due():
    record = Record()
    add(record, block_of(record), 10)
    assert summary(record).mean_ms == 10


def test_the_rate_is_what_a_second_of_slot_time_brings_times_the_slots():
    record = Record()
    block = block_of(record, slots=4)
    for _ in range(40):
        add(record, block, 100, images=8)
    assert summary(record).requests_per_s == pytest.approx(40)
    assert summary(record).images_per_s == pytest.approx(320)
    assert summary(record).images == 320


def test_failures_stay_out_of_latency_and_rates_but_cost_their_time():
    record = Record()
    block = block_of(record)
    for _ in range(50):
        add(record, block, 10)
    for _ in range(50):
        add(record, block, 10, status=Status.INTERNAL, detail="x")
    add(record, block, 1000, status=Status.DEADLINE_EXCEEDED, detail="x")
    result = summary(record)
    assert result.requests == 50
    assert result.mean_ms == 10
    assert result.percentiles_ms == {"p50": 10.0, "p90": 10.0, "p95": None, "p99": None}
    assert result.requests_per_s == pytest.approx(50 / 2)
    assert result.errors == {"INTERNAL": 50, "DEADLINE_EXCEEDED": 1}


def test_warm_up_counts_for_nothing_but_its_errors():
    record = Record()
    block = block_of(record)
    add(record, block, 10)
    add(record, block, 9999, measured=False)
    add(record, block, 9999, measured=False, status=Status.UNAVAILABLE)
    result = summary(record)
    assert (result.requests, result.mean_ms) == (1, 10)
    assert result.errors == {}
    assert result.warmup_errors == {"UNAVAILABLE": 1}


def test_arms_are_kept_apart_and_their_blocks_pooled():
    record = Record()
    for arm, latency_ms in [("xla", 10), ("graph", 20), ("graph", 40), ("xla", 30)]:
        add(record, block_of(record, arm), latency_ms)
    assert summary(record).mean_ms == 20
    assert summary(record).images_per_s == pytest.approx(2 / 0.04)
    assert summary(record).block_images_per_s == pytest.approx((100, 1 / 0.03))
    assert summary(record, "graph").mean_ms == 30
    assert ratio_to(summary(record, "graph"), summary(record)) == pytest.approx(1.5)


def test_nothing_measured_gives_no_figures():
    record = Record()
    block_of(record)
    for result in (summary(record), summary(record, "never run")):
        assert result.requests == 0
        assert result.images_per_s is result.mean_ms is result.percentiles_ms["p50"] is None
        assert ratio_to(result, result) is None


def test_stages_are_averaged_where_the_server_told_them():
    record = Record()
    block = block_of(record)
    add(record, block, 10, stages=(math.nan, 0.001, math.nan, 0.002, math.nan, 0.004))
    add(record, block, 10, stages=(math.nan, 0.003, math.nan, 0.002, math.nan, 0.004))
    assert summary(record).stages_ms == pytest.approx({"queue_ms": 2, "execute_ms": 2, "total_ms": 4})


def test_the_generators_own_cost_is_told():
    record = Record()
    block = block_of(record)
    for _ in range(100):
        add(record, block, 10)
    assert summary(record).generator_cpu_ms == pytest.approx(2.5)
    assert summary(record).generator_busy == pytest.approx(0.25)
