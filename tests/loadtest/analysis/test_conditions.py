from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.loadtest.run_files import NewRun
from tests.required import required

from xlaserve_loadtest.analysis.conditions import Judged, judge, value_of
from xlaserve_loadtest.analysis.served import Goodput
from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.analysis.verdict import MEASURE_NAMES, Verdict
from xlaserve_loadtest.record.blocks import GeneratorUse, LoadLine
from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.reports import junit, markdown
from xlaserve_loadtest.reports.tables import throughput
from xlaserve_loadtest.schedule.conditions import METRICS, RATIO_MEASURES, VERDICTS, ConditionError, parse


def judged(run: Run | Summary, text: str) -> Judged:
    condition = parse(text)
    summary = run if isinstance(run, Summary) else summarize(run, [condition])
    (found,) = judge(summary.points, summary.comparisons, [condition])
    return found


@pytest.mark.parametrize(
    ("text", "metric", "limit", "arm", "baseline"),
    [
        ("p99>80ms", "p99", 80, None, None),
        ("p99.9 >= 1.5s", "p99.9", 1500, None, None),
        ("p99.99>1e2", "p99.99", 100, None, None),
        ("p97.50<=2E-1s", "p97.5", 200, None, None),
        ("mean<250us", "mean", 0.25, None, None),
        ("mean<250µs", "mean", 0.25, None, None),
        ("xla:p50<=8", "p50", 8, "xla", None),
        ("graph (again): p99 lower > 8", "p99", 8, "graph (again)", None),
        ("errors>0", "errors", 0, None, None),
        ("errors=0", "errors", 0, None, None),
        ("errors!=0", "errors", 0, None, None),
        ("errors>1%", "errors", 0.01, None, None),
        ("graph:images/s<100", "images/s", 100, "graph", None),
        ("requests/s<.5", "requests/s", 0.5, None, None),
        ("xla/graph<1.0", "ratio", 1, "xla", "graph"),
        (" xla A/A / graph < 1", "ratio", 1, "xla A", "A / graph"),
        ("xla / graph p99 upper<1.1", "ratio", 1.1, "xla", "graph"),
        ("m xla/m graph upper<1.1", "ratio", 1.1, "m xla", "m graph"),
        ("verdict=slower", "verdict", "slower", None, None),
        ("xla: verdict == slower", "verdict", "slower", "xla", None),
        ("xla/graph verdict != faster", "verdict", "faster", "xla", "graph"),
    ],
)
def test_conditions_are_read(text: str, metric: str, limit: float | str, arm: str | None, baseline: str | None) -> None:
    found = parse(text)
    assert (found.metric, found.arm, found.baseline) == (metric, arm, baseline)
    assert (found.verdict or found.limit) == limit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; expected such as 'p99>80ms'"),
        ("  ", "empty; expected such as"),
        ("p99", "no comparison with <"),
        (">3", "nothing to compare before the operator"),
        ("p99<1<2", "no comparison"),
        ("p99=80", "p99 is measured, and equal to a number only by chance"),
        ("errors=1%", "errors is measured"),
        ("xla/graph!=1", "images/s is measured"),
        ("p99>fast", "expected a number such as 80, 0.95 or 1e2, got 'fast'"),
        ("p99>1,000", "got '1,000'"),
        ("p99>-1", "got '-1'"),
        ("p99>1e999", "too large"),
        ("p99>80fortnights", "p99 is a time in us, ms or s"),
        ("goodput=90", "goodput is measured"),
        ("goodput lower<90", "goodput has no interval"),
        ("goodput<5ms", "goodput is a number, or a share in %"),
        ("errors>3ms", "errors is a number, or a share in %"),
        ("images/s>3%", "takes a number without a unit"),
        ("p0>3", "between 0 and 100"),
        ("p100>3", "the greatest latency is max"),
        ("p99.99999>3", "four decimals"),
        ("errors upper>3", "errors has no interval, so no upper bound"),
        ("speed>3", "nor a ratio such as xla/graph"),
        ("xla p99>3", "write xla:p99"),
        ("/graph<1", "is none of"),
        (":p99>1", "is none of"),
        ("verdict>slower", "expected verdict= or verdict!= and one of faster, slower, inconclusive"),
        ("verdict=bad", "expected verdict="),
        ("verdict upper=slower", "expected verdict="),
    ],
)
def test_what_is_no_condition_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConditionError) as caught:
        parse(text)
    assert message in str(caught.value)


