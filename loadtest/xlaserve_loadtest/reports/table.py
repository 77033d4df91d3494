"""A table of a report, whose cells are values that each format shows in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.analysis.percentiles import AT_LEAST, Percentile
from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.summary import Summary

NOTHING: Final = "\N{EN DASH}"
"""The text of a cell whose value is not known."""


class Number(str):
    """A number that is already formatted."""


class Strong(str):
    """Emphasised text."""


class LowerBound(float):
    """A lower bound of a number that is not known exactly."""


class Ratio(Estimate):
    """A ratio with its interval: shown with three decimals."""


Cell = str | int | float | Estimate | Percentile | None
"""The value of a cell; None where it is not known, a bool for yes or no."""


@dataclass(frozen=True, slots=True)
class Table:
    """A title, and columns of equal length by their headings. A table without rows is not shown."""

    title: str
    columns: Mapping[str, Sequence[Cell]]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Cell]], title: str = "") -> Table:
        """Returns a table of rows, each with its cells by heading.

        Columns without any value are left out, and a load that all rows share moves to the title.
        """
        cells = list(rows)
        columns = {heading: [row.get(heading) for row in cells] for heading in dict.fromkeys(chain(*cells))}
        filled = {heading: column for heading, column in columns.items() if any(cell is not None for cell in column)}
        if len(set(filled.get("load", ()))) == 1:
            title = "; ".join(filter(None, (title, f"load: {filled.pop('load')[0]}")))
        return cls(title, filled)

    def rows(self) -> Iterator[tuple[Cell, ...]]:
        """Yields the cells of each row."""
        return zip(*self.columns.values(), strict=True)

    def numeric(self) -> list[bool]:
        """Returns for each column whether it has numbers, which are aligned at the right."""
        return [
            not any(isinstance(cell, str | bool) and not isinstance(cell, Number) for cell in cells)
            for cells in self.columns.values()
        ]


Rows = Iterator[Mapping[str, Cell]]
"""The rows of a table: cells by heading."""


def titled(title: str) -> Callable[[Callable[[Summary], Rows]], Callable[[Summary], Table]]:
    """Makes a function that yields a run's rows one that returns their table."""
    return lambda rows: lambda summary: Table.of(rows(summary), title)


def place(point: Point) -> dict[str, Cell]:
    """Returns the first cells of a row: the arm and the load that it is about."""
    return {"arm": point.arm, "load": point.label}


def narrow(cell: Cell) -> str:
    """Returns the text of a cell in a narrow table: its only space is before the bounds, so that lines break there."""
    return _text(cell, _aligned, "{} ({}-{})")


def wide(cell: Cell) -> str:
    """Returns the text of a cell in a wide table."""
    return _text(cell, number, "{} [{}, {}]")


def number(value: float | None) -> str:
    """Returns a number with three or four digits; all digits before the point for large numbers."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3g}"


def share(value: float | None) -> Number | None:
    """Returns a share from 0 to 1 as percent."""
    return None if value is None else Number(f"{value:.1%}")


def mebibytes(value: float | None) -> Number | None:
    """Returns a number of bytes as MiB."""
    return None if value is None else Number(f"{value / 2**20:,.0f}")


def ratio(estimate: Estimate | None) -> Ratio | None:
    """Returns an estimate as a ratio."""
    return None if estimate is None else Ratio(estimate.value, estimate.low, estimate.high)


def _text(cell: Cell, number: Callable[[float | None], str], bounded: str) -> str:
    match cell:
        case None:
            return NOTHING
        case bool():
            return "yes" if cell else "no"
        case str():
            return str(cell)
        case int():
            return f"{cell:,}"
        case float():
            return f"{AT_LEAST if isinstance(cell, LowerBound) else ''}{number(cell)}"
        case Estimate(value=value, low=low, high=high):
            form = _ratio if isinstance(cell, Ratio) else number
        case Percentile(value_ms=value, low_ms=low, high_ms=high):
            form = number
    return form(value) if low is None and high is None else bounded.format(form(value), form(low), form(high))


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _aligned(value: float | None) -> str:
    """Returns a number with three or four digits; numbers of one magnitude have equal decimals, so that columns
    align."""
    if value is None:
        return NOTHING
    decimals = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"
