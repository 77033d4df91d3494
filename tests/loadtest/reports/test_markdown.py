from __future__ import annotations

from pathlib import Path

import pytest
from tests.loadtest.reports.published import published
from tests.loadtest.run_files import NewRun

from xlaserve_loadtest.analysis.summary import summarize
from xlaserve_loadtest.reports import cli as report
from xlaserve_loadtest.reports import markdown


def test_markdown_shows_names_as_they_are(run_file: NewRun) -> None:
    file = run_file().header(("a|<b>*c*",)).block("a|<b>*c*", [1.0] * 10)
    text = markdown.render(summarize(file.read()))
    assert r"| a\|\<b\>\*c\* |" in text


def test_markdown_fits_a_comment_with_the_verdict_first_and_tables_folded(compared: NewRun, tmp_path: Path) -> None:
    text = published(compared(control_ms=20), tmp_path, "markdown", "p99>1s", "p50>1ms", "p99.99>1ms")
    head, folded = text.split("<details>")
    lines = head.splitlines()
    assert lines[0].startswith("**xla is faster than graph")
    assert lines[2:6] == ["| condition | result | found |", "|---|---|---|", lines[4], lines[5]]
    assert lines[4].startswith(r"| p50\>1ms | **failed** | ")
    assert lines[5].startswith(r"| p99.99\>1ms | **can't be judged** | ")
    assert "| passed | graph" in lines[6]
    for title in ("Ratios to the baseline", "Throughput", "Latency"):
        assert title in head
        assert title not in folded
    assert "Price of compiling" in folded
    assert "a processor, 2 cores" in folded.split("</details>")[1]


def test_markdown_too_long_for_a_comment_says_what_it_left_out(compared: NewRun) -> None:
    summary = summarize(compared().read())
    whole = markdown.render(summary)
    text = markdown.render(summary, limit=len(whole) // 2)
    assert len(text) < len(whole) < markdown.MAX_CHARACTERS
    left_out = text.partition("- Left out, as a comment may not be longer: ")[2]
    assert "What it took" in left_out
    assert "Throughput" not in left_out


def test_markdown_is_appended_to_the_summary_of_a_github_job(
    compared: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_text("before\n")
    monkeypatch.setenv(report.STEP_SUMMARY, str(tmp_path / "out"))
    assert published(compared(), tmp_path, "markdown").startswith("before\n**xla is faster")
