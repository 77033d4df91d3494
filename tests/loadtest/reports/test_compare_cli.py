from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.loadtest.reports.published import DIFFERENT
from tests.loadtest.run_files import ENVIRONMENT, NewRun, RunFile

from xlaserve_loadtest.record.blocks import LoadLine
from xlaserve_loadtest.record.lines import Equality
from xlaserve_loadtest.reports import compare_cli, junit

NEWER = dataclasses.replace(ENVIRONMENT, packages={"xlaserve": "0.2.0"}, git_revision="abc")


def compare(first: RunFile, second: RunFile, *options: str) -> int:
    return compare_cli.main([str(first.write()), str(second.write()), *options])


def test_two_versions_are_compared_from_their_files(compared: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    first = compared(xla_ms=10, graph_ms=20)
    second = compared(xla_ms=11.5, graph_ms=20, seed=1, name="b", environment=NEWER)
    assert compare(first, second) == 0
    text = capsys.readouterr().out
    assert text.startswith("xla at 4 at a time became slower: 0.8")
    assert "graph at 4 at a time: inconclusive; the interval contains 1" in text
    assert "differs: packages.xlaserve: 0.1.0 became 0.2.0" in text
    assert "no verdict" not in text
    assert compare(first, second, "--json") == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["verdict"] == "slower"


def test_nothing_became_faster_on_another_machine(compared: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = dataclasses.replace(ENVIRONMENT, cpu="another processor", cores=4)
    first, second = compared(xla_ms=11.5), compared(xla_ms=10, seed=1, name="b", environment=elsewhere)
    # The machine is never what was changed on purpose.
    assert compare(first, second, "--changed", "cpu,cores") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "became faster" not in text
    assert text.startswith("xla at 4 at a time is 1.1")
    assert "on another machine: no verdict" in text
    assert "no verdict, differs: cpu: a processor became another processor" in text
    assert compare(first, second, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {change["verdict"] for change in document["changes"]} == {"inconclusive"}
    assert document["reasons_not_to_conclude"] == ["cpu: a processor became another processor", "cores: 2 became 4"]


def test_names_of_files_that_runs_wrote_are_no_difference(compared: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    first = compared(configuration={"record": "a.gz", "html": None})
    second = compared(name="b", configuration={"record": "b.gz", "html": "b.html"})
    compare(first, second)
    assert "differs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("header", "changed", "reason"),
    [
        (
            {"environment": dataclasses.replace(ENVIRONMENT, packages={"xlaserve": "0.1.0", "keras": "4"})},
            "packages",
            "keras",
        ),
        ({"environment": dataclasses.replace(ENVIRONMENT, python="3.12")}, "python", "python: 3.11 became 3.12"),
        (
            {"environment": dataclasses.replace(ENVIRONMENT, flags={"XLA_FLAGS": "x"})},
            "flags.XLA_FLAGS",
            "flags.XLA_FLAGS",
        ),
        ({"configuration": {"duration_s": 5.0, "payload": "encoded"}}, "payload", "payload: pixels became encoded"),
    ],
)
def test_differences_other_than_the_code_withhold_the_verdict_unless_meant(
    compared: NewRun, capsys: pytest.CaptureFixture[str], header: dict[str, Any], changed: str, reason: str
) -> None:
    first = compared(xla_ms=10, configuration={"duration_s": 9.0, "payload": "pixels"})
    second = compared(
        xla_ms=11.5, seed=1, name="b", **{"configuration": {"duration_s": 5.0, "payload": "pixels"}, **header}
    )
    assert compare(first, second) == 0
    text = capsys.readouterr().out
    assert "xla at 4 at a time: inconclusive; the runs differ in more than what is compared" in text
    assert f"no verdict, differs: {reason}" in text.replace("packages.", "")
    # How long it was measured changes no figure, the length of its blocks might.
    assert "\ndiffers: duration_s: 9.0 became 5.0" in text
    compare(first, second, "--changed", changed)
    assert "became slower" in capsys.readouterr().out


def test_blocks_of_another_length_are_a_reason_not_to_conclude(
    compared: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = compared(xla_ms=10), compared(xla_ms=11.5, requests=300, seed=1, name="b")
    compare(first, second)
    assert "inconclusive; the runs differ in more than what is compared (block length: 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("B/A upper<0.95", 3),
        ("xla:B/A upper<0.95", 3),
        ("graph:B/A upper<0.95", 0),
        ("B/A lower<0.5", 0),
        ("A/B lower>1.05", 3),
        ("verdict=slower", 3),
        ("graph:verdict=slower", 0),
        ("xla:B/A p50 lower>1.1", 3),
        ("eager:verdict=slower", 3),
    ],
)
def test_a_comparison_ends_with_the_status_of_its_conditions(
    compared: NewRun, capsys: pytest.CaptureFixture[str], condition: str, status: int
) -> None:
    first, second = compared(xla_ms=10), compared(xla_ms=11.5, seed=1, name="b")
    assert compare(first, second, "--fail-if", condition, "--these-processes") == status
    assert (f"--fail-if {condition}: " in capsys.readouterr().err) == (status == 3)


@pytest.mark.parametrize("condition", ["graph:B/A upper<0.95", "graph:verdict=slower", "xla:verdict!=faster"])
def test_evidence_on_two_processes_is_refused_unless_asked_for(
    compared: NewRun, capsys: pytest.CaptureFixture[str], condition: str
) -> None:
    first, second = compared(xla_ms=10), compared(xla_ms=11.5, seed=1, name="b")
    assert compare(first, second, "--fail-if", condition) == 3
    streams = capsys.readouterr()
    assert "can't be judged: " in streams.err
    assert "--these-processes" in streams.err
    assert "xla at 4 at a time became slower" in streams.out
    assert ", of these two processes." in " ".join(streams.out.split())
    # A plain ratio claims no more than it is.
    assert compare(first, second, "--fail-if", "graph:B/A<0.5") == 0


def test_another_machine_of_the_same_type_is_another_machine(
    compared: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = [dataclasses.replace(ENVIRONMENT, machine_ids=ids) for ids in (("a", "b"), ("c", "b"), ("c", "d"), ())]
    first = compared(xla_ms=10, environment=machines[0])
    for machine, is_other in zip(machines, (False, False, True, False), strict=True):
        second = compared(xla_ms=11.5, seed=1, name="b", environment=machine)
        assert compare(first, second) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("on another machine: no verdict" in text) == is_other
        assert ("became slower" in text) != is_other


def test_across_machines_no_evidence_can_be_judged(compared: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = dataclasses.replace(ENVIRONMENT, cores=4)
    first, second = compared(xla_ms=10), compared(xla_ms=11.5, seed=1, name="b", environment=elsewhere)
    for condition in ("B/A upper<0.95", "verdict=slower", "graph:verdict=slower", "graph:B/A upper<0.5"):
        assert compare(first, second, "--fail-if", condition) == 3
        assert "can't be judged: " in capsys.readouterr().err


@pytest.mark.parametrize("condition", ["p99>80ms", "xla/graph upper<1", "xla/graph verdict=slower", "dropped>0"])
def test_a_condition_on_one_run_is_refused_where_two_are_compared(
    condition: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        compare_cli.main(["a", "b", "--fail-if", condition])
    assert caught.value.code == 2
    assert "expected a ratio of the runs such as" in capsys.readouterr().err


def test_runs_with_nothing_in_common_can_not_be_compared(compared: NewRun, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = compared().write(), compared(name="b", load=LoadLine("closed", concurrency=9)).write()
    assert compare_cli.main([str(first), str(second)]) == 1
    assert "no arm under the same load" in capsys.readouterr().err


def test_a_comparison_of_two_runs_is_junit_and_markdown_too(compared: NewRun, tmp_path: Path) -> None:
    first, second = compared(xla_ms=10), compared(xla_ms=11.5, seed=1, name="b", environment=NEWER)
    paths = tmp_path / "c.xml", tmp_path / "c.md"
    words = ["--fail-if", "B/A upper<0.95", "--junit", str(paths[0]), "--markdown", str(paths[1]), "--these-processes"]
    assert compare(first, second, *words) == 3
    root = ElementTree.fromstring(paths[0].read_text())
    assert (root.attrib["failures"], root[0].attrib["name"]) == ("1", "a and b")
    text = paths[1].read_text()
    assert text.startswith("**xla at 4 at a time became slower")
    assert r"| B/A upper\<0.95 | **failed** | xla, 4 at a time: 0.8" in text
    assert "- differs: packages.xlaserve: 0.1.0 became 0.2.0" in text


def test_two_runs_are_compared_by_what_failed_in_either(compared: NewRun, tmp_path: Path) -> None:
    def status(first: list[Equality], second: list[Equality], *options: str) -> int:
        paths = [compared(name=name).write(*lines) for name, lines in (("a", first), ("b", second))]
        return compare_cli.main([*map(str, paths), "--junit", str(tmp_path / "j.xml"), *options])

    assert status([], []) == 0
    assert status([], [DIFFERENT]) == 3
    cases = {case.attrib["name"]: case[0].tag for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")}
    assert cases == dict.fromkeys(("errors>0 in A", "differing>0 in A", "errors>0 in B"), "system-out") | {
        "differing>0 in B": "failure",
        junit.COMPLETE: "system-out",
    }
    assert status([DIFFERENT], []) == 3
    assert status([DIFFERENT], [DIFFERENT], "--fail-if", "differing>25%") == 0
