from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import processes
from xlaserve.config import Mode
from xlaserve.inspection.check import record
from xlaserve_client import VisionClient

pytestmark = pytest.mark.gpu

Run = Callable[..., str]
SCANS = Path(__file__).parents[2] / "scripts" / "samples" / "digits"
MIB = 1024 * 1024


def test_a_server_on_the_device_reads_digits_in_every_mode(device: str) -> None:
    modes = ["xla", "graph", "eager"]
    digits = {"name": "digits", "source": "builtin:digits", "modes": modes, "buckets": [1, 4]}
    scans = sorted(SCANS.glob("*.png"))
    with (
        processes.xlaserve({"device": device, "models": [digits]}) as server,
        VisionClient(server.address, deadline_s=60.0) as client,
    ):
        for mode in modes:
            answer = client.classify([scan.read_bytes() for scan in scans], model="digits", mode=mode, top_k=1)
            labels = [row.categories[0].label for row in answer.classifications]
            assert labels == [scan.name[0] for scan in scans], mode


def test_fronts_bring_an_engine_on_the_device_what_clients_ask(device: str) -> None:
    digits = {"name": "digits", "source": "builtin:digits", "buckets": [1, 4]}
    scans = sorted(SCANS.glob("*.png"))
    config = {"device": device, "models": [digits], "fronts": 2}
    with processes.xlaserve(config) as server, VisionClient(server.address, deadline_s=60.0) as client:

        def labels(scan: Path) -> list[str]:
            answer = client.classify([scan.read_bytes()] * 4, model="digits", top_k=1)
            return [row.categories[0].label for row in answer.classifications]

        with ThreadPoolExecutor(8) as pool:  # calls at once have the client meet both
            for scan, found in zip(scans * 8, pool.map(labels, scans * 8), strict=True):
                assert found == [scan.name[0]] * 4
        used = server.cpu_s_by_role()
        assert {"engine", "front 1", "front 2"} <= used.keys()


def test_a_gpu_has_fronts_unless_told_otherwise(device: str, real_gpu: None) -> None:
    digits = {"name": "digits", "source": "builtin:digits", "buckets": [1, 4]}
    with processes.xlaserve({"device": device, "models": [digits]}) as server:
        assert {"engine", "front 1"} <= server.cpu_s_by_role().keys()


def test_every_mode_computes_what_eager_does_without_tf32(xlaserve: Run, tmp_path: Path) -> None:
    model = {"name": "m", "source": "keras.applications:ResNet50V2", "weights": "random", "input_size": [64, 64]}
    file = tmp_path / "check.json"
    xlaserve("check", {"models": [model]}, "m", "--batches", "1,4", "--json", file)
    (checked,) = record.read(file)
    for arm in (Mode.GRAPH, Mode.XLA):
        for batch in (1, 4):
            program = checked.find(arm, batch)
            assert program is not None
            assert program.difference is not None
            assert program.difference < 1e-4, program


def test_two_lanes_overlap(xlaserve: Run, real_gpu: None) -> None:
    model = {"name": "m", "source": "keras.applications:ResNet50", "weights": "random", "buckets": [32]}
    (entry,) = json.loads(xlaserve("warm", {"models": [model], "lanes": 2}, "--json"))
    # A batch that shares the device with another takes less than twice as long: one copies while the other computes.
    assert entry["run_loaded_s"] < 1.95 * entry["run_s"]


@pytest.mark.parametrize(("settings", "most_mib"), [({}, 4096), ({"gpu_memory_mib": 2048}, 2048 + 1024)])
def test_memory_is_taken_as_needed_or_up_to_a_limit(
    settings: dict[str, Any], most_mib: int, device: str, real_gpu: None
) -> None:
    # TensorFlow would take nearly all of a GPU of 16 GiB or more. CUDA itself takes some hundred MiB as well.
    before = _used_mib()
    digits = {"name": "digits", "source": "builtin:digits", "buckets": [1, 4]}
    with processes.xlaserve({"device": device, "models": [digits], **settings}):
        assert 0 < _used_mib() - before < most_mib


def _used_mib() -> int:
    """Returns the MiB in use on the first GPU, by whomever."""
    command = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
