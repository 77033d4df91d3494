from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.loadtest.reports.pages.samples import SAMPLES

from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.reports.table import Table, narrow
from xlaserve_loadtest.reports.tables import tables
from xlaserve_loadtest.reports.terminal import show, show_table


def terminal(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=True, color_system=None), file


@pytest.mark.parametrize("name", SAMPLES)
def test_every_figure_is_whole_in_a_terminal_of_any_width(name: str, tmp_path: Path) -> None:
    summary = summarize(read_run(SAMPLES[name](tmp_path / "a.run.jsonl.gz")))
    for width in (80, 100, 160):
        console, file = terminal(width)
        show(summary, console)
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        shown = set(file.getvalue().split())
        for table in tables(summary):
            cells = [*table.columns, *(narrow(cell) for row in table.rows() for cell in row)]
            assert {word for cell in cells for word in cell.split()} <= shown, table.title


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
