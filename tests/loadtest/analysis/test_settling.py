from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.prove.runs import Blocks
from tests.required import required

from xlaserve_loadtest.analysis.percentiles import Nanoseconds
from xlaserve_loadtest.analysis.samples import Sample
from xlaserve_loadtest.analysis.settling import grows, unsettled
from xlaserve_loadtest.record.blocks import LoadLine
from xlaserve_loadtest.record.requests import Rows

OPEN = LoadLine("open", rate_per_s=100.0, arrivals="poisson")


def blocks(count: int, growth: float, between: float = 0.0) -> list[Nanoseconds]:
    """Latencies that are longer at the end of each block by a share, and differ from block to block."""
    random = np.random.default_rng(0)
    levels = 10e6 * np.exp(random.normal(0, between, (count, 1)))
    return list((levels * random.normal(1 + np.linspace(0, growth, 90), 0.1, (count, 90))).astype(np.int64))


@pytest.mark.parametrize("between", [0.0, 0.5])
def test_latency_growing_in_every_block_is_found_however_blocks_differ(between: float) -> None:
    assert grows(blocks(20, 0.1, between), 0.999)
    assert not grows(blocks(20, 0.0, between), 0.95)
    assert not grows(blocks(20, -0.1, between), 0.95)


def test_a_few_blocks_or_requests_show_no_growth() -> None:
    assert grows(blocks(4, 1.0), 0.99)
    assert not grows(blocks(3, 1.0), 0.99)
    assert not grows([np.array([1, 2])] * 10, 0.5)


def run(load: LoadLine, growth: float, count: int = 20) -> list[Sample]:
    """Blocks of about 0.9 s; latencies begin at 50 ms."""
    made = Blocks()
    for turn, latencies_ns in enumerate(blocks(count, growth)):
        made.add("xla", load, latencies_ns / 1e6 * 5, server=0, turn=turn)
    return made.samples


def test_a_queue_that_grows_in_every_block_needs_three_relaxation_times() -> None:
    found = required(unsettled(run(OPEN, 1.0)))
    first_ms, last_ms = required(found.ends_ms)
    assert first_ms == pytest.approx(50 * (1 + 1 / 6), rel=0.02)
    assert last_ms == pytest.approx(50 * (1 + 5 / 6), rel=0.02)
    # The window ends with the last answer, so that the rate is a little lower than 100/s.
    assert found.needs_s == pytest.approx(12 * 0.0917**2 * 100, rel=0.15)


@pytest.mark.parametrize(
    "load",
    [
        LoadLine("closed", concurrency=4),
        LoadLine("open", rate_per_s=100.0, arrivals="replay"),
        LoadLine("open", rate_per_s=100.0, arrivals="poisson", ramp_per_s=(50.0, 150.0)),
    ],
)
def test_growth_that_is_the_load_s_own_is_no_sign_of_short_blocks(load: LoadLine) -> None:
    assert unsettled(run(load, 1.0)) is None


def test_blocks_of_constant_latency_and_single_blocks_are_long_enough() -> None:
    assert unsettled(run(OPEN, 0.0)) is None
    assert unsettled(run(OPEN, 1.0, count=1)) is None
    assert unsettled([]) is None


def test_a_block_that_an_interrupt_cut_short_makes_the_others_no_shorter() -> None:
    *whole, last = run(OPEN, 0.0)
    assert last.block.window_ns is not None
    first_ns = last.block.window_ns[0]
    cut = replace(last.block, window_ns=(first_ns, first_ns + 20_000_000))
    assert unsettled([*whole, replace(last, block=cut, rows=last.rows[:2])]) is None


def test_a_block_that_holds_few_requests_in_a_row_is_too_short() -> None:
    samples = run(OPEN, 0.0)
    slow = [replace(sample, rows=slowed(sample.rows)) for sample in samples]
    found = required(unsettled(slow))
    assert found.ends_ms is None
    assert found.needs_s == pytest.approx(4 * 0.3, rel=0.05)


def slowed(rows: Rows) -> Rows:
    rows = rows.copy()
    rows["end_ns"] += 250_000_000
    return rows
