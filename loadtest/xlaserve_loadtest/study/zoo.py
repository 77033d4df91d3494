"""Results of a sweep: podiums, families, resolutions, and the models by what XLA gains. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Final

from xlaserve_loadtest.study.record import Entry, ModeResult, Sweep

PODIUM: Final = 3


@dataclass(frozen=True)
class Row:
    """One mode of a cell."""

    entry: Entry
    mode: str
    result: ModeResult
    baseline_images_per_s: float | None

    @property
    def label(self) -> str:
        """The model, its resolution and its batch."""
        cell = self.entry.cell
        size = "" if cell.resolution is None else f" {cell.resolution}"
        return f"{self.entry.name}{size} b{cell.batch}"

    @property
    def is_undecided(self) -> bool:
        """Whether any verdict of the cell is inconclusive."""
        return any(result.verdict == "inconclusive" for result in self.entry.results.values())

    @property
    def gain_images_per_s(self) -> float | None:
        """Images/s more than the baseline's; negative where it is slower."""
        if self.result.images_per_s is None or self.baseline_images_per_s is None:
            return None
        return self.result.images_per_s - self.baseline_images_per_s


@dataclass(frozen=True)
class Podium:
    """The best rows by one measure."""

    title: str
    unit: str
    """Heading of the column of the measure; empty where every podium has that column already."""
    places: tuple[tuple[Row, float], ...]
    """Rows and their measures, the best first; one for each model at most, so that a model with many cells fills only
    one."""


@dataclass(frozen=True)
class Group:
    """Cells of one family or one resolution."""

    name: str
    images_per_s: Mapping[str, float]
    """Geometric mean of images/s by mode, over cells that ran in every mode, so that the group's modes can be
    compared."""
    cells: int
    """Number of cells that ran in every mode."""
    best: Row | None


def rows(sweep: Sweep) -> list[Row]:
    """Returns a row for each mode of each cell, in the order in which they were measured."""
    return [
        Row(entry, mode, result, _rate(entry, sweep.baseline))
        for entry in sweep.entries.values()
        for mode, result in entry.results.items()
    ]


def podiums(of: Iterable[Row], baseline: str) -> tuple[Podium, ...]:
    """Returns the three podiums: throughput, absolute gain and relative gain over the baseline.

    They have only conclusive results: gains of modes whose verdict is `faster`, and throughput of cells with a
    conclusive verdict on each mode that was compared.
    """
    ran = [row for row in of if not row.is_undecided]
    faster = [row for row in ran if row.mode != baseline and row.result.verdict == "faster"]
    return (
        _podium("Throughput", "", ran, lambda row: row.result.images_per_s),
        _podium("Absolute gain", "images/s more", faster, lambda row: row.gain_images_per_s),
        _podium("Relative gain", "", faster, lambda row: row.result.ratio),
    )


def by_speed_up(of: Iterable[Row], mode: str) -> list[Row]:
    """Returns every row of `mode` that has a ratio, slowdowns included, the greatest ratio first."""
    return sorted(
        (row for row in of if row.mode == mode and row.result.ratio is not None),
        key=lambda row: row.result.ratio or 0.0,
        reverse=True,
    )


def without_ratio(of: Iterable[Row], mode: str) -> list[Row]:
    """Returns every row of `mode` without a ratio, where it or its baseline failed."""
    return [row for row in of if row.mode == mode and row.result.ratio is None]


def by_family(sweep: Sweep) -> list[Group]:
    """Returns a group for each family, the fastest first."""
    groups = _groups(sweep, lambda entry: entry.family)
    return sorted(groups, key=lambda group: -max(group.images_per_s.values(), default=0.0))


def by_resolution(sweep: Sweep) -> list[Group]:
    """Returns a group for each resolution, the least first."""
    groups = _groups(sweep, lambda entry: entry.cell.resolution or 0)
    return sorted(groups, key=lambda group: int(group.name))


def _groups(sweep: Sweep, key: Callable[[Entry], Hashable]) -> list[Group]:
    members: defaultdict[Hashable, list[Entry]] = defaultdict(list)
    for entry in sweep.entries.values():
        members[key(entry)].append(entry)
    every = rows(sweep)
    groups = []
    for name, entries in members.items():
        modes = list(dict.fromkeys(mode for entry in entries for mode in entry.results))
        whole = [entry for entry in entries if all(_rate(entry, mode) for mode in modes)]
        ran = [row for row in every if row.entry in entries and row.result.images_per_s]
        groups.append(
            Group(
                str(name),
                {mode: geometric_mean([_rate(entry, mode) or 0.0 for entry in whole]) for mode in modes if whole},
                len(whole),
                max(ran, key=lambda row: row.result.images_per_s or 0.0, default=None),
            )
        )
    return groups


def _podium(title: str, unit: str, of: Iterable[Row], value: Callable[[Row], float | None]) -> Podium:
    ranked = sorted(
        ((row, measured) for row in of if (measured := value(row)) is not None), key=lambda pair: pair[1], reverse=True
    )
    best: dict[str, tuple[Row, float]] = {}
    for row, measured in ranked:
        best.setdefault(row.entry.name, (row, measured))
    return Podium(title, unit, tuple(best.values())[:PODIUM])


def _rate(entry: Entry, mode: str) -> float | None:
    result = entry.results.get(mode)
    return result.images_per_s if result else None
