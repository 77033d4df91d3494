"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as Drawn
from rich.text import Text

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.printable import one_line
from xlaserve_loadtest.reports.table import Table, narrow
from xlaserve_loadtest.reports.tables import first, tables

WIDTH: Final = 100
"""Width of the tables, in characters, where the output is not a terminal."""

MORE: Final = "--details prints intervals, stages, resources and the price of compiling; --html FILE draws them."
_NAMES: Final = ("arm", "load", "model", "mode")
"""Headings of columns that name a row together with the first."""
_GAP: Final = 2
_WORD: Final = 40
"""Characters after which a word is broken."""


def show(summary: Summary, console: Console, *, has_details: bool = False) -> None:
    """Prints a run: the verdict, a row for each arm and load, warnings; with details all figures and notes."""
    widen(console)
    console.print(Text(one_line(summary.verdict), "bold"))
    if not has_details:
        for table in first(summary):
            show_table(table, console)
    for warning in summary.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), one_line(warning)))
    if not has_details:
        if summary.shown_points:
            console.print(Text(MORE, "dim"))
        return
    for table in tables(summary):
        show_table(table, console)
    for note in summary.notes:
        console.print(Text(one_line(note), "dim"))


def widen(console: Console) -> None:
    """Makes a console that is not a terminal wide enough for tables."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)


def show_table(table: Table, console: Console) -> None:
    """Prints a table below its title. A table that is too wide is printed in parts, each with the columns that name
    rows."""
    console.print()
    if table.title:
        console.print(Text(one_line(table.title), "underline"))
    columns = [
        _Column(one_line(heading), is_numeric, [one_line(narrow(cell)) for cell in cells])
        for (heading, cells), is_numeric in zip(table.columns.items(), table.numeric(), strict=True)
    ]
    for part in _parts(columns, console.width):
        drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column, width in zip(part, _widths(part, console.width), strict=True):
            justify: JustifyMethod = "right" if column.is_numeric else "left"
            drawn.add_column(Text(column.heading), justify=justify, width=width, overflow="fold")
        for row in zip(*(column.texts for column in part), strict=True):
            drawn.add_row(*map(Text, row))
        console.print(drawn)


class _Column(NamedTuple):
    """A column, and its widths in characters."""

    heading: str
    is_numeric: bool
    texts: Sequence[str]

    @property
    def least(self) -> int:
        """Its width where texts are broken at every space: a figure has one before its bounds."""
        return min(
            max((cell_len(word) for text in (self.heading, *self.texts) for word in text.split()), default=0), _WORD
        )

    @property
    def whole(self) -> int:
        """Its width where no text is broken."""
        return max(map(cell_len, (self.heading, *self.texts)))


def _parts(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Splits columns into as few parts as fit side by side; each part has the columns that name rows."""
    names = [columns[0], *takewhile(lambda column: column.heading in _NAMES, columns[1:])] if columns else []
    values = columns[len(names) :]
    parts: list[list[_Column]] = []
    for value in values:
        if parts and _room([*parts[-1], value], width) >= 0:
            parts[-1].append(value)
        else:
            parts.append([*names, value])
    size = -(-len(values) // max(1, len(parts)))
    even = [[*names, *values[first : first + size]] for first in range(0, len(values), size)] if values else []
    return even if even and all(_room(part, width) >= 0 for part in even) else parts or [names]


def _room(part: Sequence[_Column], width: int) -> int:
    return width - sum(column.least + _GAP for column in part)


def _widths(part: Sequence[_Column], width: int) -> list[int]:
    """Returns the width of each column. Remaining room goes first to the columns that need the least to be whole."""
    room, widths = max(0, _room(part, width)), [column.least for column in part]
    for place in sorted(range(len(part)), key=lambda place: part[place].whole - part[place].least):
        more = min(part[place].whole - part[place].least, room)
        # A figure is broken at its only space, or not at all.
        if more > 0 and (not part[place].is_numeric or part[place].least + more == part[place].whole):
            widths[place] += more
            room -= more
    return widths
