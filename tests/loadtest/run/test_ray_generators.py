"""Generators on the nodes of a cluster: a fake of Ray, whose actors are processes; the sockets are real."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.loadtest.conftest import StartPuppet
from tests.loadtest.fake_ray import FakeRay, install

from xlaserve_loadtest.cli import main
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.run import ray_generators
from xlaserve_loadtest.run.ray_cluster import Cluster, Node
from xlaserve_loadtest.run.ray_generators import generators
from xlaserve_loadtest.targets.target import TargetError

LOAD = (
    "--mode",
    "xla",
    "--no-control",
    "--equality-images",
    "0",
    "--rate",
    "100",
    "--workers",
    "1",
    "--duration",
    "1",
    "--warmup",
    "0.2",
)


def run(target: str, file: Path, *options: str) -> int:
    return main(["--target", target, *LOAD, "--full-duration", "--record", str(file), "--ray", "head:6379", *options])


def test_each_node_sends_its_part_and_nothing_is_left_afterwards(
    start_puppet: StartPuppet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = install(FakeRay("a", "b"), monkeypatch)
    ray.alive["gone"] = False
    file = tmp_path / "run.gz"
    assert run(start_puppet(), file) == 0
    recorded = read_run(file)
    assert [node for node, _ in ray.calls] == ["a", "b"]
    for _, options in ray.calls:
        assert (options["scheduling_strategy"].soft, options["num_cpus"], options["max_restarts"]) == (False, 0, 0)
    assert len({line.address for line in recorded.generators}) == 2
    assert set(recorded.requests["generator"].tolist()) == {0, 1}
    assert ray.address is None
    actors = [process for process in psutil.Process().children() if "spawn_main" in " ".join(process.cmdline())]
    assert not psutil.wait_procs(actors, timeout=20)[1]


async def test_as_many_generators_as_were_asked_for_take_the_nodes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listening:
        def __init__(self, host: str, key: bytes) -> None:
            made.append((host, key))
            self._number = len(made)

        def address(self) -> str:
            if self._number > 5:
                raise OSError("no free port")
            return f"10.0.0.1:{self._number}"

    made: list[tuple[str, bytes]] = []
    ray = install(FakeRay("a", "b", has_processes=False), monkeypatch)
    monkeypatch.setattr(ray_generators, "RayGenerator", Listening)
    async with generators("head:1", 5) as found:
        assert ray.address == "head:1"
        assert found.addresses == tuple(f"10.0.0.1:{number}" for number in range(1, 6))
        assert made == [("127.0.0.1", found.key)] * 5
    assert [node for node, _ in ray.calls] == [*"ababa"]
    with pytest.raises(TargetError, match=r"^--ray head:1: node 127.0.0.1 \(a\): no generator: OSError: no free port$"):
        async with generators("head:1", 1):
            pass
    assert ray.address is None


def test_without_the_package_it_is_said_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_puppet: StartPuppet, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(start_puppet(), tmp_path / "run.gz") == 1
    assert "loadtest: --ray needs Ray: pip install 'xlaserve[ray]'\n" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = install(FakeRay(), monkeypatch)
    ray.failure = ConnectionError("no such cluster\nmore")
    with pytest.raises(TargetError, match=r"^--ray head:1: no such cluster$"), Cluster("head:1"):
        pass


def test_nodes_without_cores_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeRay("a", "b", cpus=0), monkeypatch)
    with (
        Cluster("head:1") as cluster,
        pytest.raises(TargetError, match=r"^--ray head:1: none of 2 nodes has cores for work$"),
    ):
        cluster.nodes()
    install(FakeRay("b", "a"), monkeypatch)
    with Cluster("head:1") as cluster:
        assert cluster.nodes() == [Node("a", "127.0.0.1", 2.0, 0.0), Node("b", "127.0.0.1", 2.0, 0.0)]


def test_what_happens_on_sigterm_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = install(FakeRay("a"), monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    connect = ray.init

    def init(address: str, **options: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connect(address, **options)

    monkeypatch.setattr(ray, "init", init)
    with Cluster("head:1"):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h:1", "--generators", "2"], "--generators is for --ray"),
        (["--target", "h:1", "--ray", "auto", "--generator", "g:1"], "--generator and --ray exclude each other"),
        (["--target", "null", "--ray", "auto"], "--generator, --ray: --in-process sends nothing"),
        (["--in-process", "--ray", "auto"], "--generator, --ray: --in-process sends nothing"),
        (["--target", "h:1", "--ray", "auto", "--generators", "257"], "expected up to 256 addresses"),
        (["--target", "h:1", "--ray", "auto", "--generators", "0"], "expected a whole number over 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
