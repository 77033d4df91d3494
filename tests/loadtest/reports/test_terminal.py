from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.loadtest.reports.pages import samples
from tests.loadtest.run_files import ENVIRONMENT
from tests.loadtest.study.conftest import make_entry, make_sweep

from xlaserve_loadtest.analysis.changes import changes, differences
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.reports import compare_cli
from xlaserve_loadtest.reports.table import NOTHING, Table, narrow
from xlaserve_loadtest.reports.tables import first, overview, tables
from xlaserve_loadtest.reports.terminal import show, show_table
from xlaserve_loadtest.study import html as zoo_html

WIDTHS = (60, 80, 100, 160)
CELLS = {"EfficientNetV2B0": 1.2, "InceptionResNetV2": 0.8, "MobileNetV3Large": 1.01, "NASNetLarge": None}


def terminal(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=True, color_system=None), file


def all_there(text: str, width: int, *shown: Table) -> None:
    """Asserts that no line is longer than the terminal, and that no word of a table is cut."""
    assert max(map(cell_len, text.splitlines())) <= width
    words = set(text.split())
    for table in shown:
        cells = [*table.columns, *(narrow(cell) for row in table.rows() for cell in row)]
        assert {word for cell in cells for word in cell.split()} <= words, table.title


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [name for name in samples.SAMPLES if name != "hostile"])
def test_every_figure_of_a_run_is_whole_in_a_terminal_of_any_width(name: str, width: int) -> None:
    summary = samples.summary(name)
    for has_details, shown in ((False, first(summary)), (True, tables(summary))):
        console, file = terminal(width)
        show(summary, console, has_details=has_details)
        all_there(file.getvalue(), width, *shown)


def test_a_run_is_a_sentence_and_a_row_for_each_arm() -> None:
    console, file = terminal(100)
    show(samples.summary("compared"), console)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("xla is faster than graph")
    rows = [line.split() for line in lines if line.startswith((" xla", " graph", " autocluster"))]
    assert rows == [
        ["xla", "120.5", "130.0", "208.6", *["1.34", "times", "graph", "(1.31", "to", "1.37),", "p50", "0.75"]],
        ["graph", "90.1", "173.1", "275.5", NOTHING],
        ["graph", "(again)", "87.9", "177.9", "288.1", "A/A", "passed"],
        ["autocluster", "57.0", "274.2", "430.0", *["0.63", "times", "graph", "(0.61", "to", "0.66),", "p50", "1.58"]],
    ]
    assert lines[-1].startswith("--details")
    assert len(lines) < 16


def test_a_run_of_one_arm_under_one_load_is_a_sentence() -> None:
    console, file = terminal(100)
    show(samples.summary("alone"), console)
    assert len(file.getvalue().splitlines()) == 2


def test_a_ratio_without_a_verdict_says_so() -> None:
    (row,) = [row for row in overview(samples.summary("starved")).rows() if row[0] == "xla"]
    assert str(row[-1]).endswith("1.41), p50 0.73, inconclusive")


def test_a_comparison_of_an_open_loop_is_of_its_latency() -> None:
    rows = [row for row in overview(samples.summary("mixed")).rows() if row[:2] == ("xla", "50/s poisson")]
    assert rows[0][-1] == "p50 0.73 times graph (0.72 to 0.74)"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_of_a_comparison_is_whole_in_a_terminal_of_any_width(width: int, tmp_path: Path) -> None:
    for name in ("both_loops", "crowded"):
        run = read_run(samples.SAMPLES[name](tmp_path / f"{name}.run.jsonl.gz"))
        other = dataclasses.replace(run, header=dataclasses.replace(run.header, seed=1, environment=ENVIRONMENT))
        apart = differences(run, other)
        compared = changes(run, other, apart)
        console, file = terminal(width)
        compare_cli.show(compared, apart, console)
        all_there(file.getvalue(), width, compare_cli.figures(compared))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_cell_of_a_sweep_is_whole_in_a_terminal_of_any_width(width: int) -> None:
    outcomes = zoo_html.outcomes(make_sweep(*(make_entry(name, ratio) for name, ratio in CELLS.items())))
    console, file = terminal(width)
    show_table(outcomes, console)
    all_there(file.getvalue(), width, outcomes)


def test_a_table_stands_in_one_piece_and_unbroken_where_there_is_room() -> None:
    table = Table.of([{"arm": "efficientnetv2b0 xla", "p50": 1.5, "p99": 2.5}], "Latency")
    console, file = terminal(40)
    show_table(table, console)
    assert [line.split() for line in file.getvalue().splitlines() if "xla" in line] == [
        ["efficientnetv2b0", "xla", "1.50", "2.50"]
    ]


def test_a_table_that_is_too_wide_comes_in_parts_with_the_names_in_each() -> None:
    table = Table.of([{"arm": "xla", **{f"a column {place}": "x" * 30 for place in range(3)}}], "Wide")
    console, file = terminal(80)
    show_table(table, console)
    assert [line.split() for line in file.getvalue().splitlines() if "x" in line] == [
        ["xla", "x" * 30, "x" * 30],
        ["xla", "x" * 30],
    ]


def test_a_row_of_ratios_keeps_its_load_in_every_part() -> None:
    console, file = terminal(60)
    rows = [{"arm / graph": "xla", "load": load, "p50": "x" * 30, "p99": "y" * 30} for load in ("one", "two")]
    show_table(Table.of(rows, "Ratios"), console)
    lines = [line.split() for line in file.getvalue().splitlines() if "xla" in line]
    assert lines == [["xla", load, mark * 30] for mark in "xy" for load in ("one", "two")]