WORDS = st.sampled_from(
    [
        *(
            "p",
            "x",
            "a",
            ":",
            " ",
            "/",
            "<",
            ">",
            "=",
            "!",
            "%",
            ".",
            "0",
            "1",
            "5",
            "9",
            " upper",
            " lower",
            "us",
            "ms",
        ),
        *(
            "p99",
            "max",
            "images/s",
            "errors",
            "verdict",
            "slower",
            "xla",
            "graph",
            "<=",
            ">=",
            "==",
            "1e2",
            "0.95",
            "µs",
        ),
    ]
)


@given(st.one_of(st.text(), st.lists(WORDS).map("".join)))
@example("a/b p99 images/s<1")
@example("p99>1e999999999999")
@example("p1>1e-300us")
def test_any_text_is_a_condition_that_reads_back_or_a_condition_error(text: str) -> None:
    try:
        found = parse(text)
    except ConditionError as error:
        assert repr(text) in str(error)
    else:
        assert parse(str(found)) == found


NAMES = st.from_regex(r"[a-z0-9()._-]+( [a-z0-9()._-]+)?", fullmatch=True)
NUMBERS = st.floats(0, 1e12).map(repr)
BOUNDS = st.sampled_from(["", " lower", " upper"])
ORDER = st.sampled_from(["<", "<=", ">", ">="])


@given(
    st.one_of(
        st.builds("{}/{} {}{}{}{}".format, NAMES, NAMES, st.sampled_from(RATIO_MEASURES), BOUNDS, ORDER, NUMBERS),
        st.builds("{}:p{}{}{}{}us".format, NAMES, st.floats(0.001, 99.9).map("{:.3f}".format), BOUNDS, ORDER, NUMBERS),
        st.builds("{}:dropped{}{}%".format, NAMES, ORDER, NUMBERS),
        st.builds("{}/{} verdict={}".format, NAMES, NAMES, st.sampled_from(VERDICTS)),
    )
)
def test_every_form_of_the_grammar_is_read_whatever_the_names(text: str) -> None:
    found = parse(text)
    assert parse(str(found)) == found


def test_the_grammar_knows_what_comparisons_have() -> None:
    assert set(RATIO_MEASURES) == set(MEASURE_NAMES.values())
    assert set(VERDICTS) == set(get_args(Verdict))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("p99>1s", None),
        ("p50>15ms", "p50>15ms: graph, 4 at a time: "),
        ("xla:p50>15ms", None),
        ("errors>0", None),
        ("errors==0", "errors==0: xla, 4 at a time: 0"),
        ("xla/graph<1.0", None),
        ("xla/graph<2.5", "xla/graph<2.5: 4 at a time: "),
        ("graph/xla<1", "graph/xla<1: 4 at a time: 0."),
        ("graph/xla upper<1", "graph/xla upper<1: 4 at a time: 0."),
        ("xla/graph upper<0.95", None),
        ("xla/graph lower>1.05", "(95% interval 2.0"),
        ("xla/graph p99 upper<1.1", "xla/graph p99 upper<1.1: 4 at a time: 0."),
        ("verdict=slower", None),
        ("verdict=faster", "verdict=faster: xla / graph, 4 at a time: faster"),
        ("xla:verdict!=faster", None),
        ("graph/xla verdict=slower", "graph/xla verdict=slower: 4 at a time: slower"),
        ("graph:images/s<1000", "graph:images/s<1000: graph, 4 at a time: "),
        ("graph:images/s upper<1000", "graph:images/s upper<1000: graph, 4 at a time: "),
        ("p99.9>1s", "p99.9>1s: can't be judged: xla, 4 at a time: p99.9 needs 4,603 answers, got 800"),
        ("p97.5<1s", "p97.5<1s: xla, 4 at a time: "),
        ("eager:p50>1", "can't be judged: eager was not measured"),
        ("eager/graph<1", "can't be judged: eager and graph were not both measured"),
        ("graph:verdict=slower", "can't be judged: graph was not compared with a baseline"),
    ],
)
def test_a_condition_is_met_where_any_arm_meets_it_or_it_cannot_be_judged(
    compared: NewRun, text: str, sentence: str | None
) -> None:
    found = judged(compared().read(), text)
    assert found.is_met == (sentence is not None)
    assert (sentence or "") in str(found)
    assert found.is_judged == ("can't be judged" not in str(found))


