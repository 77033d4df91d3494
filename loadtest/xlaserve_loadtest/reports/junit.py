"""The report as JUnit XML, which Jenkins, GitLab and GitHub's actions show as tests.

There is a test case for each condition, and one for completeness, which is an error where the run is incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from xml.etree import ElementTree

from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.printable import one_line

COMPLETE: Final = "complete run"
"""Name of the test case for completeness."""
_NOT_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 can't hold, not even escaped."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A test suite: the conditions of one run, or of two runs that are compared."""

    name: str
    started_at: str
    """ISO 8601."""
    duration_s: float
    headline: str
    """The verdict, and warnings on lines of their own."""
    judged: Sequence[Judged]
    missing: Sequence[str] = ()
    """Sentences about planned measurements that are missing."""


def suite(summary: Summary, judged: Sequence[Judged]) -> Suite:
    """Returns the suite of one run."""
    name = summary.path.name.partition(".")[0]
    headline = "\n".join([summary.verdict, *(f"warning: {one_line(text)}" for text in summary.warnings)])
    return Suite(name, summary.header.started_at, summary.duration_s, headline, judged, summary.missing)


def render(suites: Iterable[Suite]) -> str:
    """Returns the document. A condition that is met is a failure; a condition that can't be judged and an incomplete
    run are errors."""
    elements = [_suite(each) for each in suites]
    root = ElementTree.Element("testsuites", {"name": "loadtest", **_sums(elements)})
    root.extend(elements)
    ElementTree.indent(root)
    # Not "unicode": that would declare the encoding of the locale, and the file is in UTF-8.
    document: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _suite(suite: Suite) -> ElementTree.Element:
    cases = [*(_condition_case(each) for each in suite.judged), _completeness_case(suite)]
    attributes = {
        "name": _text(suite.name),
        # Without the zone, as the format has it; it is UTC.
        "timestamp": suite.started_at[: len("2026-01-02T03:04:05")],
        "tests": str(len(cases)),
        "failures": str(sum(case.problem == "failure" for case in cases)),
        "errors": str(sum(case.problem == "error" for case in cases)),
        "skipped": "0",
        "time": f"{suite.duration_s:.3f}",
    }
    element = ElementTree.Element("testsuite", attributes)
    for case in cases:
        named = {"classname": _text(f"loadtest.{suite.name}"), "name": _text(case.name), "time": "0"}
        shown = ElementTree.SubElement(element, "testcase", named)
        if case.problem:
            about = {"message": _text(case.found), "type": case.kind}
            ElementTree.SubElement(shown, case.problem, about).text = _text(case.text)
        ElementTree.SubElement(shown, "system-out").text = _text(case.found)
    ElementTree.SubElement(element, "system-out").text = _text(suite.headline)
    return element


class _Case(NamedTuple):
    """A test case."""

    name: str
    found: str
    problem: Literal["", "failure", "error"] = ""
    kind: str = ""
    text: str = ""


def _condition_case(judged: Judged) -> _Case:
    case = _Case(judged.condition.text, judged.found)
    if not judged.is_met:
        return case
    if judged.is_judged:
        return case._replace(problem="failure", kind="is met", text=str(judged))
    return case._replace(problem="error", kind="can't be judged", text=str(judged))


def _completeness_case(suite: Suite) -> _Case:
    if not suite.missing:
        return _Case(COMPLETE, "all that was planned was measured")
    found = " ".join(suite.missing)
    return _Case(COMPLETE, found, "error", "is incomplete", f"incomplete: {found}")


def _sums(elements: Iterable[ElementTree.Element]) -> dict[str, str]:
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    seconds = 0.0
    for element in elements:
        totals = {name: total + int(element.attrib[name]) for name, total in totals.items()}
        seconds += float(element.attrib["time"])
    return {**{name: str(total) for name, total in totals.items()}, "time": f"{seconds:.3f}"}


def _text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
