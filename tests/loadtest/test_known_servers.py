"""Whole runs against servers of exactly known behaviour, in virtual time: the report must say what is true."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.loadtest.known_servers import OFFLINE, Lane, Measured, answering, hanging, images_per_s, trace
from tests.required import required

from xlaserve_loadtest.analysis.conditions import judge
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports import csv_rows, html, markdown, terminal
from xlaserve_loadtest.schedule.arrivals import ClosedLoop, Load, OpenLoop
from xlaserve_loadtest.schedule.conditions import parse


def failed(summary: Summary, *conditions: str) -> list[str]:
    judged = judge(summary.points, summary.comparisons, map(parse, conditions))
    return [str(one) for one in judged if one.is_met]


def test_offline_reports_320_images_a_second_of_a_server_that_does_them(measured: Measured) -> None:
    (point,) = measured({"xla": lambda: Lane(0.025)}, OFFLINE, images=8).points
    assert images_per_s(point) == pytest.approx(320, rel=0.01)


def test_offline_reports_a_true_ratio_of_2_as_2(measured: Measured) -> None:
    summary = measured({"xla": lambda: Lane(0.0125), "graph": lambda: Lane(0.025)}, OFFLINE, images=8)
    assert [images_per_s(point) for point in summary.points] == pytest.approx([640, 320], rel=0.01)
    (found,) = summary.comparisons
    assert required(found.ratio).value == pytest.approx(2, rel=0.01)
    assert found.verdict == "faster"


@pytest.mark.parametrize("load", [OpenLoop(100.0), ClosedLoop(8)])
def test_requests_that_hang_until_their_deadline_count_as_at_least_that(measured: Measured, load: Load) -> None:
    summary = measured({"xla": hanging(0.05, 0.04)}, load, duration_s=20, deadline_s=1.0)
    (point,) = summary.points
    p50, p99 = point.percentile("p50"), point.percentile("p99")
    assert p50.value_ms == pytest.approx(40, rel=0.01)
    assert p99.value_ms == pytest.approx(1000, rel=0.001)
    assert (p50.is_lower_bound, p99.is_lower_bound, p99.high_ms) == (False, True, None)
    assert failed(summary, "p99>300ms") == [f"p99>300ms: xla, {point.label}: \u2265 1,000 ms"]
    (unknown,) = failed(summary, "p99<2s")
    assert "can't be judged" in unknown
    assert "\u2265 1,000 ms" in unknown
    assert not failed(summary, "p99<1s", "p50>50ms")
    # Of twenty, nineteen take 40 ms and one at least 1,000.
    assert point.mean_ms == pytest.approx(88, rel=0.05)
    assert failed(summary, "max>900ms", "mean>50ms")


def test_every_report_marks_a_percentile_that_is_a_lower_bound(measured: Measured, tmp_path: Path) -> None:
    summary = measured({"xla": hanging(0.05, 0.04)}, OpenLoop(100.0), duration_s=20, deadline_s=1.0)
    console = Console(file=io.StringIO(), width=160)
    terminal.show(summary, console)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), markdown.render(summary), html.render([summary])):
        assert "\u2265 1,000" in text
    (row,) = csv.DictReader(io.StringIO(csv_rows.render([summary])))
    assert (row["p99_ms"], row["p99_is_lower_bound"], row["p50_is_lower_bound"]) == ("1000.0", "True", "False")


def test_dropped_requests_count_as_at_least_their_deadline(measured: Measured) -> None:
    # Two of the ten that are due in 0.1 s are under way at most, so that eight are dropped. No answer comes when
    # another request is due: which of the two is first would be chance.
    (point,) = measured({"xla": hanging(1e-9, 0.095)}, OpenLoop(100.0, "constant"), max_in_flight=2).points
    assert point.dropped == pytest.approx(400, rel=0.02)
    assert point.percentile("p50").value_ms == 10_000
    assert point.percentile("p50").is_lower_bound


@pytest.mark.parametrize("load", [OpenLoop(100.0), ClosedLoop(8), OFFLINE])
@pytest.mark.parametrize("rejects", [0.1, 0.48, 0.6])
def test_an_arm_that_rejects_requests_quickly_is_never_faster(measured: Measured, load: Load, rejects: float) -> None:
    arms = {"xla": answering(0.02, rejects=rejects), "graph": answering(0.06, seed=1)}
    summary = measured(arms, load, duration_s=4)
    (found,) = summary.comparisons
    assert found.verdict != "faster"
    unanswered = f"{summary.points[0].unanswered / summary.points[0].due:.1%}"
    assert summary.verdict.startswith(f"xla did not answer {unanswered} of its requests at ")
    assert "RESOURCE_EXHAUSTED" in summary.verdict
    # Nor is the other one, whose arm did not do the same work.
    (found,) = measured(dict(reversed(arms.items())), load, duration_s=4).comparisons
    assert found.verdict != "faster"


def test_an_arm_of_the_same_latency_that_sheds_load_is_slower(measured: Measured) -> None:
    arms = {"xla": answering(0.04, rejects=0.3), "graph": answering(0.04, seed=1)}
    (found,) = measured(arms, OpenLoop(100.0), duration_s=8).comparisons
    assert found.verdict == "slower"
    assert "of its requests were answered, against 100.0%" in found.reason


def test_an_arm_that_answers_less_than_half_in_an_open_loop_is_slower(measured: Measured) -> None:
    summary = measured({"xla": answering(0.02, rejects=0.6), "graph": answering(0.06)}, OpenLoop(100.0), duration_s=8)
    (found,) = summary.comparisons
    assert found.verdict == "slower"
    # Its p50 falls among what was not answered, so that there is no ratio.
    assert found.ratios["p50"] is None


@pytest.mark.parametrize("load", [OpenLoop(100.0), ClosedLoop(8)])
def test_arms_that_fail_alike_are_compared_all_the_same(measured: Measured, load: Load) -> None:
    arms = {"xla": answering(0.02, rejects=0.02), "graph": answering(0.04, rejects=0.02, seed=1)}
    (found,) = measured(arms, load, duration_s=10).comparisons
    assert found.verdict == "faster"


def test_an_open_loop_is_judged_by_what_was_answered_within_the_limit(measured: Measured) -> None:
    arms = {"xla": answering(0.02, slow=0.3), "graph": answering(0.03, seed=1)}
    (by_latency,) = measured(arms, OpenLoop(100.0), duration_s=10).comparisons
    # Of p50 and p99, which decide together, one is better by a third and the other worse by more than half.
    assert (by_latency.decides, by_latency.verdict) == ("p50", "inconclusive")
    (by_goodput,) = measured(arms, OpenLoop(100.0), duration_s=10, slo="p99<50ms").comparisons
    assert by_goodput.verdict == "slower"
    assert "were answered within 50 ms, against 100.0%" in by_goodput.reason


def test_an_overloaded_target_is_reported_first_with_its_answered_rate(measured: Measured) -> None:
    summary = measured({"xla": lambda: Lane(0.01)}, OpenLoop(200.0))
    overload = required(summary.points[0].overload)
    assert overload.answered_per_s == pytest.approx(100, rel=0.01)
    assert overload.due_per_s == pytest.approx(200, rel=0.1)
    assert summary.verdict.startswith(
        "xla did not keep up at 200/s poisson: 100/s were answered, and its latency grows with the length of the run."
    )
    assert summary.warnings[0].startswith(
        "The target did not keep up, so that latency grows with the length of the run"
    )
    calm = measured({"xla": lambda: Lane(0.01)}, OpenLoop(80.0))
    assert calm.points[0].overload is None
    assert calm.warnings == ()


def test_a_target_that_sheds_what_it_cannot_serve_does_not_keep_up_either(measured: Measured) -> None:
    summary = measured({"xla": lambda: Lane(0.01, limit=4)}, OpenLoop(200.0))
    assert "xla did not keep up at 200/s poisson: 100/s were answered." in summary.verdict
    assert not required(summary.points[0].overload).grows


@pytest.mark.parametrize("duration_s", [5, 8])
@pytest.mark.parametrize("arms", [1, 2])
def test_latency_does_not_grow_where_half_is_refused_in_a_flat_time(
    measured: Measured, duration_s: float, arms: int
) -> None:
    shedding = {name: answering(0.005, rejects=0.5, seed=seed) for seed, name in enumerate(("xla", "graph")[:arms])}
    summary = measured(shedding, OpenLoop(100.0), duration_s=duration_s)
    assert "did not keep up" in summary.verdict
    text = " ".join((summary.verdict, *summary.warnings))
    assert "grows with the length" not in text
    assert any(warning.startswith("The target did not keep up: xla") for warning in summary.warnings)


def test_requests_dropped_at_the_generators_limit_do_not_blame_the_target(measured: Measured) -> None:
    summary = measured({"xla": answering(0.1)}, OpenLoop(100.0, "constant"), max_in_flight=5)
    text = " ".join((summary.verdict, *summary.warnings))
    assert "did not keep up" not in text
    assert "xla was not sent all of 100/s constant: " in summary.verdict
    assert any("--max-in-flight 5" in warning for warning in summary.warnings)


def test_two_overloaded_arms_are_compared_by_the_rates_they_answer(measured: Measured) -> None:
    summary = measured({"xla": lambda: Lane(0.008), "graph": lambda: Lane(0.01)}, OpenLoop(200.0), duration_s=8)
    (found,) = summary.comparisons
    assert (found.decides, found.verdict) == ("images_per_s", "faster")
    assert required(found.ratio).value == pytest.approx(1.25, rel=0.02)


def test_blocks_that_are_too_short_for_the_latency_are_said(measured: Measured) -> None:
    arms = {"xla": answering(0.4), "graph": answering(0.04)}
    (warning,) = [text for text in measured(arms, ClosedLoop(4)).warnings if "Blocks are short" in text]
    assert "xla, 4 at a time (half of its requests waited 39" in warning
    assert "graph" not in warning


BURSTS = trace(*[0.0] * 20, *[1.0] * 20, *[2.0] * 20)


@pytest.mark.parametrize("seconds", [0.005, 0.1, 0.9])
@pytest.mark.parametrize("warmup_s", [0.0, 1.0])
@pytest.mark.parametrize(
    ("load", "true_per_s"),
    [
        (trace(*[0.5] * 20), 20 / 1.5),
        (BURSTS, 20.0),
        (trace(0.0, 0.25, 0.5, 1.0), 3.0),
        (trace(0.0), 1.0),
        (OpenLoop(50.0, "constant"), 50.0),
    ],
)
def test_images_per_s_of_what_is_all_answered_are_what_is_due(
    measured: Measured, load: Load, true_per_s: float, seconds: float, warmup_s: float
) -> None:
    (point,) = measured({"xla": answering(seconds)}, load, warmup_s=warmup_s).points
    assert images_per_s(point) == pytest.approx(true_per_s, rel=0.01)
    assert point.overload is None


def test_arms_that_answer_all_of_a_trace_have_the_same_images_per_s(measured: Measured) -> None:
    summary = measured({"xla": answering(0.005), "graph": answering(0.1)}, BURSTS)
    assert required(summary.comparisons[0].ratios["images_per_s"]).value == pytest.approx(1)
    assert summary.comparisons[0].decides == "p50"


def test_a_server_that_does_not_keep_up_with_a_trace_does_what_it_can(measured: Measured) -> None:
    (point,) = measured({"xla": lambda: Lane(0.01)}, trace(*np.arange(1000) / 200)).points
    assert required(point.overload).answered_per_s == images_per_s(point) == pytest.approx(100, rel=0.01)
    assert required(point.overload).grows


@pytest.mark.parametrize("load", [OpenLoop(99.0), ClosedLoop(8), BURSTS])
def test_goodput_is_not_above_throughput(measured: Measured, load: Load) -> None:
    arms = {"xla": answering(0.03, slow=0.02), "graph": answering(0.03, seed=1)}
    for point in measured(arms, load, duration_s=8, slo="p99<1s").points:
        assert required(point.goodput).per_s == pytest.approx(required(point.requests_per_s).value)
    for point in measured(arms, load, duration_s=8, slo="p99<50ms").points:
        assert required(point.goodput).per_s <= required(point.requests_per_s).value