@pytest.mark.parametrize(("text", "why"), [("p99>1s", "nothing was measured"), ("xla:p99>1s", "xla was not measured")])
def test_a_run_that_was_cut_off_before_a_block_cannot_be_judged(run_file: NewRun, text: str, why: str) -> None:
    found = judged(run_file().header(("xla",)).read(), text)
    assert (found.is_judged, found.found) == (False, why)


def test_arms_not_compared_with_each_other_have_no_bounds_or_verdict(run_file: NewRun) -> None:
    file = run_file().header(("xla", "eager", "graph"))
    for _ in range(4):
        for arm, latency_ms in (("xla", 10.0), ("eager", 20.0), ("graph", 20.0)):
            file.block(arm, [latency_ms] * 20, round=0)
    run = file.read()
    assert judged(run, "xla/eager<2.5").found.endswith(": 2.000")
    for text in ("xla/eager upper<2.5", "xla/eager verdict=slower", "xla/eager p50<2"):
        assert not judged(run, text).is_judged
        assert "not compared with each other: arms were compared with graph alone" in str(judged(run, text))


def test_bounds_take_four_pairs_of_blocks(compared: NewRun) -> None:
    run = compared(pairs=2).read()
    assert judged(run, "xla/graph>1").is_judged
    found = judged(run, "xla/graph upper<0.95")
    assert "can't be judged: 4 at a time: an interval takes 4 pairs of blocks; got 2" in str(found)


def test_a_failed_control_leaves_conditions_on_evidence_unjudged(compared: NewRun) -> None:
    summary = summarize(compared(xla_ms=30, graph_ms=20, control_ms=23).read())
    for text in ("xla/graph upper<0.95", "xla/graph lower<0.5", "xla/graph lower<0.95", "verdict=slower"):
        found = judged(summary, text)
        assert (found.is_met, found.is_judged) == (True, False)
        assert "can't be judged" in str(found)
        assert "the A/A control failed" in str(found)
    # Nobody claims that it is faster, and the point value claims nothing.
    assert not judged(summary, "xla/graph lower>1.1").is_met
    assert judged(summary, "verdict=faster").is_judged
    assert not judged(summary, "verdict=faster").is_met
    assert judged(summary, "xla/graph<1").is_judged
    assert judged(summary, "verdict=inconclusive").is_judged
    control = judged(summary, "graph again/graph verdict!=inconclusive")
    assert (control.is_met, control.is_judged) == (True, True)


def test_a_verdict_that_is_withheld_for_lack_of_blocks_is_not_judged(compared: NewRun) -> None:
    found = judged(compared(xla_ms=30, graph_ms=20, pairs=2).read(), "verdict=slower")
    assert (found.is_met, found.is_judged) == (True, False)


def test_a_condition_that_is_not_met_shows_the_closest_figure(compared: NewRun) -> None:
    assert judged(compared(xla_ms=10, graph_ms=20).read(), "p50>1s").found.startswith("graph, 4 at a time: 2")
    assert judged(compared(xla_ms=10, graph_ms=20).read(), "p50<1ms").found.startswith("xla, 4 at a time: ")


def test_equal_arms_pass_half_of_point_values_and_hardly_any_bounds(compared: NewRun) -> None:
    tosses, bounds = 0, 0
    for seed in range(40):
        summary = summarize(compared(xla_ms=20, graph_ms=20, seed=seed, requests=20, name=f"r{seed}").read())
        tosses += judged(summary, "xla/graph<1.0").is_met
        bounds += judged(summary, "xla/graph upper<1.0").is_met or judged(summary, "verdict=slower").is_met
    assert 10 <= tosses <= 30
    assert bounds <= 4


@pytest.mark.parametrize("metric", ["p50", "p90", "p95", "p99", "p99.9", "p99.5", *METRICS])
def test_every_metric_of_the_grammar_has_a_value(metric: str, run_file: NewRun) -> None:
    condition = parse(f"{metric}>0")
    file = run_file().header(("xla",), configuration={"slo": "p99<50ms"})
    file.block("xla", [10.0] * 20_000, generator=GeneratorUse(1, 0.1, sends=20_000, compared=9))
    (point,) = summarize(file.read(), [condition]).points
    assert value_of(point, condition) is not None


