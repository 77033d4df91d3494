from __future__ import annotations

import dataclasses
import html as html_text
import json
import re
from typing import Any

import pytest
from tests.loadtest.reports.pages import samples
from tests.loadtest.reports.pages.conftest import MakePoint, MakeSummary

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.record.blocks import LoadLine
from xlaserve_loadtest.record.lines import Arm
from xlaserve_loadtest.reports import html
from xlaserve_loadtest.reports.chart import COLOURS, label, mode_colours, short_names
from xlaserve_loadtest.reports.drawn import arm_colours
from xlaserve_loadtest.reports.markup import data, page, table, tag
from xlaserve_loadtest.reports.table import Table


def body(text: str) -> str:
    """What a reader sees: without styles, plotly and scripts of charts."""
    text = text[text.index("<body>") :]
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def charts(text: str) -> dict[str, dict[str, Any]]:
    found = re.findall(
        r'<figure data-name="([^"]+)">.*?<script type="application/json" class="chart">(.*?)</script>', text, re.DOTALL
    )
    return {name: json.loads(source) for name, source in found}


def test_the_verdict_comes_before_every_figure(summary: MakeSummary) -> None:
    text = body(html.render([summary()]))
    assert (
        text.index("xla is faster than graph: 1.17 times")
        < text.index("<strong>Warning</strong>")
        < text.index("<table")
    )
    assert 'class="verdict faster"' in text
    assert '1.170 <span class="bounds">[1.140, 1.200]</span>' in text


def test_each_sentence_of_the_verdict_is_a_paragraph(summary: MakeSummary) -> None:
    verdicts = ("xla is faster than graph.", "xla is slower than openvino.")
    sentences = ("It fell.", *verdicts)
    text = body(html.render([summary(verdict_sentences=sentences, verdicts=verdicts)]))
    for words in sentences:
        assert f'<p class="words">{words}</p>' in text


def test_every_section_of_a_full_run_has_its_chart(summary: MakeSummary) -> None:
    names = ["throughput", "percentiles", "over-time", "closed-loads", "stages", "break-even", "ledger", "buckets"]
    found = charts(html.render([summary()]))
    assert list(found) == names
    assert all(
        trace["x"] and len(trace["x"]) == len(trace["y"]) for chart in found.values() for trace in chart["traces"]
    )


def test_percentiles_stand_on_a_logarithmic_axis_of_the_tail(summary: MakeSummary) -> None:
    chart = charts(html.render([summary()]))["percentiles"]
    ticks = dict(zip(chart["layout"]["xaxis"]["ticktext"], chart["layout"]["xaxis"]["tickvals"], strict=True))
    assert chart["layout"]["xaxis"]["type"] == "log"
    assert ticks["90"] == pytest.approx(10)
    assert ticks["99.9"] == pytest.approx(1000)
    assert "99.99" not in ticks


def test_compile_events_are_marked_on_the_time_axis(summary: MakeSummary) -> None:
    chart = charts(html.render([summary()]))["over-time"]
    events = chart["traces"][-1]
    assert events["text"] == ["compile: xla 8x224x224, 4.1 s", "error: gone"]
    assert [shape["x0"] for shape in chart["layout"]["shapes"]] == events["x"] == [0.1, 2.5]


def test_a_run_without_data_still_says_what_it_can(summary: MakeSummary) -> None:
    bare = summary(
        points=(), curve=(), comparisons=(), prices=(), highest_rates=(), scenario=(), equalities=(), failures=(),
        servers=(), events=(), spans=(), warnings=("nothing was answered",), notes=(), end=None,
        verdict_sentences=("Nothing was measured.",), verdicts=(),
    )  # fmt: skip
    text = html.render([bare])
    assert not charts(text)
    assert "plotly" not in text
    assert "Nothing was measured." in text
    assert "nothing was answered" in text
    assert "How it was measured" in text
    assert "Padding and buckets" not in text


def test_a_failed_control_is_said_loudly(summary: MakeSummary) -> None:
    run = summary()
    ratios = {**run.comparisons[1].ratios, "p50": Estimate(1.1, 1.05, 1.2)}
    control = dataclasses.replace(run.comparisons[1], ratios=ratios)
    text = body(html.render([dataclasses.replace(run, comparisons=(run.comparisons[0], control))]))
    assert "<strong>A/A failed in p50</strong>" in text


