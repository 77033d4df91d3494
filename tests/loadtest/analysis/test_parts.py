from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.loadtest.run_files import ENVIRONMENT, NewRun, RunFile
from tests.required import required

from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.record.blocks import GeneratorUse, LoadLine, MachineUse
from xlaserve_loadtest.record.lines import Arm, GeneratorLine, Header
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.reports import tables

OPEN = LoadLine("open", rate_per_s=100.0, arrivals="poisson")
TARGETS = ("10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8001")
REQUESTS = 3000


def loaded(
    run: RunFile,
    *,
    slow: float = 1.0,
    fails: float = 0.0,
    column: str = "target",
    blocks: int = 1,
    generator: GeneratorUse | None = None,
) -> RunFile:
    """Three parts take requests in turn; the second is `slow` times as slow, and fails that share more."""
    random = np.random.default_rng(0)
    (header,) = run.header(("xla",)).lines
    assert isinstance(header, Header)
    run.lines = [replace(header, arms=(Arm("xla", "xla", "digits", ",".join(TARGETS)),))]
    for _ in range(blocks):
        part = np.arange(REQUESTS // blocks) % 3
        status = np.where(random.random(part.size) < 0.01 + fails * (part == 1), Status.INTERNAL, Status.OK)
        latencies_ms = 5 * random.lognormal(0, 0.5, part.size) * np.where(part == 1, slow, 1.0)
        due_ns = np.cumsum(random.exponential(1e7, part.size)).astype(np.int64)
        columns: dict[str, Any] = {column: part, "status": status}
        run.block("xla", latencies_ms, load=OPEN, due_ns=due_ns, columns=columns, generator=generator)
    return run


def machines(names: Sequence[str] = ("gen1:7070", "gen2:7070", "gen3:7070"), **more: float) -> GeneratorUse:
    clock = {"clock_error_ms": 0.25, "clock_drift_ms": -0.5, **more}
    own = tuple(MachineUse(name, 1, 0.1, 100, 0, 0.0, 0.0, 0, 0.0, **clock) for name in names)
    return GeneratorUse(len(names), 0.3, sends=REQUESTS, machines=own)


def about(summary: Summary, word: str) -> list[str]:
    return [warning for warning in summary.warnings if word in warning]


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_slow_target_among_several_is_named_with_how_much_slower_it_is(run_file: NewRun, blocks: int) -> None:
    summary = summarize(loaded(run_file(), slow=1.5, blocks=blocks).read())
    (warning,) = about(summary, "A target does not do as the others")
    found = required(re.search(r"xla, 100/s poisson \(10\.0\.0\.2:8001: its p50 is ([\d.]+) times", warning))
    assert float(found[1]) == pytest.approx(1.5, rel=0.05)
    assert "10.0.0.1" not in warning
    assert "failed" not in warning
    assert list(tables.by_target(summary).columns["target"]) == list(TARGETS)


@pytest.mark.parametrize("blocks", [1, 8])
def test_a_target_that_fails_more_often_is_named(run_file: NewRun, blocks: int) -> None:
    summary = summarize(loaded(run_file(), fails=0.05, blocks=blocks).read())
    (warning,) = about(summary, "A target does not do as the others")
    assert "(10.0.0.2:8001: " in warning
    assert "of its requests failed" in warning
    assert "p50" not in warning


def test_of_two_targets_the_slower_is_named(run_file: NewRun) -> None:
    (header,) = run_file().header(("xla",)).lines
    run = run_file()
    assert isinstance(header, Header)
    run.lines = [replace(header, arms=(Arm("xla", "xla", "digits", "fast:1,slow:1"),))]
    part, random = np.arange(1000) % 2, np.random.default_rng(0)
    latencies_ms = 5 * random.lognormal(0, 0.5, part.size) * np.where(part == 1, 2.0, 1.0)
    run.block("xla", latencies_ms, load=OPEN, due_ns=np.arange(1000) * 10_000_000, columns={"target": part})
    (warning,) = about(summarize(run.read()), "A target")
    assert "slow:1: its p50 is" in warning
    assert "fast:1" not in warning


def test_targets_that_are_alike_are_not_told_apart(run_file: NewRun) -> None:
    summary = summarize(loaded(run_file()).read())
    assert not about(summary, "A target")
    assert [name for name, _ in summary.by_target] == list(TARGETS)
    assert sum(point.requests for _, point in summary.by_target) == summary.points[0].requests


def test_one_target_has_no_table_of_its_own(compared: NewRun) -> None:
    summary = summarize(compared().read())
    assert not summary.by_target
    assert not tables.by_target(summary).columns


def test_a_slow_generator_among_several_is_named_as_a_measurement_fault(run_file: NewRun) -> None:
    run = loaded(run_file(), slow=1.5, column="generator", generator=machines())
    summary = summarize(run.read(GeneratorLine("gen2:7070", "second", 1, ENVIRONMENT)))
    (warning,) = about(summary, "A generator measured what the others did not")
    assert "(gen2:7070: its p50 is 1.4" in warning
    assert not about(summary, "A target")
    assert [name for name, _ in summary.by_generator] == ["gen1:7070", "gen2:7070", "gen3:7070"]
    (note,) = (note for note in summary.notes if note.startswith("Sent from"))
    assert "gen2:7070 (second, processes: 1)" in note
    assert "to within 0.25 ms" in note
    assert "drifted by up to 0.5 ms" in note


def test_generators_keep_their_names_where_not_all_of_them_sent(run_file: NewRun) -> None:
    run, closed = run_file().header(("xla",)), LoadLine("closed", concurrency=1)
    run.block("xla", [5.0] * 100, load=closed, generator=machines(("gen2:7070",)))
    columns = {"generator": np.arange(600) % 2}
    run.block("xla", np.where(columns["generator"], 9.0, 5.0), load=OPEN, generator=machines(), columns=columns)
    run.block("xla", np.where(columns["generator"], 9.0, 5.0), load=OPEN, generator=machines(), columns=columns)
    summary = summarize(run.read())
    sent = {(point.label, name): point.requests for name, point in summary.by_generator if point.requests}
    open_loop = {("100/s poisson", name): 600 for name in ("gen1:7070", "gen2:7070")}
    assert sent == {("1 at a time", "gen2:7070"): 100} | open_loop
    (warning,) = about(summary, "A generator measured what the others did not")
    assert "100/s poisson (gen2:7070: its p50 is 1.8 times" in warning


@pytest.mark.parametrize(("error_ms", "warned"), [(90.0, False), (600.0, True)])
def test_a_clock_that_is_not_known_well_enough_for_the_block_is_a_warning(
    run_file: NewRun, error_ms: float, warned: bool
) -> None:
    summary = summarize(loaded(run_file(), generator=machines(clock_error_ms=error_ms)).read())
    assert bool(about(summary, "Clocks of generators")) is warned


@pytest.mark.parametrize(
    ("drift_ms", "error_ms", "warned"), [(-90.0, 1.0, False), (-3000.0, 1.0, True), (500, 250, False)]
)
def test_a_clock_that_jumped_during_a_block_is_a_warning(
    run_file: NewRun, drift_ms: float, error_ms: float, warned: bool
) -> None:
    moved = machines(clock_drift_ms=drift_ms, clock_error_ms=error_ms)
    summary = summarize(loaded(run_file(), generator=moved).read())
    assert bool(about(summary, "A generator's clock jumped")) is warned
