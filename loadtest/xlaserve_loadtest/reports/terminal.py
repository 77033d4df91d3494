"""The report in a terminal."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.table import Table, narrow
from xlaserve_loadtest.reports.tables import tables

WIDTH: Final = 100
"""Width of the tables, in characters, where the output is not a terminal."""


def show(summary: Summary, console: Console) -> None:
    """Prints a run: the verdict, warnings, the figures, notes on how to read them."""
    widen(console)
    console.print(Text(summary.verdict, "bold"))
    for warning in summary.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    for table in tables(summary):
        show_table(table, console)
    for note in summary.notes:
        console.print(Text(note, "dim"))


def widen(console: Console) -> None:
    """Gives a console that is not a terminal room for tables."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def show_table(table: Table, console: Console) -> None:
    """Prints a table below its title."""
    drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, is_numeric in zip(table.columns, table.numeric(), strict=True):
        drawn.add_column(heading, justify="right" if is_numeric else "left")
    for row in table.rows():
        drawn.add_row(*(Text(narrow(cell)) for cell in row))
    console.print()
    console.print(Text(table.title, "underline"), soft_wrap=True)
    console.print(drawn)
