from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from tests.loadtest.reports.pages.conftest import MakePoint, MakeSummary

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.record.lines import Arm
from xlaserve_loadtest.reports import html
from xlaserve_loadtest.reports.chart import label
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
    assert text.index("xla is faster than graph: 1.17 times") < text.index("Warning: ") < text.index("<table>")
    assert 'class="verdict faster"' in text
    assert "1.170 [1.140, 1.200]" in text


def test_every_section_of_a_full_run_has_its_chart(summary: MakeSummary) -> None:
    names = ["throughput", "percentiles", "over-time", "load-curve", "stages", "break-even", "ledger", "buckets"]
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
        verdict="Nothing was measured.", verdicts=(),
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
    row = re.search(r"<tr><th>xla</th>(<td class=\"number\">[^<]*</td>)+</tr>", latency)
    assert row is not None
    assert "63.75 [57.37, –]" in row[0]  # noqa: RUF001
    assert '<td class="number">–</td>' in row[0]  # noqa: RUF001


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def test_names_from_a_run_are_text_and_never_markup(summary: MakeSummary, point: MakePoint) -> None:
    run = summary(
        verdict=HOSTILE, verdicts=(HOSTILE,), warnings=(HOSTILE,), points=(point(HOSTILE),), curve=(), prices=()
    )
    header = dataclasses.replace(run.header, arms=(Arm(HOSTILE, HOSTILE, HOSTILE, HOSTILE),), command=(HOSTILE,))
    text = html.render([dataclasses.replace(run, header=header)])
    clean = html.render([summary()])
    assert "<img" not in text[text.index("<body>") :]
    assert text.count("<script") == clean.count("<script") - 3  # Charts of what this run lacks.
    assert charts(text)["throughput"]["traces"][0]["y"] == [label(HOSTILE)]
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
