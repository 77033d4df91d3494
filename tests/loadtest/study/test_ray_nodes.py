"""Cells of a sweep on the nodes of a cluster: a fake of Ray."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from tests.loadtest.fake_ray import FakeRay, install
from tests.loadtest.study.conftest import MakeSweep

from xlaserve_loadtest.run import environment, ray_cluster
from xlaserve_loadtest.run.environment import Machine
from xlaserve_loadtest.run.handshake import own_version
from xlaserve_loadtest.run.ray_cluster import Node
from xlaserve_loadtest.study import catalog, ray_nodes
from xlaserve_loadtest.study import sweep as command
from xlaserve_loadtest.study.measure import Measurement, StoppedError
from xlaserve_loadtest.study.ray_nodes import Measurer, Probe, RayNodes, choose
from xlaserve_loadtest.study.record import Cell, ModeResult, SweepFile, read
from xlaserve_loadtest.study.sweep import Plan
from xlaserve_loadtest.targets.target import TargetError

GOOD = ModeResult(images_per_s=10.0)
MODES = ("xla", "graph")
CELLS = [Cell("builtin:digits", None, batch) for batch in (1, 2, 4, 8)]
Measure = Callable[..., dict[str, ModeResult]]


@pytest.fixture
def how(tmp_path: Path) -> Measurement:
    return Measurement(MODES, "graph", 0.5, 4, 20.0, False, True, tmp_path / "out" / "runs")


@pytest.fixture
def plan() -> Plan:
    return Plan(catalog.find(["VGG16"]), MODES, (1, 2, 4, 8), (64,))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Two nodes, which are machines of their own."""
    monkeypatch.setattr(ray_nodes, "choose", lambda probes: (list(probes), []))
    return install(FakeRay("a", "b", has_processes=False), monkeypatch)


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], None]:
    """Says how nodes measure a cell."""

    def use(measure: Measure) -> None:
        monkeypatch.setattr(ray_nodes, "measure", measure)

    return use


def machine(name: str, **changes: object) -> Machine:
    return Machine(name, name, dataclasses.replace(environment.describe(), **changes))  # type: ignore[arg-type]


def node(name: str) -> Node:
    return Node(name, "10.0.0.1", 2.0, 0.0)


def test_every_node_measures_one_cell_at_a_time_and_gives_the_record_back(
    *,
    ray: FakeRay,
    measured_by: Callable[[Measure], None],
    sweep: MakeSweep,
    how: Measurement,
    plan: Plan,
    tmp_path: Path,
) -> None:
    both = threading.Barrier(2, timeout=20)

    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        both.wait()  # two cells are measured at the same time
        assert on_node == dataclasses.replace(how, folder=on_node.folder)
        (on_node.folder / f"{cell.batch}.gz").write_bytes(b"run")
        return dict.fromkeys(MODES, GOOD)

    measured_by(measure)
    told: list[str] = []
    with RayNodes("head:1", told.append) as nodes, SweepFile(tmp_path / "out", sweep()) as file:
        assert nodes.environment == environment.describe()
        command.run(plan, file, lambda cell: nodes.measure(cell, how), at_once=nodes.count, tell=told.append)
    found = read(tmp_path / "out")
    assert {cell.batch for cell in found.entries} == {1, 2, 4, 8}
    assert all(entry.results == dict.fromkeys(MODES, GOOD) for entry in found.entries.values())
    assert {path.name for path in how.folder.iterdir()} == {"1.gz", "2.gz", "4.gz", "8.gz"}
    assert [own for own, _ in ray.calls] == ["a", "b"]
    for _, options in ray.calls:
        assert (options["num_cpus"], options["max_restarts"], options["max_concurrency"]) == (2.0, 0, 2)
    assert "measuring on 127.0.0.1 (a), 127.0.0.1 (b)" in told
    assert "keras.applications:VGG16, 64 px, batch 4, graph: 10 images/s" in told
    assert ray.address is None


def test_the_cell_of_a_node_that_is_lost_is_measured_on_another(
    ray: FakeRay, measured_by: Callable[[Measure], None], how: Measurement
) -> None:
    started = threading.Event()

    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        if not started.is_set():
            started.set()
            ray.kill_node("a")
        return dict.fromkeys(MODES, GOOD)

    measured_by(measure)
    told: list[str] = []
    with RayNodes("head:1", told.append) as nodes:
        for cell in CELLS:
            assert nodes.measure(cell, how) == dict.fromkeys(MODES, GOOD)
    assert "builtin:digits, own size, batch 1: lost on 127.0.0.1 (a): the worker of a died" in told
    assert "node 127.0.0.1 (a) is lost: node a is not alive" in told


def test_a_cell_that_is_lost_again_and_again_has_that_as_its_result_and_the_nodes_go_on(
    ray: FakeRay, measured_by: Callable[[Measure], None], how: Measurement
) -> None:
    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        if cell.batch == 1:
            for name in ("a", "b"):
                ray.crash(name)
        return dict.fromkeys(MODES, GOOD)

    measured_by(measure)
    with RayNodes("head:1", lambda line: None) as nodes:
        reasons = {result.reason for result in nodes.measure(CELLS[0], how).values()}
        assert len(reasons) == 1
        assert str(reasons.pop()).startswith("the load test was lost 2 times: the worker of ")
        assert nodes.measure(CELLS[1], how) == dict.fromkeys(MODES, GOOD)


