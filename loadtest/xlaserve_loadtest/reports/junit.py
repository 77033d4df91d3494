"""Conditions as JUnit XML, which Jenkins, GitLab and GitHub's actions show as tests: a test case for each condition."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.printable import one_line

_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 can't hold, not even escaped."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What was judged together: one run, or two."""

    name: str
    started_at: str
    """ISO 8601."""
    duration_s: float
    headline: str
    """The verdict, and warnings on lines of their own."""
    judged: Sequence[Judged]


def suite(summary: Summary, judged: Sequence[Judged]) -> Suite:
    """Returns the suite of one run."""
    name = summary.path.name.partition(".")[0]
    headline = "\n".join([summary.verdict, *(f"warning: {one_line(text)}" for text in summary.warnings)])
    return Suite(name, summary.header.started_at, summary.duration_s, headline, judged)


def render(suites: Iterable[Suite]) -> str:
    """Returns the document. A condition that is met is a failure, one that can't be judged an error."""
    elements = [_suite(each) for each in suites]
    root = ElementTree.Element("testsuites", {"name": "loadtest", **_sums(elements)})
    root.extend(elements)
    ElementTree.indent(root)
    # Not "unicode": that would declare the encoding of the locale, and the file is in UTF-8.
    document: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _suite(suite: Suite) -> ElementTree.Element:
    failed = sum(each.is_met and each.is_judged for each in suite.judged)
    unknown = sum(not each.is_judged for each in suite.judged)
    attributes = {
        "name": _text(suite.name),
        # Without the zone, as the format has it; it is UTC.
        "timestamp": suite.started_at[: len("2026-01-02T03:04:05")],
        "tests": str(len(suite.judged)),
        "failures": str(failed),
        "errors": str(unknown),
        "skipped": "0",
        "time": f"{suite.duration_s:.3f}",
    }
    element = ElementTree.Element("testsuite", attributes)
    for judged in suite.judged:
        case = ElementTree.SubElement(
            element,
            "testcase",
            {"classname": _text(f"loadtest.{suite.name}"), "name": _text(judged.condition.text), "time": "0"},
        )
        if judged.is_met:
            kind, why = ("failure", "is met") if judged.is_judged else ("error", "can't be judged")
            problem = ElementTree.SubElement(case, kind, {"message": _text(judged.found), "type": why})
            problem.text = _text(str(judged))
        ElementTree.SubElement(case, "system-out").text = _text(judged.found)
    ElementTree.SubElement(element, "system-out").text = _text(suite.headline)
    return element


def _sums(elements: Iterable[ElementTree.Element]) -> dict[str, str]:
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    seconds = 0.0
    for element in elements:
        totals = {name: total + int(element.attrib[name]) for name, total in totals.items()}
        seconds += float(element.attrib["time"])
    return {**{name: str(total) for name, total in totals.items()}, "time": f"{seconds:.3f}"}


def _text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
