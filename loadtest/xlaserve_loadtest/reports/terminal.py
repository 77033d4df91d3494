"""The report in a terminal."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.tables import Grid, grids

WIDTH: Final = 100
"""Width of the tables, in characters, where the output is not a terminal."""


def show(summary: Summary, console: Console) -> None:
    """Prints a run: the verdict, warnings, the figures, notes on how to read them."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(Text(summary.verdict, "bold"))
    for warning in summary.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    for grid in grids(summary):
        console.print()
        console.print(Text(grid.title, "underline"), soft_wrap=True)
        console.print(_table(grid))
    for note in summary.notes:
        console.print(Text(note, "dim"))


def _table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for place, heading in enumerate(grid.headings):
        is_figure = place >= grid.words and heading not in ("remark", "verdict")
        table.add_column(heading, justify="right" if is_figure else "left")
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
