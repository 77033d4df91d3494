from __future__ import annotations

from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

from tests.loadtest.reports.published import published
from tests.loadtest.run_files import NewRun
from tests.required import required

from xlaserve_loadtest.analysis.conditions import Judged
from xlaserve_loadtest.reports import junit
from xlaserve_loadtest.schedule.conditions import parse


def test_junit_has_a_test_case_for_each_condition_as_its_readers_expect(compared: NewRun, tmp_path: Path) -> None:
    conditions = ["p99>1s", "p50>1ms", "p99.99>1ms", "eager & more:p50>1"]
    root = ElementTree.fromstring(published(compared(), tmp_path, "junit", *conditions))
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    for element in (root, suite):
        counts = {name: element.attrib[name] for name in ("tests", "failures", "errors", "skipped")}
        assert counts == {"tests": "7", "failures": "1", "errors": "2", "skipped": "0"}
        assert float(element.attrib["time"]) >= 0
    assert datetime.fromisoformat(suite.attrib["timestamp"]).tzinfo is None
    cases = suite.findall("testcase")
    assert [(case.attrib["classname"], case.attrib["name"]) for case in cases] == [
        ("loadtest.a", name) for name in (*conditions, "errors>0", "differing>0", junit.COMPLETE)
    ]
    # Jenkins and GitLab read one failure or error of a case, its message, type and text.
    problems = [[child for child in case if child.tag in ("failure", "error")] for case in cases]
    assert [[problem.tag for problem in found] for found in problems] == [
        [],
        ["failure"],
        ["error"],
        ["error"],
        [],
        [],
        [],
    ]
    assert all({"message", "type"} <= set(problem.attrib) and problem.text for (problem,) in problems[1:4])
    assert "p99.99 needs 46,050 answers" in problems[2][0].attrib["message"]
    assert required(cases[0].findtext("system-out")).startswith("graph, 4 at a time: 2")


def test_junit_holds_any_text_that_a_condition_or_a_message_may_have() -> None:
    condition = parse('a\x00\ud800]]/b&" images/s<1')
    judged = Judged(condition, True, True, "\x1b[31m</failure>")
    document = junit.render([junit.Suite("x\x0b", "2026-01-02T03:04:05+00:00", 1.0, "\ufffe", [judged])])
    case, _ = ElementTree.fromstring(document.encode()).iter("testcase")
    assert document.startswith("<?xml version='1.0' encoding='utf-8'?>")
    assert case.attrib["name"] == condition.text.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")


def test_junit_without_a_condition_has_those_of_every_run(compared: NewRun, tmp_path: Path) -> None:
    root = ElementTree.fromstring(published(compared(), tmp_path, "junit"))
    assert [case.attrib["name"] for case in root.iter("testcase")] == ["errors>0", "differing>0", junit.COMPLETE]
    assert [root.attrib[name] for name in ("tests", "failures", "errors")] == ["3", "0", "0"]
