"""The report as one HTML file that can be mailed: it needs no network and no other file."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports import charts, latency_charts, price_charts, resource_tables, tables
from xlaserve_loadtest.reports.drawn import drawn
from xlaserve_loadtest.reports.markup import Child, facts, join, page, table, tag


def render(summaries: Sequence[Summary]) -> str:
    """Returns the page for one run, or for several one below the other."""
    title = " and ".join(dict.fromkeys(_subject(summary) for summary in summaries))
    return page(f"loadtest: {title}", [_run(summary, index) for index, summary in enumerate(summaries)])


def _run(summary: Summary, index: int) -> Markup:
    shown = [
        (f"s{index}-{number}", name, body)
        for number, (name, body) in enumerate(_sections(summary).items())
        if any(body)
    ]
    return join(
        [
            tag("h1", _subject(summary)),
            tag("p", _occasion(summary), class_="soft"),
            _verdict(summary),
            _comparisons(summary),
            tag("nav", [tag("a", name, href=f"#{anchor}") for anchor, name, _ in shown]),
            [tag("section", tag("h2", name), body, id=anchor) for anchor, name, body in shown],
        ]
    )


def _sections(summary: Summary) -> dict[str, list[Child]]:
    """Returns every section by its title; one without data is empty."""
    points = drawn(summary)
    return {
        "What was found": [table(tables.highest_rates(summary)), table(tables.scenario(summary))],
        "Throughput": [charts.throughput(points), table(tables.throughput(summary))],
        "Latency": [
            table(tables.latency(summary)),
            latency_charts.percentiles(points),
            latency_charts.by_model(summary),
            table(tables.by_model(summary)),
            table(tables.by_target(summary)),
            table(tables.by_generator(summary)),
            latency_charts.over_time(points, summary.events),
        ],
        "Load and latency": [*latency_charts.load_curves(summary)],
        "Where time went": [charts.stages(points), table(resource_tables.use(summary))],
        "The price of compiling": _price(summary),
        "Padding and buckets": [charts.buckets(points), table(resource_tables.padding(summary))],
        "Are the figures sound?": [
            table(tables.equality(summary)),
            table(resource_tables.generator(summary)),
            table(tables.failures(summary)) or tag("p", "No request failed."),
            [tag("p", note, class_="soft") for note in summary.notes],
        ],
        "How it was measured": _setting(summary),
    }


def _subject(summary: Summary) -> str:
    """Returns the names of the models and their modes."""
    arms = [arm for arm in summary.header.arms if arm.is_control_of is None]
    models = ", ".join(dict.fromkeys(model for arm in arms for model in arm.served))
    modes = ", ".join(dict.fromkeys(arm.mode for arm in arms if arm.mode))
    return f"{models}: {modes}" if modes else models


def _occasion(summary: Summary) -> str:
    machine = summary.header.environment
    where = ", ".join((*machine.gpus, f"{machine.cpu} ({machine.cores} cores)"))
    return f"{summary.header.started_at} · {where} · {summary.requests:,} requests in {summary.duration_s:,.0f} s"


def _verdict(summary: Summary) -> Markup:
    verdicts = {comparison.verdict for comparison in summary.comparisons if not comparison.is_control}
    kind = next(iter(verdicts)) if len(verdicts) == 1 else "inconclusive" if verdicts else "none"
    others = [text for text in summary.verdicts if text not in summary.verdict_sentences]
    details = tag("details", tag("summary", f"All {len(others)} comparisons"), [tag("p", text) for text in others])
    words = [tag("p", text, class_="words") for text in summary.verdict_sentences]
    return join([tag("div", words, details if others else None, class_=f"verdict {kind}"), _warnings(summary)])


def _warnings(summary: Summary) -> Markup | None:
    if not summary.warnings:
        return None
    title = "Warning" if len(summary.warnings) == 1 else f"{len(summary.warnings)} warnings"
    return tag("div", tag("strong", title), [tag("p", text) for text in summary.warnings], class_="warnings")


def _comparisons(summary: Summary) -> Markup | None:
    if not summary.comparisons:
        return None
    units = " or of ".join(
        "blocks in the same processes (another start may differ by more)" if unit == "blocks" else unit
        for unit in dict.fromkeys(comparison.unit for comparison in summary.comparisons)
    )
    how = (
        f"Each ratio is the arm over the baseline with its 95% interval over pairs of {units}. Over 1 is more "
        "images/s, which is good, or longer latency, which is bad. An interval that contains 1 settles nothing. The "
        "A/A control compares an arm with its own twin: where they come out different, nothing here is to be believed."
    )
    return join([table(tables.ratios(summary)), tag("p", how, class_="soft")])


def _price(summary: Summary) -> list[Child]:
    number = sum(len(price.programs) for price in summary.prices)
    if not number:
        return []
    return [
        table(resource_tables.prices(summary)),
        price_charts.break_even(summary),
        price_charts.ledger(summary.prices),
        tag("details", tag("summary", f"All {number} programs"), table(resource_tables.programs(summary))),
    ]


def _setting(summary: Summary) -> list[Child]:
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
        [
            facts(
                [
                    (f"Generator {line.address}", f"{line.machine}, processes that send: {line.workers}"),
                    ("CPU", f"{line.environment.cpu}, {line.environment.cores} cores"),
                    ("System", line.environment.system),
                ]
            )
            for line in summary.generators
        ],
        tag("pre", " ".join(header.command)),
        tag(
            "details",
            tag("summary", "Every option in force"),
            facts((name, str(value)) for name, value in header.configuration.items() if value is not None),
        ),
        tag("p", "This page holds everything it shows; the record named above holds every request.", class_="soft"),
    ]
