from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import pytest

from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs, Warmed
from xlaserve.engine.warmup.kept_costs import MARGIN, corrected
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import Verified
from xlaserve.errors import ShuttingDown

LANES = 2
ONE, FOUR, WIDE = Bucket(1, 8, 8), Bucket(4, 8, 8), Bucket(1, 8, 16)
TRUE = {ONE: Cost(1.0, 1.5), FOUR: Cost(3.0, 4.0), WIDE: Cost(2.0, 2.5)}
"""Costs of programs where nothing disturbs the machine."""
FASTEST = 0.95
"""The part of the cost that the fastest run takes."""

Key = tuple[Mode, Bucket]


def executable(images: Images) -> Outputs:
    raise AssertionError("programs are run by the timer alone")


class Start:
    """A start that has read costs from a cache: what it trusts, times and keeps.

    It takes `slowness` times as long as at rest, and `measured` are programs that the cache has no cost of.
    """

    def __init__(self, kept: dict[Key, Cost], *, slowness: float = 1.0, measured: tuple[Key, ...] = ()) -> None:
        self.timed: list[Bucket] = []
        self.kept = dict(kept)
        self.stop = threading.Event()
        self.ledger = Ledger("digits", "3")
        self._slowness = slowness
        self._programs: dict[Key, Warmed] = {}
        for (mode, bucket), cost in kept.items():
            verified = Verified(None, fastest_s=TRUE[bucket].alone_s * FASTEST * slowness)
            known = None if (mode, bucket) in measured else cost
            made = Compilation(executable, 0.0, 0.0, cost=known, keep_cost=self._keep(mode, bucket))
            self._programs[mode, bucket] = self.ledger.record(mode, bucket, made, cost, verified)

    def _keep(self, mode: Mode, bucket: Bucket) -> Callable[[Cost], object]:
        return lambda cost: self.kept.update({(mode, bucket): cost})

    def _time(self, run: Executable, bucket: Bucket) -> Cost:
        self.timed.append(bucket)
        return Cost(*(seconds * self._slowness for seconds in TRUE[bucket]))

    def costs(self) -> dict[Key, Cost]:
        programs = corrected(self._programs, self._time, self.ledger, LANES, self.stop)
        costs = {key: one.cost for key, one in programs.items()}
        assert list(costs.items()) == [((entry.mode, entry.bucket), entry.cost) for entry in self.ledger]
        return costs


def times(factor: float, bucket: Bucket) -> Cost:
    return Cost(*(seconds * factor for seconds in TRUE[bucket]))


XLA, GRAPH = (Mode.XLA, Mode.GRAPH)
RIGHT = {(mode, bucket): TRUE[bucket] for mode in (XLA, GRAPH) for bucket in TRUE}


def test_costs_that_may_be_right_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start = Start(RIGHT)
    assert start.costs() == start.kept == RIGHT
    assert not start.timed
    assert not caplog.records


def test_a_run_faster_than_its_kept_cost_has_its_resolution_timed_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kept = RIGHT | {(XLA, ONE): times(10.0, ONE), (GRAPH, FOUR): times(1.2, FOUR)}
    start = Start(kept)
    assert start.costs() == start.kept == RIGHT
    assert start.timed == [ONE, FOUR] * 2
    (record,) = caplog.records
    assert record.getMessage() == (
        "model digits: the compile cache's cost of xla 1x8x8 is 10.5 times too high, as a run of 950.00 ms shows;"
        " all programs at 8x8 are timed again"
    )


def test_a_cost_that_is_wrong_with_all_lanes_busy_only_is_found() -> None:
    start = Start(RIGHT | {(XLA, ONE): Cost(1.0, 15.0)})
    assert start.costs() == RIGHT


@pytest.mark.parametrize(("factor", "times_again"), [(MARGIN * 0.9, 0), (MARGIN * 1.1, 4)])
def test_what_may_be_noise_proves_nothing(factor: float, times_again: int) -> None:
    start = Start(RIGHT | {(XLA, ONE): times(factor * FASTEST, ONE)})
    start.costs()
    assert len(start.timed) == times_again


def test_a_machine_that_is_slower_now_proves_nothing() -> None:
    start = Start(RIGHT, slowness=8.0)
    assert start.costs() == RIGHT
    assert not start.timed


def test_costs_timed_again_on_a_busy_machine_replace_no_lower_ones() -> None:
    start = Start(RIGHT | {(XLA, ONE): times(10.0, ONE)}, slowness=3.0)
    assert start.costs() == start.kept == RIGHT | {(XLA, ONE): times(3.0, ONE)}
    later = Start(start.kept)
    assert later.costs() == later.kept == RIGHT


def test_a_cost_that_this_start_has_measured_is_not_doubted() -> None:
    start = Start(RIGHT | {(XLA, ONE): times(10.0, ONE)}, measured=((XLA, ONE),))
    start.costs()
    assert not start.timed


def test_what_was_timed_again_is_not_doubted_again() -> None:
    ledger = Ledger("digits", "3")
    made = Compilation(executable, 0.0, 0.0, cost=times(10.0, ONE))
    warmed = ledger.record(XLA, ONE, made, times(10.0, ONE), Verified(None, fastest_s=1.0))
    wrong_still = corrected({(XLA, ONE): warmed}, lambda run, bucket: Cost(5.0, 5.0), ledger, LANES, threading.Event())
    assert wrong_still[XLA, ONE].cost == Cost(5.0, 5.0)
    assert wrong_still[XLA, ONE].fastest_s == math.inf


def test_a_server_that_shuts_down_times_nothing_again() -> None:
    start = Start(RIGHT | {(XLA, ONE): times(10.0, ONE)})
    start.stop.set()
    with pytest.raises(ShuttingDown):
        start.costs()
    assert not start.timed
