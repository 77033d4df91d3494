"""The report of a sweep: one HTML file, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xlaserve_loadtest.analysis.figures import NOTHING, estimate, number
from xlaserve_loadtest.analysis.statistics import Estimate
from xlaserve_loadtest.reports import markup
from xlaserve_loadtest.reports.markup import Child, Markup, facts, join, page, tag
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
        ("What did not run", _failures(zoo.failures(rows))),
        ("Published figures", _published(sweep, rows)),
        ("All figures", [_figures(rows)]),
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


def table(sweep: Sweep) -> str:
    """Returns every cell as text, a line for each model, resolution, batch and mode."""
    rows = zoo.rows(sweep)
    width = max((len(row.label) for row in rows), default=5)
    lines = [f"{'model':<{width}}  {'mode':<11}  {'images/s':>9}  {'/ ' + sweep.baseline:>9}  verdict"]
    for row in rows:
        found = row.result
        ratio = NOTHING if found.ratio is None else f"{found.ratio:.2f}"
        said = found.reason or found.verdict or ""
        lines.append(
            f"{row.label:<{width}}  {row.mode:<11}  {number(found.images_per_s):>9}  {ratio:>9}  {said}".rstrip()
        )
    return "\n".join(lines)


def _podium(podium: Podium) -> Child:
    if not podium.places:
        return None
    rows = [
        (str(place), row.label, row.mode, f"{number(value)} {podium.unit}", _rate(row.result), _ratio(row.result))
        for place, (row, value) in enumerate(podium.places, start=1)
    ]
    columns = ("", "model", "mode", podium.title.lower(), "images/s", "ratio")
    return join([tag("h3", podium.title), markup.table(columns, rows, numbers=(3, 4, 5))])


def _speed_ups(rows: Sequence[Row], mode: str, baseline: str) -> Child:
    ranked, missing = zoo.by_speed_up(rows, mode), zoo.without_ratio(rows, mode)
    names = ", ".join(row.label for row in missing)
    return join(
        [
            zoo_charts.speed_ups(ranked, mode, baseline).render() if ranked else None,
            tag("p", f"Without a ratio, as one of the two modes did not run: {names}.", class_="soft")
            if names
            else None,
        ]
    )


def _groups(groups: Sequence[Group], name: str, title: str, what: str) -> list[Child]:
    told = [group for group in groups if group.images_per_s]
    rows = [
        (
            group.name,
            str(group.cells),
            f"{group.best.label} ({group.best.mode})",
            _rate(group.best.result),
        )
        for group in groups
        if group.best is not None
    ]
    return [
        zoo_charts.groups(told, name=name, title=title, what=what).render() if told else None,
        markup.table((what, "cells", "fastest", "images/s"), rows, numbers=(1, 3)),
    ]


def _failures(rows: Sequence[Row]) -> list[Child]:
    return [markup.table(("model", "mode", "reason"), [(row.label, row.mode, row.result.reason) for row in rows])]


def _published(sweep: Sweep, rows: Sequence[Row]) -> list[Child]:
    figures = catalog.published(list(sweep.environment.get("gpus", ())))
    if not figures:
        return []
    eager = {
        (row.name, row.resolution): row.result.images_per_s
        for row in rows
        if row.mode == "eager" and row.batch == catalog.PUBLISHED_BATCH
    }
    compared = []
    for row in rows:
        theirs = figures.get((row.name, row.resolution or 0))
        if theirs is None or row.mode != "xla" or row.batch != catalog.PUBLISHED_BATCH:
            continue
        rate, over = row.result.images_per_s, eager.get((row.name, row.resolution))
        low, high = theirs.images_per_s or (None, None)
        compared.append(
            (
                row.label,
                _rate(row.result),
                number(high) if low == high else f"{number(low)} to {number(high)}",
                number(rate / over) if rate and over else NOTHING,
                number(theirs.ratio_to_eager),
            )
        )
    if not compared:
        told = f"Figures were published for this device, but only for batches of {catalog.PUBLISHED_BATCH} under XLA."
        return [tag("p", told)]
    columns = ("model", "ours, images/s", "published, images/s", "ours / eager", "published / eager")
    how = (
        "Published by the Keras XLA benchmark project for the same device, batches of 4 images. Theirs are means over "
        "100 calls without a server and without a spread, and their arm without XLA ran eagerly: their speed-ups "
        "answer another question than the ratios to graph mode on this page."
    )
    return [markup.table(columns, compared, numbers=(1, 2, 3, 4)), tag("p", how, class_="soft")]


def _figures(rows: Sequence[Row]) -> Markup:
    cells = [
        (
            row.label,
            row.family,
            row.mode,
            _rate(row.result),
            _ratio(row.result),
            ": ".join(filter(None, (row.result.verdict, row.result.verdict_reason))) or NOTHING,
            number(row.result.p50_ms),
            number(row.result.p99_ms),
            number(row.result.trace_s),
            number(row.result.compile_s),
            {True: "yes", False: tag("strong", "no"), None: NOTHING}[row.result.outputs_agree],
        )
        for row in rows
        if row.result.reason is None
    ]
    columns = (
        *("model", "family", "mode", "images/s", "ratio", "verdict", "p50, ms", "p99, ms", "trace, s", "compile, s"),
        "outputs agree",
    )
    return markup.table(columns, cells, numbers=(3, 4, 6, 7, 8, 9))


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


def _rate(result: ModeResult) -> str:
    return _with_interval(result.images_per_s, result.images_per_s_interval, ",.4g")


def _ratio(result: ModeResult) -> str:
    return _with_interval(result.ratio, result.ratio_interval, ".3f")


def _with_interval(value: float | None, interval: tuple[float, float] | None, form: str) -> str:
    low, high = interval or (None, None)
    return estimate(None if value is None else Estimate(value, low, high), form)