def test_a_percentile_that_the_sample_does_not_support_is_not_printed(summary: MakeSummary) -> None:
    latency = body(html.render([summary()])).partition("Latency in ms")[2]
    row = re.search(r"<tr><th>xla</th>.*?</tr>", latency)
    assert row is not None
    assert '63.75 <span class="bounds">[57.37, –]</span>' in row[0]  # noqa: RUF001
    assert '<td class="number" data-heading="slowest">' in row[0]
    assert "p99.9" not in row[0] or 'data-heading="p99.9">–</td>' in row[0]  # noqa: RUF001


def page_of(name: str) -> tuple[Summary, str]:
    summary = samples.summary(name)
    return summary, html.render([summary])


def test_an_arm_has_one_colour_on_every_chart_that_no_part_of_a_bar_has() -> None:
    seen = set()
    for sample in ("crowded", "both_loops", "mixed"):
        summary, text = page_of(sample)
        colours = arm_colours(summary)
        assert len(set(colours.values())) == len(colours)
        for name, chart in charts(text).items():
            for trace in chart["traces"]:
                drawn_in = trace["line"]["color"] if "line" in trace else trace["marker"]["color"]
                own = trace["meta"] if isinstance(drawn_in, list) else [trace["meta"]]
                for meta, colour in zip(own, drawn_in if isinstance(drawn_in, list) else [drawn_in], strict=True):
                    if meta[0] in colours:
                        assert colour == colours[meta[0]], name
                        seen.add(name)
                    else:
                        assert colour not in COLOURS, name
    assert seen == {
        "throughput", "percentiles", "by-model", "over-time", "closed-loads", "open-loads", "break-even", "buckets",
    }  # fmt: skip


def test_closed_and_open_loops_share_no_axis_and_no_line_goes_back() -> None:
    _, text = page_of("both_loops")
    found = charts(text)
    closed, open_ = found["closed-loads"], found["open-loads"]
    assert closed["layout"]["xaxis"]["title"]["text"] == "images/s answered"
    assert [trace["text"] for trace in closed["traces"]] == [[f"{slots} at a time" for slots in (1, 4, 16, 64)]] * 3
    assert open_["layout"]["xaxis"]["title"]["text"] == "requests/s due"
    assert [trace["x"] for trace in open_["traces"]] == [[20.0, 50.0, 80.0]] * 3


def test_a_line_joins_loads_that_differ_in_one_thing_by_their_longest_runs(
    summary: MakeSummary, point: MakePoint
) -> None:
    def at(rate_per_s: float, requests: int = 100, arm: str = "xla", **more: Any) -> Point:
        load = LoadLine("open", rate_per_s=rate_per_s, arrivals="poisson", **more)
        return dataclasses.replace(
            point(arm, factor=requests / 100), load=load, label=str(rate_per_s), requests=requests
        )

    ramp, stages = at(50, ramp_per_s=(0.0, 100.0)), at(60, stages=((0.0, 60.0, 9.0),))
    run = summary(curve=(at(30), at(10), at(20), at(20, 900), at(10, burst=4), at(20, burst=4), ramp, stages))
    chart = charts(html.render([run]))["open-loads"]
    assert [trace["x"] for trace in chart["traces"]] == [[10, 20, 30], [10, 20]]
    assert [trace["meta"] for trace in chart["traces"]] == [["xla", "poisson"], ["xla", "poisson, 4 at once"]]
    longest = at(20, 900).percentile("p99").value_ms
    assert chart["traces"][0]["y"][1] == pytest.approx(longest)


def test_an_open_loop_tells_no_break_even() -> None:
    assert "break-even" in charts(page_of("both_loops")[1])
    assert "break-even" not in charts(page_of("profiled")[1])


def test_what_a_search_found_comes_first() -> None:
    text = body(page_of("searched")[1])
    assert text.index("The highest rate confirmed") < text.index("Throughput, with")


