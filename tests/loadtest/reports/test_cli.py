from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tests.loadtest.reports.pages import samples
from tests.loadtest.reports.published import DIFFERENT, INCOMPARABLE
from tests.loadtest.run_files import NewRun

from xlaserve_loadtest.analysis import completeness
from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.record.lines import Equality, Failure
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.reports import compare_cli, html, junit, markdown, tables
from xlaserve_loadtest.reports.terminal import show


def test_the_terminal_shows_the_verdict_first_in_a_hundred_columns(
    compared: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = Equality("xla", "graph", 64, 1e-6, 1e-5, 1.0, 1e-4, 1e-3, is_equal=True)
    assert report.main([str(compared(control_ms=20).write(equal)), "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("xla is faster than graph at 4 at a time: ")
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for expected in ("images/s", "p99", "A/A passed", "paid back after", "100.0%", "Closed loop"):
        assert expected in text


@pytest.mark.parametrize("format", ["json", "junit", "html", "markdown"])
def test_every_format_says_which_outputs_can_not_be_compared(compared: NewRun, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    assert report.main([str(compared().write(INCOMPARABLE)), f"--{format}", str(out)]) == report.EXIT_CONDITION
    text = out.read_text()
    assert "y FP32 [n,8] against y FP32 [n,4]" in text.replace("\\", "")
    if format == "json":
        (equality,) = json.loads(text)["runs"][0]["equalities"]
        assert (equality["is_equal"], equality["incomparable"]) == (False, INCOMPARABLE.incomparable)
    if format == "junit":
        (case,) = (case for case in ElementTree.fromstring(text).iter("testcase") if case.get("name") == "differing>0")
        assert case.find("failure") is not None


def test_every_format_is_written_from_the_file_alone(
    compared: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compared(control_ms=20).write()
    names = {"--html": "r.html", "--markdown": "r.md", "--csv": "r.csv", "--json": "r.json"}
    assert (
        report.main([str(path), *(word for pair in names.items() for word in (pair[0], str(tmp_path / pair[1])))]) == 0
    )
    summary = summarize(read_run(path))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert [(row["arm"], row["verdict"]) for row in rows] == [
        ("xla", "faster"),
        ("graph", ""),
        ("graph again", "inconclusive"),
    ]
    assert float(rows[0]["p99_ms"]) == summary.points[0].percentile("p99").value_ms
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema"] == report.SCHEMA
    assert document["runs"][0]["verdict"] == summary.verdict
    assert (tmp_path / "r.md").read_text().startswith("**xla is faster than graph")
    assert summary.verdict in (tmp_path / "r.html").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["a.run.jsonl.gz", *names.values()])


def test_a_price_that_is_never_paid_back_is_json_all_the_same(
    compared: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.main([str(compared(xla_ms=40).write()), "--json", str(tmp_path / "r.json")])
    price = json.loads((tmp_path / "r.json").read_text())["runs"][0]["prices"][0]
    assert price["break_even_images"] is None
    assert "never" in price["text"]


@pytest.mark.parametrize(
    ("conditions", "status"), [(["xla/graph<1.0", "errors>0"], 0), (["errors>0", "p99>1ms"], 3), (["p99.9>9s"], 3)]
)
def test_a_condition_that_is_met_ends_with_a_status_of_its_own(
    compared: NewRun, capsys: pytest.CaptureFixture[str], conditions: list[str], status: int
) -> None:
    words = [word for condition in conditions for word in ("--fail-if", condition)]
    assert report.main([str(compared().write()), *words]) == status
    assert ("--fail-if" in capsys.readouterr().err) == (status == 3)


@pytest.mark.parametrize("words", [["--fail-if", "p99>soon"], ["--csv", "/no/such/folder/r.csv"], ["--csv", "/tmp"]])
def test_a_wrong_option_is_refused_before_anything_is_read(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        report.main(["nothing", *words])
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b"\x1f\x8b\x08garbage", b'{"kind": "header"}\n'])
@pytest.mark.parametrize("main", [lambda path: report.main([path]), lambda path: compare_cli.main([path, path])])
def test_a_file_that_is_no_run_is_one_line_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, main: Callable[[str], int]
) -> None:
    path = tmp_path / "x.run.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    assert main(str(path)) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


def test_an_unwritable_report_hides_neither_the_verdict_nor_other_reports(
    compared: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = compared().write(), tmp_path / "r.json"
    assert report.main([str(path), "--html", "/dev/full", "--json", str(other), "--fail-if", "p50>1us"]) == 1
    streams = capsys.readouterr()
    assert "faster" in streams.out
    assert other.exists()
    assert "--fail-if p50>1us: " in streams.err
    assert streams.err.endswith("loadtest report: [Errno 28] No space left on device: '/dev/full'\n")
    assert report.main([str(path), "--html", "/dev/full", "--csv", "/dev/full"]) == 1
    assert capsys.readouterr().err.count("'/dev/full'") == 2
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied", "a draft")))
    assert report.main([str(path), "--csv", str(tmp_path / "r.csv")]) == 1
    assert f"Permission denied: '{tmp_path / 'r.csv'}'" in capsys.readouterr().err
    assert not [own for own in tmp_path.iterdir() if own.name.startswith(".")]


def test_an_open_file_is_written_to_and_neither_removed_nor_replaced(compared: NewRun, tmp_path: Path) -> None:
    # As /dev/stdout is: as root a mistake would remove the system's own.
    link, out = tmp_path / "link", tmp_path / "out"
    words = [sys.executable, "-m", "xlaserve_loadtest", "report", str(compared().write()), "--json", str(link)]
    with out.open("w") as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        subprocess.run(words, stdout=subprocess.DEVNULL, pass_fds=(file.fileno(),), check=True, timeout=60)
    assert link.is_symlink()
    assert json.loads(out.read_text())["schema"] == report.SCHEMA


def test_a_pipe_is_written_to_and_not_replaced(compared: NewRun, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert report.main([str(compared().write()), "--json", str(pipe)]) == 0
        document, _ = reader.communicate(timeout=30)
    assert json.loads(document)["schema"] == report.SCHEMA
    assert pipe.is_fifo()


def test_no_text_of_a_server_moves_the_cursor_of_a_terminal(
    run_file: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "m\x1b[2J\x1b]0;owned\x07"
    run = run_file().header(arms=[name]).block(name, [10.0] * 100)
    assert report.main([str(run.write(Failure(name, "INTERNAL", 1, "\x9b31m"))), "--fail-if", "p50>1us"]) == 3
    streams = capsys.readouterr()
    for text in (streams.out, streams.err):
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
        assert "m\ufffd[2J" in text


def test_a_cut_off_run_and_one_without_measurements_are_reported(
    compared: NewRun,
    run_file: NewRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = compared().write()
    path.write_bytes(path.read_bytes()[:3000])
    assert report.main([str(path), "--html", str(tmp_path / "r.html"), "--csv", str(tmp_path / "r.csv")]) == 1
    streams = capsys.readouterr()
    assert streams.out.startswith(completeness.MARK)
    assert "cut off" in streams.out
    assert f"{path}: incomplete: The file was cut off" in " ".join(streams.err.split())
    assert report.main([str(run_file("b").header().write()), "--html", str(tmp_path / "r.html")]) == 1
    assert capsys.readouterr().out.startswith("Nothing was measured")


def test_the_table_of_failures_and_the_verdict_name_a_wrong_answer_alike(compared: NewRun) -> None:
    run = compared().read(Failure("xla", "INVALID_REPLY", 3, "expected outputs"), Failure("xla", "INTERNAL", 1, "no"))
    assert tables.failures(summarize(run)).columns["status"] == ["invalid answer", "INTERNAL"]


FAILED = {"status": [Status.INTERNAL] * 3 + [Status.OK] * 97}


@pytest.mark.parametrize(
    ("conditions", "met"),
    [
        ([], ["errors>0"]),
        (["verdict=slower"], ["errors>0"]),
        (["errors>2%"], ["errors>2%"]),
        (["errors>3%"], []),
        (["graph:errors>3%"], ["errors>0"]),
        (["xla:errors>3%"], []),
    ],
)
def test_errors_fail_unless_a_condition_is_about_them(
    compared: NewRun, capsys: pytest.CaptureFixture[str], conditions: list[str], met: list[str]
) -> None:
    file = compared().block("xla", [10.0] * 100, columns=FAILED, round=9)
    file = file.block("graph", [20.0] * 100, round=9)
    del file.lines[1:-4]
    words = [word for condition in conditions for word in ("--fail-if", condition)]
    status = report.main([str(file.write()), *words])
    told = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert [line.split()[-1] for line in told if "errors" in line] == met
    assert (status == 3) == bool(told)


@pytest.mark.parametrize(
    ("condition", "status"), [(None, 3), ("differing>25%", 0), ("differing>15", 3), ("graph:differing>0", 3)]
)
def test_differing_outputs_fail_unless_a_condition_is_about_them(
    compared: NewRun, capsys: pytest.CaptureFixture[str], condition: str | None, status: int
) -> None:
    path = compared(control_ms=20).write(DIFFERENT)
    assert report.main([str(path), *(("--fail-if", condition) if condition else ())]) == status
    assert ("xla against graph: 16 of 64 images" in capsys.readouterr().err) == (status == 3)


def test_a_search_counts_no_refusal_of_load_as_an_error(run_file: NewRun) -> None:
    def fails(*statuses: Status) -> list[str]:
        file = run_file().header(("xla",)).block("xla", [9.0] * 20, role="confirm")
        for status in statuses:
            file.block("xla", [9.0] * 20, role="search", status=status)
        summary = summarize(file.read())
        return [each.condition.text for each in report.judge_summary(summary, ()) if each.is_met]

    assert fails(Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED, Status.UNAVAILABLE) == []
    assert fails(Status.RESOURCE_EXHAUSTED, Status.INTERNAL) == ["errors>0"]
    assert fails(Status.INVALID_REPLY) == ["errors>0"]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_an_incomplete_run_has_an_exit_status_and_a_mark_in_every_format(
    compared: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = compared().write()
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    out = {name: tmp_path / name for name in ("junit", "markdown", "json", "csv", "html")}
    words = [word for name, file in out.items() for word in (f"--{name}", str(file))]
    if command == "report":
        assert report.main([str(path), *words]) == 1
        assert [row["is_run_complete"] for row in csv.DictReader(io.StringIO(out["csv"].read_text()))] == ["False"] * 2
        run = json.loads(out["json"].read_text())["runs"][0]
        assert (run["is_complete"], run["missing"][0].partition(":")[0]) == (False, "The file was cut off")
        assert completeness.MARK in out["html"].read_text()
    else:
        assert compare_cli.main([str(path), str(compared(name="b").write()), *words[:4]]) == 1
    assert f"**{completeness.MARK}" in out["markdown"].read_text()
    streams = capsys.readouterr()
    assert completeness.MARK in streams.out
    assert f"{path}: incomplete: The file was cut off" in streams.err
    cases = {case.attrib["name"]: case[0].tag for case in ElementTree.parse(out["junit"]).iter("testcase")}
    assert cases[junit.COMPLETE] == "error"


@pytest.mark.parametrize("command", ["report", "compare"])
def test_no_file_of_an_earlier_report_survives_a_run_that_can_not_be_read(
    compared: NewRun, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tmp_path / "steps"
    monkeypatch.setenv(report.STEP_SUMMARY, str(steps))
    names = ("junit", "markdown") if command == "compare" else ("junit", "json", "csv", "html")
    out = {name: tmp_path / name for name in names}
    for path in (*out.values(), steps):
        path.write_text("of an earlier run")
    words = [word for name, file in out.items() for word in (f"--{name}", str(file))]
    main = compare_cli.main if command == "compare" else report.main
    assert main([*[str(tmp_path / "none")] * (1 + (command == "compare")), *words]) == 1
    assert {name for name, path in out.items() if path.exists()} == {"junit"}
    (case,) = ElementTree.parse(out["junit"]).iter("testcase")
    assert (case.attrib["name"], case[0].tag) == (junit.COMPLETE, "error")
    assert "got no such file" in case[0].attrib["message"]
    assert steps.read_text() == "of an earlier run"


def test_a_report_is_never_written_over_the_run_that_it_reads(
    compared: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compared().write()
    detour = path.parent / "folder" / ".." / path.name
    detour.parent.parent.mkdir()
    for main, words in ((report.main, [str(path), "--json"]), (compare_cli.main, ["other", str(path), "--junit"])):
        for name in (path, detour):
            with pytest.raises(SystemExit) as caught:
                main([*words, str(name)])
            assert caught.value.code == 2
            assert "it is the run that is read" in capsys.readouterr().err
    assert read_run(path).end


def test_warnings_of_one_kind_are_one_line_for_all_arms_in_every_report() -> None:
    summary = samples.summary("troubled")
    arms = [arm.name for arm in summary.header.arms]
    terminal = io.StringIO()
    show(summary, Console(file=terminal, width=100_000))
    texts = {
        "terminal": terminal.getvalue(),
        "html": html.render([summary]),
        "markdown": markdown.render(summary).replace("\\", ""),
        "junit": junit.render([junit.suite(summary, ())]),
    }
    for kind in ("Requests that were not answered", "The load was generator-limited", "Not every block became steady"):
        for name, text in texts.items():
            (warning,) = (part for part in re.split(r"\n|<p>|</p>", text) if kind in part)
            assert all(f"{arm}, " in warning for arm in arms), (kind, name)


def test_reports_need_neither_a_server_nor_tensorflow() -> None:
    code = (
        "import sys; import xlaserve_loadtest.reports.cli, xlaserve_loadtest.reports.compare_cli;"
        "print(sorted({'grpc', 'tensorflow', 'keras', 'xlaserve'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