def test_an_error_on_a_node_is_shown_by_its_last_line(
    ray: FakeRay, measured_by: Callable[[Measure], None], how: Measurement
) -> None:
    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        raise PermissionError("no place to write")

    measured_by(measure)
    with RayNodes("head:1", lambda line: None) as nodes:
        result = nodes.measure(CELLS[0], how)["xla"]
    assert result.reason == "the load test was lost 2 times: PermissionError: no place to write"


def test_where_no_node_is_left_the_sweep_ends_and_keeps_what_it_has(
    *,
    ray: FakeRay,
    measured_by: Callable[[Measure], None],
    sweep: MakeSweep,
    how: Measurement,
    plan: Plan,
    tmp_path: Path,
) -> None:
    done: list[Cell] = []

    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        if len(done) == 2:
            for name in ("a", "b"):
                ray.kill_node(name)
        done.append(cell)
        return dict.fromkeys(MODES, GOOD)

    measured_by(measure)
    with (
        RayNodes("head:1", lambda line: None) as nodes,
        SweepFile(tmp_path / "out", sweep()) as file,
        pytest.raises(TargetError, match=r"^--ray head:1: no node is left$"),
    ):
        command.run(plan, file, lambda cell: nodes.measure(cell, how))
    assert len(read(tmp_path / "out").entries) == 2


def test_an_interruption_ends_what_runs_on_the_nodes(
    *,
    ray: FakeRay,
    measured_by: Callable[[Measure], None],
    sweep: MakeSweep,
    how: Measurement,
    plan: Plan,
    tmp_path: Path,
) -> None:
    running = threading.Barrier(2, timeout=20)
    begun: list[Cell] = []
    ended: list[Cell] = []

    def measure(cell: Cell, on_node: Measurement, is_over: Event) -> dict[str, ModeResult]:
        begun.append(cell)
        if len(begun) <= 2 and running.wait() == 0:
            return dict.fromkeys(MODES, GOOD)
        assert is_over.wait(20)
        ended.append(cell)
        raise StoppedError

    def tell(line: str) -> None:
        if line.endswith("images/s"):
            raise KeyboardInterrupt

    measured_by(measure)
    with (
        pytest.raises(KeyboardInterrupt),
        RayNodes("head:1", lambda line: None) as nodes,
        SweepFile(tmp_path / "out", sweep()) as file,
    ):
        command.run(plan, file, lambda cell: nodes.measure(cell, how), at_once=nodes.count, tell=tell)
    assert len(ended) == len(begun) - 1 >= 1
    assert len(read(tmp_path / "out").entries) == 1
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(20)
            assert not thread.is_alive()


def test_nodes_that_would_disturb_each_other_or_differ_are_left_out_and_it_is_said() -> None:
    probes: dict[Node, Probe | Exception] = {
        node("odd"): Probe(own_version(), machine("odd", cpu="Another CPU")),
        node("first"): Probe(own_version(), machine("1")),
        node("twin"): Probe(own_version(), machine("1")),
        node("second"): Probe(own_version(), machine("2")),
        node("old"): Probe("xlaserve 0.0.1", machine("3")),
        node("busy"): TimeoutError("no answer within 60 s"),
    }
    chosen, why = choose(probes)
    assert [own.id for own in chosen] == ["first", "second"]
    twin, old, busy, odd = why
    assert twin.startswith("node 10.0.0.1 (twin) is left out: it is the same machine as node 10.0.0.1 (first)")
    assert old.startswith("node 10.0.0.1 (old) is left out: it runs xlaserve 0.0.1, and this side ")
    assert busy == "node 10.0.0.1 (busy) is left out: no answer within 60 s; its cores may be in use"
    assert odd.startswith("node 10.0.0.1 (odd) is left out: it is not as node 10.0.0.1 (first) (cpu: ")
    assert odd.endswith("became Another CPU)")
    assert choose({node("busy"): TimeoutError("late")})[0] == []


def test_the_command_measures_on_nodes_and_its_figures_are_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
    measured_by: Callable[[Measure], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(FakeRay("a", "b", has_processes=False), monkeypatch)  # two nodes of this one machine
    there = machine("there", cpu="A faster CPU")
    monkeypatch.setattr(Measurer, "probe", lambda measurer: Probe(own_version(), there))
    measured_by(lambda cell, how, is_over: dict.fromkeys(how.modes, GOOD))
    arguments = ["--models", "VGG16", "--batch", "1,8", "--resolution", "64", "--out", str(tmp_path / "out")]
    assert command.main([*arguments, "--ray", "head:6379"]) == 0
    assert "node 127.0.0.1 (b) is left out: it is the same machine as" in capsys.readouterr().err
    found = read(tmp_path / "out")
    assert (found.environment["cpu"], len(found.entries)) == ("A faster CPU", 2)
    assert (tmp_path / "out" / "report.html").exists()
    assert command.main(arguments) == 2  # figures of two machines don't mix
    assert "another machine (cpu: A faster CPU" in capsys.readouterr().err


def test_without_nodes_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(FakeRay("a", has_processes=False), monkeypatch)
    is_over = threading.Event()
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 0.1)
    monkeypatch.setattr(Measurer, "probe", lambda measurer: is_over.wait(20))
    assert command.main(["--models", "VGG16", "--out", str(tmp_path / "out"), "--ray", "head:1"]) == 1
    is_over.set()
    said = capsys.readouterr().err
    assert "node 127.0.0.1 (a) is left out: no answer within 0.1 s; its cores may be in use\n" in said
    assert said.endswith("loadtest sweep: --ray head:1: none of 1 nodes can measure\n")
