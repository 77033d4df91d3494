"""The report as one HTML file that can be mailed: it needs no network and no other file."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports import html_sections as sections
from xlaserve_loadtest.reports import tables
from xlaserve_loadtest.reports.markup import Child, join, page, table, tag


def render(summaries: Sequence[Summary]) -> str:
    """Returns the page for one run, or for several one below the other."""
    title = " and ".join(dict.fromkeys(_subject(summary) for summary in summaries))
    return page(f"loadtest: {title}", [_run(summary, index) for index, summary in enumerate(summaries)])


def _run(summary: Summary, index: int) -> Markup:
    parts: list[tuple[str, list[Child]]] = [
        ("Throughput", sections.throughput(summary)),
        ("Latency", sections.latency(summary)),
        ("Load and latency", sections.load(summary)),
        ("Where time went", sections.where(summary)),
        ("The price of compiling", sections.price(summary)),
        ("Padding and buckets", sections.padding(summary)),
        ("Are the figures sound?", sections.soundness(summary)),
        ("How it was measured", sections.setting(summary)),
    ]
    shown = [(f"s{index}-{number}", name, body) for number, (name, body) in enumerate(parts) if any(body)]
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


def _subject(summary: Summary) -> str:
    """Returns the models and the ways in which they ran."""
    arms = [arm for arm in summary.header.arms if arm.is_control_of is None]
    models = ", ".join(dict.fromkeys(arm.model for arm in arms))
    return f"{models}: {', '.join(dict.fromkeys(arm.mode for arm in arms))}"


def _occasion(summary: Summary) -> str:
    machine = summary.header.environment
    where = ", ".join((*machine.gpus, f"{machine.cpu} ({machine.cores} cores)"))
    return f"{summary.header.started_at} · {where} · {summary.requests:,} requests in {summary.duration_s:,.0f} s"


def _verdict(summary: Summary) -> Markup:
    verdicts = {comparison.verdict for comparison in summary.comparisons if not comparison.is_control}
    kind = next(iter(verdicts)) if len(verdicts) == 1 else "inconclusive" if verdicts else "none"
    others = [text for text in summary.verdicts if text not in summary.verdict]
    return join(
        [
            tag(
                "div",
                tag("p", summary.verdict, class_="words"),
                [tag("p", text) for text in others],
                class_=f"verdict {kind}",
            ),
            [tag("p", tag("strong", "Warning: "), text, class_="warning") for text in summary.warnings],
        ]
    )


def _comparisons(summary: Summary) -> Markup | None:
    if not summary.comparisons:
        return None
    how = (
        "Each ratio is the arm over the baseline with its 95% interval, from pairs of neighbouring blocks. Over 1 is "
        "more images/s, which is good, or longer latency, which is bad. An interval that contains 1 settles nothing. "
        "The A/A control compares an arm with its own twin: where they come out different, nothing here is to be "
        "believed."
    )
    reasons = [
        tag("p", f"{each.arm} / {each.baseline} at {each.label}: {each.reason}.", class_="soft")
        for each in summary.comparisons
        if each.reason and not each.is_control
    ]
    return join([table(tables.ratios(summary)), reasons, tag("p", how, class_="soft")])
