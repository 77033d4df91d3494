from __future__ import annotations

import pytest
from tests.loadtest.run_files import NewRun

from xlaserve_loadtest.analysis.conditions import failures, value_of
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.lines import Status
from xlaserve_loadtest.schedule.conditions import METRICS, ConditionError, parse


@pytest.mark.parametrize(
    ("text", "metric", "limit", "arm", "baseline"),
    [
        ("p99>80ms", "p99", 80, None, None),
        ("p99.9 >= 1.5s", "p99.9", 1500, None, None),
        ("mean<250us", "mean", 0.25, None, None),
        ("xla:p50<=8", "p50", 8, "xla", None),
        ("errors>0", "errors", 0, None, None),
        ("errors>1%", "errors", 0.01, None, None),
        ("graph:images/s<100", "images/s", 100, "graph", None),
        ("requests/s<.5", "requests/s", 0.5, None, None),
        ("xla/graph<1.0", "ratio", 1, "xla", "graph"),
        (" xla A/A / graph < 1", "ratio", 1, "xla A", "A / graph"),
    ],
)
def test_conditions_are_read(text: str, metric: str, limit: float, arm: str | None, baseline: str | None) -> None:
    found = parse(text)
    assert (found.metric, found.arm, found.baseline) == (metric, arm, baseline)
    assert found.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected METRIC"),
        ("p99", "expected METRIC"),
        ("p99=80", "expected METRIC"),
        ("p99>fast", "expected METRIC"),
        ("p99>80fortnights", "p99 is a time in us, ms or s"),
        ("errors>3ms", "errors is a number, or a share in %"),
        ("images/s>3%", "takes a number without a unit"),
        ("p42>3", "'p42' is none of p50, p90"),
        ("speed>3", "nor a ratio such as xla/graph"),
        ("/graph<1", "is none of"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConditionError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("p99>1s", None),
        ("p50>15ms", "p50>15ms: graph, 4 at a time: "),
        ("xla:p50>15ms", None),
        ("errors>0", None),
        ("xla/graph<1.0", None),
        ("xla/graph<2.5", "xla/graph<2.5: 4 at a time: "),
        ("graph/xla<1", "graph/xla<1: 4 at a time: "),
        ("graph:images/s<1000", "graph:images/s<1000: graph, 4 at a time: "),
        ("p99.9>1s", "p99.9>1s: can't be judged: xla, 4 at a time: too few answers (800)"),
        ("eager:p50>1", "can't be judged: eager was not measured"),
        ("eager/graph<1", "can't be judged: eager and graph were not both measured"),
    ],
)
def test_a_condition_is_met_where_any_arm_meets_it_or_it_cannot_be_judged(
    compared: NewRun, text: str, sentence: str | None
) -> None:
    summary = summarize(compared().read())
    found = failures(summary.points, summary.comparisons, [parse(text)])
    assert (found == []) if sentence is None else (sentence in found[0])


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_of_the_grammar_has_a_value(metric: str, run_file: NewRun) -> None:
    (point,) = summarize(run_file().header(("xla",)).block("xla", [10.0] * 20_000).read()).points
    assert value_of(point, parse(f"{metric}>0")) is not None


def test_errors_are_judged_by_number_and_by_share(run_file: NewRun) -> None:
    file = run_file().header(("xla",)).block("xla", [10.0] * 97).block("xla", [10.0] * 3, status=Status.INTERNAL)
    points = summarize(file.read()).points
    met = [text for text in ("errors>2", "errors>3", "errors>=3%", "errors>3%") if failures(points, (), [parse(text)])]
    assert met == ["errors>2", "errors>=3%"]


def test_a_run_in_which_nothing_was_measured_passes_no_condition(run_file: NewRun) -> None:
    summary = summarize(run_file().header().read())
    assert failures(summary.points, summary.comparisons, [parse("errors>0")])
