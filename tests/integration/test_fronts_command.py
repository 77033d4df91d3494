"""`xlaserve fronts` as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest

GIVEN = ("--front-us", "400", "--engine-us", "100", "--process-us", "500")


def fronts(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve", "fronts", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_given_costs_say_what_machines_carry() -> None:
    shown = fronts(*GIVEN, "--cores", "2").stdout
    assert "This machine, 2 cores" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "4,000", "the", "cores"] in rows
    assert ["32", "4", "10,000", "the", "engine"] in rows
    assert "fronts: 2   # more carry no more" in shown


def test_several_engines_carry_more_than_one() -> None:
    shown = fronts(*GIVEN, "--cores", "32", "--engines", "4").stdout
    assert "4 engines share the work" in shown
    assert ["16", "40,000", "the", "engines"] in [line.split() for line in shown.splitlines()]


def test_where_several_processes_are_no_faster_one_is_advised() -> None:
    done = fronts(*GIVEN, "--cores", "8", "--lanes-us", "7000", "--json")
    assert done.stderr == ""
    assert json.loads(done.stdout)["fronts"] == 0


@pytest.mark.slow
def test_what_is_not_given_is_measured() -> None:
    done = fronts("--seconds", "0.5", "--cores", "4", "--json")
    assert "measuring" in done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["engine_us"] < found["front_us"] < 100_000
    assert 0 < found["process_us"] < 100_000
    assert [one["cores"] for one in found["by_cores"]] == [4, 8, 16, 32]
    rates = [one["requests_per_s"] for one in found["capacities"][1:]]
    assert rates
    assert all(fewer <= more for fewer, more in pairwise(rates))
