"""`xlaserve plan` as it is called."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import Server


def plan(*arguments: str, status: int = 0) -> str:
    """Returns what the command prints; on stderr where it fails."""
    command = [sys.executable, "-m", "xlaserve", "plan", "--slo", "p99<50ms", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


@pytest.mark.slow
def test_a_servers_own_costs_say_how_many_are_needed(server: Server) -> None:
    found = json.loads(plan("--target", server.grpc, "--model", "digits", "--rate", "100", "--json"))
    assert found["servers"] == 1
    (one,) = (each for each in found["simulations"] if each["servers"] == 1)
    assert 0 < one["p50_s"] <= one["p99_s"] < 0.05
    assert one["images_by_bucket"]
    assert found["error"]["p99_least_s"] < one["p99_s"] < found["error"]["p99_most_s"]
    assert found["error"]["servers"] >= 1


def test_variants_are_compared_and_the_best_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("".join(f"{number // 3 / 50}\n" for number in range(900)))
    options = ("--costs", "1=5/8,4=12/20,8=20/40", "--lanes", "1,2", "--buckets", "1;1,8", "--trace", str(trace))
    shown = plan(*options)
    rows = [line.split() for line in shown.splitlines()]
    compared = [row for row in rows if row and row[0] in ("1", "2") and len(row) > 5]
    assert "images by bucket: 1: " in shown
    assert "At its worst" in shown
    found = json.loads(plan(*options, "--json"))
    variants = [(one["lanes"], one["buckets"]) for one in found["variants"]]
    assert variants == [(1, [1]), (1, [1, 8]), (2, [1]), (2, [1, 8])]
    best = min(found["variants"], key=lambda one: (one["servers"], one["p99_s"]))
    assert (found["lanes"], found["buckets"], found["servers"]) == (best["lanes"], best["buckets"], best["servers"])
    assert len(compared) >= 4
    wide = json.loads(plan(*options, "--costs-error", "0.4", "--json"))
    assert wide["costs_error"] == 0.4
    assert wide["error"]["p99_least_s"] < found["error"]["p99_least_s"]
    assert wide["error"]["p99_most_s"] > found["error"]["p99_most_s"]


def test_costs_and_a_trace_need_no_server(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("".join(f"{number / 300}\n" for number in range(900)))
    shown = plan("--costs", "1=9", "--trace", str(trace), "--price", "2.5")
    assert "3 servers are enough. Scale on xlaserve_queued_work_seconds above" in shown
    assert "a million images" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--costs", "1=9"), "--rate: expected requests a second, or --trace"),
        (
            ("--costs", "1:9", "--rate", "5"),
            "buckets and milliseconds such as 1=4.2,8=21 or 8=21/30, got '1:9'",
        ),
        (("--costs", "1=9/8", "--rate", "5"), "--costs: expected buckets and milliseconds such as 1=4.2,8=21"),
        (
            ("--costs", "1=9", "--rate", "5", "--buckets", "1,2"),
            "--buckets: expected some of 1, which are measured",
        ),
        (("--target", "127.0.0.1:1", "--rate", "5"), "127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in plan(*arguments, status=1)


def test_a_limit_that_no_number_of_servers_meets_is_said(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("".join(f"{number / 100}\n" for number in range(500)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "xlaserve",
            "plan",
            "--slo",
            "p99<5ms",
            "--costs",
            "1=9",
            "--trace",
            str(trace),
            "--max-servers",
            "4",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "4 servers are not enough" in done.stdout


@pytest.mark.slow
def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    ((typed, shown),) = re.findall(r"^\$ xlaserve plan (.*)\n((?s:.*?))```$", page, re.MULTILINE)
    assert plan(*shlex.split(typed)) == shown