def test_a_mix_has_a_chart_by_model() -> None:
    summary, text = page_of("mixed")
    chart = charts(text)["by-model"]
    assert [trace["meta"][0] for trace in chart["traces"]] == [arm.name for arm in summary.header.arms]
    assert {row.partition("<br>")[0] for trace in chart["traces"] for row in trace["y"]} == set(
        summary.header.arms[0].models
    )
    model, first = summary.by_model[0]
    assert chart["traces"][0]["customdata"][0] == pytest.approx(
        [first.percentile("p50").value_ms, first.percentile("p99").value_ms], rel=1e-4
    )
    assert f"<h1>{', '.join(summary.header.arms[0].models)}: xla, graph</h1>" in text
    assert f'data-heading="model">{model}</td>' in text


def test_a_mode_has_its_own_colour_whatever_it_is_compared_with() -> None:
    xla, graph = mode_colours(["xla", "graph"])
    assert mode_colours(["graph", "autocluster", "xla"])[::2] == [graph, xla]
    many = mode_colours(["xla", "graph", "xla", "graph", "somebody's"])
    assert many[:2] == [xla, graph]
    assert len(set(many)) == 5


def test_every_mark_and_colour_of_a_chart_is_in_its_legend() -> None:
    text = html.render([samples.summary("troubled")])
    for name, figure in re.findall(r'<figure data-name="([^"]+)">(.*?)</figure>', text, re.DOTALL):
        keys = {html_text.unescape(key) for key in re.findall(r'data-key="([^"]+)"', figure)}
        if name != "throughput":  # there each bar has its name beside it
            assert {one for trace in charts(text)[name]["traces"] for one in trace["meta"]} == keys, name


def test_warnings_and_long_lists_of_verdicts_stand_in_one_place_each() -> None:
    summary = samples.summary("crowded")
    text = body(html.render([dataclasses.replace(summary, warnings=("one", "two"))]))
    assert '<div class="warnings"><strong>2 warnings</strong><p>one</p><p>two</p></div>' in text
    assert "<summary>All 16 comparisons</summary>" in text


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def test_names_from_a_run_are_text_and_never_markup(summary: MakeSummary, point: MakePoint) -> None:
    run = summary(
        verdict_sentences=(HOSTILE,),
        verdicts=(HOSTILE,),
        warnings=(HOSTILE,),
        points=(point(HOSTILE),),
        curve=(),
        prices=(),
    )
    header = dataclasses.replace(run.header, arms=(Arm(HOSTILE, HOSTILE, HOSTILE, HOSTILE),), command=(HOSTILE,))
    text = html.render([dataclasses.replace(run, header=header)])
    clean = html.render([summary()])
    assert "<img" not in text[text.index("<body>") :]
    assert text.count("<script") == clean.count("<script") - 3  # Charts of what this run lacks.
    assert charts(text)["throughput"]["traces"][0]["y"] == [label(short_names([HOSTILE])[HOSTILE])]
    assert "<" not in label(HOSTILE)


def test_several_runs_stand_on_one_page_with_distinct_anchors(summary: MakeSummary) -> None:
    text = body(html.render([summary(), summary()]))
    anchors = re.findall(r' id="([^"]+)"', text)
    assert len(anchors) == len(set(anchors)) > 10
    assert all(f'id="{target}"' in text for target in re.findall(r'href="#([^"]+)"', text))


def test_a_page_asks_for_nothing_from_outside(summary: MakeSummary) -> None:
    text = html.render([summary()])
    head = text[: text.index("<body>")]
    assert "default-src 'none'" in head.replace("&#39;", "'")
    assert not re.findall(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"(?!data:)", text)


def test_elements_escape_text_but_not_each_other() -> None:
    assert tag("p", "a < b", tag("b", "&"), None, class_='"x"') == '<p class="&#34;x&#34;">a &lt; b<b>&amp;</b></p>'
    assert tag("br") == "<br>"
    assert table(Table.of([])) == ""
    assert "<title>&lt;i&gt;</title>" in page("<i>")


def test_data_for_scripts_holds_no_tag_and_no_nan() -> None:
    assert "<" not in data({"x": "</script>"})
    assert json.loads(data({"x": "</script>&"})) == {"x": "</script>&"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        data(float("nan"))
