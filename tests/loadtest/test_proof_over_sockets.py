from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.loadtest.run_files import NewRun
from tests.prove.sockets import LOADS, TRACE, Figure, Load, Measured, queue_ms, saved, table

from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.cli import parser
from xlaserve_loadtest.option_checks import settings_of
from xlaserve_loadtest.record.blocks import LoadLine


def test_every_kind_of_load_is_there() -> None:
    assert [load.name for load in LOADS] == [
        *("closed-1", "closed-4", "closed-16", "constant", "poisson", "replay", "profile"),
        *("offline", "single-stream", "multi-stream", "find-max", "server"),
    ]
    assert [load.name for load in LOADS if load.is_long] == ["server"]


@pytest.mark.parametrize("load", LOADS, ids=[load.name for load in LOADS])
def test_loadtest_takes_the_options_of_every_load(load: Load, tmp_path: Path) -> None:
    trace = tmp_path / TRACE
    trace.write_text("0.0\n1.0\n")
    options = [str(trace) if option == TRACE else option for option in load.options]
    own = parser()
    settings_of(own.parse_args(["--target", "127.0.0.1:1", "--model", "timed", *options]), own)


@pytest.mark.parametrize(
    ("measured", "holds"), [(100, True), (101, True), (98.9, False), (101.1, False), (None, False), (0, False)]
)
def test_a_figure_is_off_by_more_than_a_hundredth_or_where_it_is_missing(measured: float | None, holds: bool) -> None:
    assert Figure("p50, ms", 100, 100, measured).holds == holds
    assert Figure("p50, ms", 80, 100, measured).holds == (holds or measured == 98.9)


def test_the_truth_behind_an_open_loop_is_the_queue_of_what_was_sent(run_file: NewRun, tmp_path: Path) -> None:
    due_ns = np.array([0, 50, 250]) * 1_000_000
    run = run_file().header(("xla",)).block("xla", [100, 151, 99], due_ns=due_ns).read()
    assert list(queue_ms(Measured(0.1, 0.0, run, summarize(run), tmp_path))) == pytest.approx([100, 150, 100])


def test_the_requests_of_a_trace_are_those_that_it_names(run_file: NewRun, tmp_path: Path) -> None:
    at_s = [0.5, 0.55, 0.75]
    (tmp_path / TRACE).write_text("".join(f'{{"at_s": {one}}}\n' for one in at_s))
    poisson = LoadLine("open", rate_per_s=3.0, arrivals="poisson")
    for late_s, holds in (0.0, True), (0.01, False):
        due_ns = np.round(np.array([*at_s[:2], at_s[2] + late_s]) * 1e9).astype(np.int64)
        run = run_file().header(("xla",)).block("xla", [100, 150, 100], due_ns=due_ns, load=poisson).read()
        first, *_ = saved(1.0)(Measured(0.1, 0.0, run, summarize(run), tmp_path))
        assert first.holds == holds


def test_the_table_says_what_is_off_and_why() -> None:
    figures = [Figure("p50, ms", 400, 400, 401), Figure("p90, ms", 400, 400, 440)]
    lines = list(table([(LOADS[0], figures, "5% of sends were late")]))[2:]
    assert lines == [
        "| closed-1 | 400 | p50, ms | 400 | 401 | +0.25% | holds |",
        "| closed-1 | 400 | p90, ms | 400 | 440 | +10.00% | **OFF** (5% of sends were late) |",
    ]
