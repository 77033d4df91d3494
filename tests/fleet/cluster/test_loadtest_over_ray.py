"""loadtest on real Ray, with several nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from tests.fleet.cluster.conftest import until
from tests.loadtest.conftest import StartPuppet, start_puppet, start_server

from xlaserve_loadtest.cli import main
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.study import ray_nodes
from xlaserve_loadtest.study import sweep as command
from xlaserve_loadtest.study.record import read

__all__ = ["start_puppet", "start_server"]  # fixtures
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("ray")

MARK = "TEST_OF_LOADTEST_OVER_RAY"
SWEEP = ("--mode", "xla", "--duration", "0.5", "--processes", "1", "--no-control", "--models", "builtin:digits")


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the test starts has it in its environment."""
    monkeypatch.setenv(MARK, uuid4().hex)


def test_the_nodes_of_a_cluster_send_one_load(ray_cluster: Any, start_puppet: StartPuppet, tmp_path: Path) -> None:
    for _ in range(2):
        ray_cluster.add_node(num_cpus=1)
    file = tmp_path / "run.gz"
    load = ("--mode", "xla", "--no-control", "--rate", "200", "--duration", "2", "--workers", "1", "--full-duration")
    assert main(["--target", start_puppet(), *load, "--record", str(file), "--ray", ray_cluster.address]) == 0
    run = read_run(file)
    assert len({line.address for line in run.generators}) == 2
    (block,) = run.blocks
    for own in block.generator.machines:
        assert own.sends == pytest.approx(block.generator.sends / 2, rel=0.2)
    until(lambda: not _processes("xlaserve_loadtest.run.worker"), "workers of generators were left")


def test_a_study_is_measured_on_all_nodes_and_goes_on_without_one_that_is_lost(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [ray_cluster.add_node(num_cpus=1) for _ in range(2)]
    # They are one machine, of which a study uses one node.
    monkeypatch.setattr(ray_nodes, "choose", lambda probes: (list(probes), []))
    began = threading.Event()
    tell = command._tell

    def note(line: str) -> None:
        tell(line)
        if line.startswith("[2/4]"):
            began.set()

    def lose() -> None:
        began.wait()
        until(lambda: len(_processes("xlaserve_loadtest", "--config")) >= 2, "two cells were not measured")
        ray_cluster.remove_node(nodes[0], allow_graceful=False)

    monkeypatch.setattr(command, "_tell", note)
    losing = threading.Thread(target=lose)
    losing.start()
    out = tmp_path / "out"
    assert command.main([*SWEEP, "--batch", "1,2,4,8", "--out", str(out), "--ray", ray_cluster.address]) == 0
    losing.join()
    found = read(out)
    assert len(found.entries) == 4
    assert all(entry.results["xla"].images_per_s for entry in found.entries.values())
    assert len(list((out / "runs").glob("*.gz"))) == 4
    assert "is lost: " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_leaves_nothing_behind(ray_cluster: Any, tmp_path: Path, number: signal.Signals) -> None:
    ray_cluster.add_node(num_cpus=1)
    sweep = [sys.executable, "-m", "xlaserve_loadtest", "sweep", *SWEEP, "--duration", "600"]
    process = subprocess.Popen(
        [*sweep, "--out", str(tmp_path / "out"), "--ray", ray_cluster.address], stderr=subprocess.PIPE, text=True
    )
    until(lambda: process.poll() is not None or _processes("xlaserve", "serve"), "no server was started")
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command goes on from here" in said
    assert not _processes("xlaserve", "serve")
    assert not _processes("xlaserve_loadtest", "--config")


def _processes(*words: str) -> list[psutil.Process]:
    """The processes of this test whose command line has all of these words."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.environ().get(MARK) == os.environ[MARK]
            if is_ours and process.status() != psutil.STATUS_ZOMBIE and {*words} <= {*process.cmdline()}:
                found.append(process)
    return found
