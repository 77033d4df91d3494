"""The sections of the HTML report, each from a run's summary; a section without data is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from xlaserve_loadtest.analysis.points import Point
from xlaserve_loadtest.analysis.scenario import slo_of
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports import charts, tables
from xlaserve_loadtest.reports.chart import MUTED
from xlaserve_loadtest.reports.charts import Bar, Curve, Mark, Series
from xlaserve_loadtest.reports.markup import Child, facts, table, tag


def throughput(summary: Summary) -> list[Child]:
    """Returns images/s by arm."""
    names, hues = _names(summary), _hues(summary)
    bars = [
        Bar(names[id(point)], rate.value, rate.low, rate.high, hues[point.arm])
        for point in summary.points
        if (rate := point.images_per_s) is not None
    ]
    return [charts.throughput(bars).render() if bars else None, table(tables.throughput(summary))]


def latency(summary: Summary) -> list[Child]:
    """Returns percentiles, and latency over the run."""
    names, hues, styles = _names(summary), _hues(summary), _styles(summary)
    curves = [
        Curve(
            names[id(point)],
            [value.percentile for value in point.curve],
            [value.latency_ms for value in point.curve],
            hues[point.arm],
            styles[id(point)],
        )
        for point in summary.points
        if point.curve
    ]
    series = [
        Series(
            names[id(point)],
            [part.at_s for part in point.over_time],
            [part.p50_ms for part in point.over_time],
            [part.max_ms for part in point.over_time],
            hues[point.arm],
        )
        for point in summary.points
        if point.over_time
    ]
    marks = [Mark(event.at_s, event.what, event.text) for event in summary.events]
    return [
        table(tables.latency(summary)),
        charts.percentiles(curves).render() if curves else None,
        charts.over_time(series, marks).render() if series else None,
    ]


def load(summary: Summary) -> list[Child]:
    """Returns the effect of load: the curve, highest rates, scenarios."""
    hues = _hues(summary)
    slo = slo_of(summary.header)
    named, limit_ms = (slo.metric, slo.limit) if slo and slo.percentile else ("p99", None)
    curves = []
    for arm, hue in hues.items():
        pairs = sorted(
            (point.images_per_s.value, value)
            for point in summary.curve
            if point.arm == arm and point.images_per_s and (value := _value_ms(point, named)) is not None
        )
        if len(pairs) > 1:
            rates, latencies = zip(*pairs, strict=True)
            curves.append(Curve(arm, rates, latencies, hue, hue))
    return [
        table(tables.highest_rates(summary)),
        table(tables.scenario(summary)),
        charts.load_curve(curves, named, limit_ms).render() if curves else None,
    ]


def where(summary: Summary) -> list[Child]:
    """Returns stages of a request, and what the server used."""
    names = _names(summary)
    reported = [point for point in summary.points if point.stages]
    spent: dict[str, Sequence[float]] = {
        stage: [sum(part.mean_ms for part in point.stages if part.name == stage) for point in reported]
        for stage in dict.fromkeys(part.name for point in reported for part in point.stages)
    }
    return [
        charts.stages([names[id(point)] for point in reported], spent).render() if reported else None,
        table(tables.use(summary)),
    ]


def price(summary: Summary) -> list[Child]:
    """Returns the ledger and the break-even."""
    programs = [(price.arm, program) for price in summary.prices for program in price.programs]
    if not programs:
        return []
    labels = [f"{arm} {'x'.join(map(str, program.bucket))}" for arm, program in programs]
    return [
        table(tables.prices(summary)),
        _break_even(summary),
        charts.ledger(
            labels, [each.trace_s for _, each in programs], [each.compile_s for _, each in programs]
        ).render(),
        tag("details", tag("summary", f"All {len(programs)} programs"), table(tables.programs(summary))),
    ]


def _break_even(summary: Summary) -> Markup | None:
    best: dict[str, float] = {}
    for point in summary.points:
        if point.images_per_s is not None and point.images_per_s.value > 0:
            best[point.arm] = max(best.get(point.arm, 0.0), point.images_per_s.value)
    arms = [
        (price.arm, price.trace_s + price.compile_s, best[price.arm]) for price in summary.prices if price.arm in best
    ]
    crossings = [
        price.break_even_images
        for price in summary.prices
        if price.break_even_images and math.isfinite(price.break_even_images)
    ]
    return charts.break_even(arms, max(crossings, default=None)).render() if len(arms) > 1 else None


def padding(summary: Summary) -> list[Child]:
    """Returns buckets and padding."""
    names = _names(summary)
    reported = [(names[id(point)], point.padding) for point in summary.points if point.padding is not None]
    if not reported:
        return []
    buckets = sorted({name for _, padding in reported for name in padding.batches_by_bucket}, key=_by_size)
    batches = [[padding.batches_by_bucket.get(name, 0) for name in buckets] for _, padding in reported]
    return [
        charts.buckets([name for name, _ in reported], buckets, batches).render() if buckets else None,
        table(tables.padding(summary)),
    ]


def soundness(summary: Summary) -> list[Child]:
    """Returns equality of outputs, the load generator's health, failures."""
    failed = table(tables.failures(summary))
    return [
        table(tables.equality(summary)),
        table(tables.generator(summary)),
        failed or tag("p", "No request failed."),
        [tag("p", note, class_="soft") for note in summary.notes],
    ]


def setting(summary: Summary) -> list[Child]:
    """Returns the machine and the configuration."""
    header, machine = summary.header, summary.header.environment
    return [
        table(tables.arms(summary)),
        facts(
            [
                ("CPU", f"{machine.cpu}, {machine.cores} cores"),
                ("GPU", ", ".join(machine.gpus) or "none"),
                ("System", machine.system),
                ("Python", machine.python),
                ("Packages", ", ".join(f"{name} {version}" for name, version in machine.packages.items())),
                ("Flags", [tag("code", f"{name}={value} ") for name, value in machine.flags.items()]),
                ("Git revision", machine.git_revision),
                ("Seed", str(header.seed)),
                ("Record", summary.path.name),
            ]
        ),
        [
            facts(
                [
                    (f"Server {server.id}", f"{server.name} at {server.address}"),
                    ("Ready after", None if server.ready_s is None else f"{server.ready_s:.1f} s"),
                ]
            )
            for server in summary.servers
        ],
        tag("pre", " ".join(header.command)),
        tag(
            "details",
            tag("summary", "Every option in force"),
            facts((name, str(value)) for name, value in header.configuration.items() if value is not None),
        ),
        tag("p", "This page holds everything it shows; the record named above holds every request.", class_="soft"),
    ]


def _names(summary: Summary) -> dict[int, str]:
    """Returns a name for each point: its arm, and its load where there are several."""
    several = len({point.label for point in summary.points}) > 1
    return {id(point): f"{point.arm}, {point.label}" if several else point.arm for point in summary.points}


def _hues(summary: Summary) -> dict[str, int]:
    arms = summary.header.arms
    return {arm.name: index if arm.is_control_of is None else MUTED for index, arm in enumerate(arms)}


def _styles(summary: Summary) -> dict[int, int]:
    """Returns the style of each point's line: by load where there are several, else by arm."""
    loads = list(dict.fromkeys(point.label for point in summary.points))
    arms = list(dict.fromkeys(point.arm for point in summary.points))
    several = len(loads) > 1
    return {id(point): loads.index(point.label) if several else arms.index(point.arm) for point in summary.points}


def _value_ms(point: Point, name: str) -> float | None:
    return next((each.value_ms for each in point.percentiles if each.name == name), None)


def _by_size(name: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in name.split("x"))
