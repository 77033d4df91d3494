from __future__ import annotations

import json
import re

import pytest
from tests.loadtest.study.conftest import MakeEntry, MakeSweep

from xlaserve_loadtest.study import html as zoo_html
from xlaserve_loadtest.study import zoo
from xlaserve_loadtest.study.record import Sweep


@pytest.fixture
def zoo_sweep(entry: MakeEntry, sweep: MakeSweep) -> Sweep:
    return sweep(
        entry("Middling", 1.01, family="A", rate=300.0),
        entry("Winner", 3.0, family="A", rate=100.0),
        entry("Winner", 2.9, family="A", rate=200.0, batch=8),
        entry("Loser", 0.2, family="B", rate=50.0, resolution=299),
        entry("Broken", None, family="B", rate=40.0, resolution=299),
    )


def test_the_podiums_hold_a_model_once_and_nothing_inconclusive(zoo_sweep: Sweep) -> None:
    throughput, absolute, relative = zoo.podiums(zoo.rows(zoo_sweep), "graph")
    assert [(row.label, row.mode) for row, _ in throughput.places] == [
        ("Winner 224 b8", "xla"),
        ("Loser 299 b4", "graph"),
        ("Broken 299 b4", "graph"),
    ]
    best, gain = absolute.places[0]
    assert best.label == "Winner 224 b8"
    assert gain == pytest.approx(380)
    assert [row.entry.name for row, _ in relative.places] == ["Winner"]
    assert {row.mode for row, _ in (*absolute.places, *relative.places)} == {"xla"}


def test_nothing_is_left_out_of_the_ranking(zoo_sweep: Sweep) -> None:
    rows = zoo.rows(zoo_sweep)
    ranked = [row.label for row in zoo.by_speed_up(rows, "xla")]
    assert ranked == ["Winner 224 b4", "Winner 224 b8", "Middling 224 b4", "Loser 299 b4"]
    assert [row.label for row in zoo.without_ratio(rows, "xla")] == ["Broken 299 b4"]


def test_groups_compare_modes_only_over_what_ran_in_all_of_them(zoo_sweep: Sweep) -> None:
    a, b = zoo.by_family(zoo_sweep)
    assert (a.name, a.cells, b.name, b.cells) == ("A", 3, "B", 1)
    assert a.images_per_s["graph"] == pytest.approx((300 * 100 * 200) ** (1 / 3))
    assert b.images_per_s == pytest.approx({"xla": 10.0, "graph": 50.0})
    assert b.best is not None
    assert b.best.mode == "graph"
    assert [group.name for group in zoo.by_resolution(zoo_sweep)] == ["224", "299"]


def test_a_group_in_which_nothing_ran_has_no_mean(entry: MakeEntry, sweep: MakeSweep) -> None:
    (group,) = zoo.by_family(sweep(entry("Broken", None)))
    assert group.images_per_s == {}
    assert group.cells == 0


def test_the_verdict_counts_every_cell(zoo_sweep: Sweep) -> None:
    assert zoo_html.verdict(zoo.rows(zoo_sweep), ["xla"], "graph") == (
        "xla is faster than graph in 2 of 4 cells, slower in 1, undecided in 1; 1 could not be compared."
    )


def test_the_report_shows_every_model_slowdowns_and_failures_included(zoo_sweep: Sweep) -> None:
    text = zoo_html.render(zoo_sweep)
    source = re.search(r'data-name="speed-ups-xla">.*?class="chart">(.*?)</script>', text, re.DOTALL)
    assert source
    chart = json.loads(source[1])
    assert chart["layout"]["yaxis"]["categoryarray"] == [
        "Winner 224 b4",
        "Winner 224 b8",
        "Middling 224 b4",
        "Loser 299 b4",
    ]
    bars = {row: gain for trace in chart["traces"] for row, gain in zip(trace["y"], trace["x"], strict=True)}
    assert [bars[row] for row in chart["layout"]["yaxis"]["categoryarray"]] == pytest.approx([2.0, 1.9, 0.01, -0.8])
    assert [trace["meta"] for trace in chart["traces"]] == [["faster"], ["slower"], ["undecided"]]
    assert "Broken can&#39;t be compiled" in text
    assert "Without a ratio, as one of the two modes did not run: Broken 299 b4." in text
    assert 'data-name="by-family"' in text
    assert 'data-name="by-resolution"' in text


def test_published_figures_stand_beside_ours_with_their_caveat(entry: MakeEntry, sweep: MakeSweep) -> None:
    text = zoo_html.render(sweep(entry("NASNetMobile", 2.0), entry("NASNetMobile", 2.0, batch=8)))
    row = re.search(r"<tr><th>NASNetMobile 224 b4</th><td[^>]*>200</td>(.*?)</tr>", text)
    assert row
    assert "433.5" in row[1]
    assert "44.69" in row[1]
    assert "ran eagerly" in text


def test_a_sweep_without_figures_still_has_a_report(entry: MakeEntry, sweep: MakeSweep) -> None:
    assert "Nothing was compared" in zoo_html.render(sweep())
    assert "could not be compared" in zoo_html.render(sweep(entry("Broken", None)))


def test_the_outcomes_have_a_row_for_each_mode_of_each_cell(zoo_sweep: Sweep) -> None:
    rows = list(zoo_html.outcomes(zoo_sweep).rows())
    assert len(rows) == 10
    assert any(row[0] == "Broken 299 b4" and "can't be compiled" in str(row[-1]) for row in rows)
