from __future__ import annotations

import numpy as np
import pytest
from tests.loadtest.run_files import NewRun

from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.blocks import LoadLine
from xlaserve_loadtest.record.requests import Status

ONE = LoadLine("closed", concurrency=1)
OFFLINE = LoadLine("offline", concurrency=16, images_per_request="8")


@pytest.mark.parametrize(
    ("scenario", "queries", "estimate"),
    [
        ("single-stream", 63, None),
        ("single-stream", 64, 64),
        ("single-stream", 1000, 923),  # the 92.3rd percentile, as LoadGen has it
        ("multi-stream", 661, None),
        ("multi-stream", 662, 662),
    ],
)
def test_streams_report_the_early_stopping_estimate(
    run_file: NewRun, scenario: str, queries: int, estimate: float | None
) -> None:
    latencies_ms = np.random.default_rng(0).permutation(np.arange(1.0, queries + 1))
    summary = summarize(run_file().header(("xla",), scenario=scenario).block("xla", latencies_ms, load=ONE).read())
    (result,) = summary.scenario
    assert result.value == estimate
    percentile = "p90" if scenario == "single-stream" else "p99"
    assert result.metric == f"{percentile} early-stopping estimate, ms"
    assert any("too few for an estimate" in rule for rule in result.relaxed) == (estimate is None)


def test_queries_that_failed_are_slower_than_all_others(run_file: NewRun) -> None:
    file = run_file().header(("xla",), scenario="single-stream").block("xla", [10.0] * 95, load=ONE)
    file.block("xla", [1.0] * 5, load=ONE, status=Status.INTERNAL)
    (result,) = summarize(file.read()).scenario
    assert result.value is None
    assert "5 queries failed" in result.relaxed
    assert "2 blocks in turn with other arms instead of one run" in result.relaxed


def test_the_name_says_that_rules_were_relaxed_and_the_notes_say_which(run_file: NewRun) -> None:
    file = run_file().header(("xla",), scenario="single-stream", configuration={"draws_samples": True})
    summary = summarize(file.block("xla", [10.0] * 500, load=ONE).read())
    (result,) = summary.scenario
    assert result.name == "modelled on MLPerf SingleStream"
    assert "5 s instead of 600 s" in result.relaxed
    (note,) = (note for note in summary.notes if "MLPerf" in note)
    assert note.startswith("xla: modelled on MLPerf SingleStream, not an MLPerf result: 5 s instead of 600 s; ")
    assert not any("in turn instead" in rule for rule in result.relaxed)


def test_offline_reports_images_per_second_and_the_split_of_its_query(run_file: NewRun) -> None:
    file = run_file().header(("xla",), scenario="offline")
    summary = summarize(file.block("xla", [100.0] * 320, load=OFFLINE, images=8).read())
    (result,) = summary.scenario
    assert result.value == pytest.approx(16 * 8 / 0.1, rel=0.01)
    assert result.images == 2560
    assert "2,560 images instead of 24,576" in result.relaxed
    assert any(rule.startswith("one query in requests of 8 images, 16 at a time") for rule in result.relaxed)


def test_server_reports_the_confirmed_rate_with_its_count_over_the_limit(run_file: NewRun) -> None:
    file = run_file().header(("xla",), scenario="server", configuration={"slo": "p99<50ms", "find_max": True})
    due_ns = np.arange(5000) * 10**7
    latencies_ms = np.full(5000, 20.0)
    latencies_ms[::1000] = 60.0
    load = LoadLine("open", rate_per_s=100.0, arrivals="poisson")
    file.block("xla", [10.0] * 5000, load=load, due_ns=due_ns, role="search")
    file.block("xla", latencies_ms, load=load, due_ns=due_ns, role="confirm")
    summary = summarize(file.read())
    (result,) = summary.scenario
    assert (result.value, result.queries) == (100.0, 5000)
    assert result.metric == "highest rate with p99<50ms, 1/s"


def test_a_server_of_which_no_rate_was_confirmed_has_no_value(run_file: NewRun) -> None:
    file = run_file().header(("xla",), scenario="server", configuration={"slo": "p99<50ms", "find_max": True})
    load = LoadLine("open", rate_per_s=100.0, arrivals="poisson")
    file.block("xla", [90.0] * 500, load=load, due_ns=np.arange(500) * 10**7, role="search")
    summary = summarize(file.read())
    assert summary.scenario[0].value is None
