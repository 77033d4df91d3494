"""The report of a sweep: one HTML file, and a table of its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xlaserve_loadtest.analysis.intervals import Estimate
from xlaserve_loadtest.reports.markup import Child, facts, join, page, table, tag
from xlaserve_loadtest.reports.table import Cell, Number, Ratio, Table, number
from xlaserve_loadtest.study import catalog, zoo
from xlaserve_loadtest.study import charts as zoo_charts
from xlaserve_loadtest.study.record import ModeResult, Sweep
from xlaserve_loadtest.study.zoo import Group, Podium, Row


def render(sweep: Sweep) -> str:
    """Returns the page."""
    rows = zoo.rows(sweep)
    modes = [mode for mode in dict.fromkeys(row.mode for row in rows) if mode != sweep.baseline]
    sections: list[tuple[str, list[Child]]] = [
        ("Podiums", [_podium(podium) for podium in zoo.podiums(rows, sweep.baseline)]),
        ("Every model", [_speed_ups(rows, mode, sweep.baseline) for mode in modes]),
        ("By family", _groups(zoo.by_family(sweep), "by-family", "Throughput by family", "family")),
        ("By resolution", _groups(zoo.by_resolution(sweep), "by-resolution", "Throughput by resolution", "resolution")),
        ("What did not run", _failures(rows)),
        ("Published figures", _published(sweep, rows)),
        ("All figures", [table(_figures(rows))]),
        ("How it was measured", _setting(sweep)),
    ]
    told = [(name.lower().replace(" ", "-"), name, body) for name, body in sections if any(body)]
    return page(
        "loadtest: sweep",
        tag("h1", f"What {' and '.join(modes) or sweep.baseline} is worth, model by model"),
        tag("p", f"{sweep.started_at} · {_machine(sweep)} · {len(sweep.entries)} cells", class_="soft"),
        tag("div", tag("p", verdict(rows, modes, sweep.baseline), class_="words"), class_="verdict"),
        tag("nav", [tag("a", name, href=f"#s-{anchor}") for anchor, name, _ in told]),
        [tag("section", tag("h2", name), body, id=f"s-{anchor}") for anchor, name, body in told],
    )


def verdict(rows: Sequence[Row], modes: Iterable[str], baseline: str) -> str:
    """Returns the outcome in words: how many cells are faster, slower, undecided, and how many have no ratio."""
    sentences = []
    for mode in modes:
        verdicts = [row.result.verdict for row in zoo.by_speed_up(rows, mode)]
        faster, slower = verdicts.count("faster"), verdicts.count("slower")
        rest, missing = len(verdicts) - faster - slower, len(zoo.without_ratio(rows, mode))
        sentences.append(
            f"{mode} is faster than {baseline} in {faster} of {len(verdicts)} cells, slower in {slower}, undecided in "
            f"{rest}" + (f"; {missing} could not be compared." if missing else ".")
        )
    return " ".join(sentences) or "Nothing was compared."


def outcomes(sweep: Sweep) -> Table:
    """Returns the outcome of every cell: a row for each model, resolution, batch and mode."""
    return Table.of(
        (
            {
                "model": row.label,
                "mode": row.mode,
                **_rate_and_ratio(row.result),
                "verdict": row.result.reason or row.result.verdict or "",
            }
            for row in zoo.rows(sweep)
        ),
        "Every cell",
    )


def _podium(podium: Podium) -> Child:
    if not podium.places:
        return None
    places = Table.of(
        {
            "": str(place),
            "model": row.label,
            "mode": row.mode,
            **({podium.unit: value} if podium.unit else {}),
            **_rate_and_ratio(row.result),
        }
        for place, (row, value) in enumerate(podium.places, start=1)
    )
    return join([tag("h3", podium.title), table(places)])


def _speed_ups(rows: Sequence[Row], mode: str, baseline: str) -> Child:
    ranked, missing = zoo.by_speed_up(rows, mode), zoo.without_ratio(rows, mode)
    names = ", ".join(row.label for row in missing)
    return join(
        [
            zoo_charts.speed_ups(ranked, mode, baseline),
            names and tag("p", f"Without a ratio, as one of the two modes did not run: {names}.", class_="soft"),
        ]
    )


def _groups(groups: Sequence[Group], name: str, title: str, what: str) -> list[Child]:
    told = [group for group in groups if group.images_per_s]
    best = Table.of(
        {
            what: group.name,
            "cells": group.cells,
            "fastest": f"{group.best.label} ({group.best.mode})",
            "images/s": _rate_and_ratio(group.best.result)["images/s"],
        }
        for group in groups
        if group.best
    )
    return [zoo_charts.groups(told, name=name, title=title, what=what), table(best)]


def _failures(rows: Sequence[Row]) -> list[Child]:
    failed = [row for row in rows if row.result.reason is not None]
    cells = ({"model": row.label, "mode": row.mode, "reason": row.result.reason} for row in failed)
    return [table(Table.of(cells))]


def _published(sweep: Sweep, rows: Sequence[Row]) -> list[Child]:
    figures = catalog.published(list(sweep.environment.get("gpus", ())))
    if not figures:
        return []
    compared: list[dict[str, Cell]] = []
    for row in rows:
        cell = row.entry.cell
        theirs = figures.get((row.entry.name, cell.resolution or 0))
        if theirs is None or row.mode != "xla" or cell.batch != catalog.PUBLISHED_BATCH:
            continue
        eager = row.entry.results.get("eager")
        rate, over = row.result.images_per_s, eager and eager.images_per_s
        low, high = theirs.images_per_s or (None, None)
        compared.append(
            {
                "model": row.label,
                "ours, images/s": _rate_and_ratio(row.result)["images/s"],
                "published, images/s": Number(number(high) if low == high else f"{number(low)} to {number(high)}"),
                "ours / eager": rate / over if rate and over else None,
                "published / eager": theirs.ratio_to_eager,
            }
        )
    if not compared:
        told = f"Figures were published for this device, but only for batches of {catalog.PUBLISHED_BATCH} under XLA."
        return [tag("p", told)]
    how = (
        "Published by the Keras XLA benchmark project for the same device, batches of 4 images. Theirs are means over "
        "100 calls without a server and without a spread, and their arm without XLA ran eagerly: their speed-ups "
        "answer another question than the ratios to graph mode on this page."
    )
    return [table(Table.of(compared)), tag("p", how, class_="soft")]


def _figures(rows: Sequence[Row]) -> Table:
    return Table.of(
        {
            "model": row.label,
            "family": row.entry.family,
            "mode": row.mode,
            **_rate_and_ratio(row.result),
            "verdict": ": ".join(filter(None, (row.result.verdict, row.result.verdict_reason))) or None,
            "p50, ms": row.result.p50_ms,
            "p99, ms": row.result.p99_ms,
            "trace, s": row.result.trace_s,
            "compile, s": row.result.compile_s,
            "outputs agree": row.result.outputs_agree,
        }
        for row in rows
        if row.result.reason is None
    )


def _setting(sweep: Sweep) -> list[Child]:
    packages = dict(sweep.environment.get("packages", {}))
    flags = dict(sweep.environment.get("flags", {}))
    how = (
        "Each cell is a load test of its own, in fresh processes, its modes interleaved in blocks; weights are random, "
        "which changes answers but not speed. The run files of all cells lie in the folder runs next to this page's "
        "state file: loadtest report shows any of them in full."
    )
    return [
        tag("p", how),
        facts(
            [
                ("Machine", _machine(sweep)),
                ("System", str(sweep.environment.get("system", ""))),
                ("Packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
                ("Flags", ", ".join(f"{name}={value}" for name, value in flags.items())),
                *((name, str(value)) for name, value in sweep.options.items()),
            ]
        ),
    ]


def _machine(sweep: Sweep) -> str:
    machine = sweep.environment
    return ", ".join([*machine.get("gpus", ()), f"{machine.get('cpu')} ({machine.get('cores')} cores)"])


def _rate_and_ratio(result: ModeResult) -> dict[str, Cell]:
    rate, ratio = result.images_per_s, result.ratio
    return {
        "images/s": None if rate is None else Estimate(rate, *(result.images_per_s_interval or (None, None))),
        "ratio": None if ratio is None else Ratio(ratio, *(result.ratio_interval or (None, None))),
    }