def test_an_objective_at_any_percentile_is_judged_in_its_searchs_report(run_file: NewRun) -> None:
    load = LoadLine("open", rate_per_s=100.0, arrivals="poisson")
    file = run_file().header(("xla",), configuration={"slo": "p97<50ms"})
    file.block("xla", np.full(400, 20.0), load=load, due_ns=np.arange(400) * 10**7, role="confirm")
    (rate,) = summarize(file.read()).highest_rates
    assert rate.rate_per_s == 100.0


def test_errors_are_judged_by_number_and_by_share(run_file: NewRun) -> None:
    file = run_file().header(("xla",)).block("xla", [10.0] * 97).block("xla", [10.0] * 3, status=Status.INTERNAL)
    run = file.read()
    met = [text for text in ("errors>2", "errors>3", "errors>=3%", "errors>3%", "errors=3") if judged(run, text).is_met]
    assert met == ["errors>2", "errors>=3%", "errors=3"]


def test_failures_of_a_block_without_an_answer_are_errors_in_every_report(run_file: NewRun) -> None:
    file = run_file().header(("xla",)).block("xla", [10.0] * 90)
    file.block("xla", [1.0] * 10, status=Status.INVALID_REPLY, window_ns=None, columns={"measured": False})
    summary = summarize(file.read())
    met = [text for text in ("errors>0", "errors=10", "errors>=10%", "errors>10%") if judged(summary, text).is_met]
    assert met == ["errors>0", "errors=10", "errors>=10%"]
    found = [judged(summary, "errors>0")]
    assert "**failed**" in markdown.render(summary, found)
    assert 'failures="1" errors="0"' in junit.render([junit.suite(summary, found)])


@pytest.mark.parametrize("text", ["errors>0", "errors>0%", "dropped>0", "p99>1s", "images/s<1", "goodput<1%"])
def test_a_run_that_was_interrupted_in_warm_up_passes_no_condition(run_file: NewRun, text: str) -> None:
    file = run_file().header(("xla",), configuration={"slo": "p99<50ms"})
    file.block("xla", [10.0] * 90, window_ns=None, columns={"measured": False})
    found = judged(file.read(), text)
    assert (found.is_met, found.is_judged) == (True, False)
    assert "no request was measured" in found.found


def test_goodput_is_what_was_answered_within_the_limit_of_all_that_was_due(run_file: NewRun) -> None:
    load = LoadLine("open", rate_per_s=100.0, arrivals="constant")
    latencies_ms = np.repeat([20.0, 50.0, 60.0], [700, 100, 100])
    rejected = GeneratorUse(1, 0.1, sends=900, dropped=100)
    file = run_file().header(("xla",), configuration={"slo": "p99<50ms"})
    window_ns = (file.now_ns, file.now_ns + 10 * 10**9)
    due_ns = np.arange(900) * 10**7
    file.block("xla", latencies_ms, load=load, due_ns=due_ns, generator=rejected, window_ns=window_ns)
    summary = summarize(file.read())
    assert required(summary.points[0].goodput) == Goodput(limit_ms=50.0, per_s=70.0, share=0.7)
    met = [
        text
        for text in ("goodput<71%", "goodput<70%", "goodput>=70%", "goodput<70.1", "xla:goodput<70")
        if judged(summary, text).is_met
    ]
    assert met == ["goodput<71%", "goodput>=70%", "goodput<70.1"]
    assert judged(summary, "goodput<71%").found == "xla, 100/s constant: 70.00%"
    assert "70.0% within 50 ms" in summary.verdict
    assert throughput(summary).columns["goodput/s"] == [70.0]


def test_goodput_without_a_limit_can_not_be_judged(run_file: NewRun) -> None:
    found = judged(run_file().header(("xla",)).block("xla", [10.0] * 100).read(), "goodput<99%")
    assert found.is_met
    assert not found.is_judged
    assert found.found.endswith("the run had no limit to be within: --slo")


@pytest.mark.parametrize("text", ["errors>0", "verdict=slower", "xla/graph upper<1", "xla:verdict=slower"])
def test_a_run_in_which_nothing_was_measured_passes_no_condition(run_file: NewRun, text: str) -> None:
    found = judged(run_file().header().read(), text)
    assert found.is_met
    assert not found.is_judged
