"""Shadows of real models, and what `loadtest compare-versions` says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.conftest import DIGITS, DIGITS_SIZE, NoopClient, Server, StartServer

from xlaserve.programs.tf.device import usable_cores
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc

PATIENCE_S = 60
SHADOWED = {**DIGITS, "modes": ["xla", "graph"], "shadow": {"mode": "graph", "share": 1.0}}


def compare_versions(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve_loadtest", "compare-versions", "--target", server.grpc, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def save_constant(path: Path) -> str:
    """Saves a model of digits' shape that calls everything a zero, and returns the path."""
    from xlaserve.models.networks.keras_runtime import keras

    pixels = keras.Input((*DIGITS_SIZE, 3), dtype="uint8")
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(pixels))
    bias = keras.initializers.Constant([9.0, *[0.0] * 9])
    scores = keras.layers.Dense(10, "softmax", kernel_initializer="zeros", bias_initializer=bias)(x)
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        keras.Model(pixels, scores).save(path)
    return str(path)


def wait_until_compared(server: Server, images: int, model: str = "digits") -> None:
    compared = partial(server.metric, "xlaserve_shadow_agreement_count", model=model)
    server.wait_for(lambda: compared() >= images, f"{images} images were not compared")


@pytest.fixture(
    scope="module",
    params=[{"fronts": 0}, {"fronts": 2, "engines": min(2, usable_cores())}],
    ids=["one process", "fronts and engines"],
)
def server(request: pytest.FixtureRequest, start_module_server: StartServer) -> Server:
    return start_module_server({"models": [SHADOWED], **request.param})


def test_a_mode_that_computes_the_same_agrees(
    server: Server, scans: dict[str, bytes], connect: Callable[[Server], NoopClient]
) -> None:
    before = compare_versions(server)
    assert before.returncode == 1
    assert "no request had a shadow yet" in before.stderr
    for compared in range(1, 9):  # each at either front
        stub = vision_pb2_grpc.VisionStub(connect(server).channel)
        stub.Classify(pb.ClassifyRequest(model="digits", images=[*scans.values()][:4]), timeout=PATIENCE_S)
        wait_until_compared(server, 4 * compared)
    assert server.metric("xlaserve_requests_total", model="digits") == 8, "a shadow is no request"
    assert server.metric("xlaserve_images_total", model="digits") == 32
    assert server.metric("xlaserve_batch_size_count", model="digits", mode="graph") == 0

    done = compare_versions(server, "digits", "--json", "--min-agreement", "0.5")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)
    assert (found["model"], found["version"], found["mode"]) == ("digits", "1", "xla")
    assert (found["shadow_version"], found["shadow_mode"]) == ("1", "graph")
    assert (found["images"], found["pairs"], found["dropped"]) == (32, 8, {})
    assert found["agreement"] == {"value": 1.0, "low": pytest.approx(0.893, abs=1e-3), "high": 1.0}
    assert found["largest_difference"] < 1e-4
    assert found["latency_ratio"]["low"] < found["latency_ratio"]["value"] < found["latency_ratio"]["high"]
    text = compare_versions(server, "--min-agreement", "0.95")
    assert text.returncode == 3, "32 images do not show it"
    reason = "failed --min-agreement 0.95: the agreement's interval begins at 0.8928"
    assert text.stderr == f"digits: 1 graph as the shadow of 1 xla: {reason}\n"
    assert "digits: 1 graph as the shadow of 1 xla\n" in text.stdout
    assert "1.0000 agree (95% interval 0.893 to 1.000, 32 images)" in text.stdout


def test_a_request_in_the_shadows_own_mode_has_none(server: Server, scans: dict[str, bytes]) -> None:
    def shadows() -> list[Any]:
        (model,) = stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S).models
        return [(shadow.mode, shadow.shadow_mode) for shadow in model.shadows]

    with grpc.insecure_channel(server.grpc) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        stub.Classify(pb.ClassifyRequest(model="digits", images=[scans["3"]], mode="graph"), timeout=PATIENCE_S)
        assert shadows() in ([], [("xla", "graph")])


def test_a_wrong_version_and_a_slow_mode_fail_the_conditions(
    start_server: StartServer, scans: dict[str, bytes], tmp_path: Path
) -> None:
    wrong = {
        "name": "digits",
        "version": 2,
        "buckets": [8],
        "source": save_constant(tmp_path / "wrong.keras"),
        "modes": ["xla"],
    }
    right = {**DIGITS, "buckets": [8], "version": 1, "modes": ["xla"], "version_labels": {"stable": 1, "next": 2}}
    slow = {
        **right,
        "name": "slow",
        "version_labels": {},
        "modes": ["xla", "eager"],
        "shadow": {"mode": "eager", "share": 1.0},
    }
    fast = {**slow, "name": "fast", "modes": ["eager", "xla"], "shadow": {"mode": "xla", "share": 1.0}}
    shadowed = [{**right, "shadow": {"version": "next", "share": 1.0}}, wrong, slow, fast]
    server = start_server({"models": shadowed, "load_process": False, "fronts": 2})
    with grpc.insecure_channel(server.grpc) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        for model in ("digits", "slow", "fast"):
            for compared in range(1, 13):
                request = pb.ClassifyRequest(model=model, images=[*scans.values()][:8])
                assert stub.Classify(request, timeout=PATIENCE_S).version == "1"
                wait_until_compared(server, 8 * compared, model)

    wrongly = compare_versions(server, "digits", "--min-agreement", "0.9")
    title = "digits: 2 xla as the shadow of 1 xla"
    assert wrongly.returncode == 3
    agree = "  answers:  0.1250 agree (95% interval 0.073 to 0.206, 96 images), largest difference 1"
    assert wrongly.stdout.splitlines()[:2] == [title, agree]
    assert wrongly.stderr == f"{title}: failed --min-agreement 0.9: the agreement's interval begins at 0.0730\n"
    assert compare_versions(server, "digits", "--min-agreement", "0.05").returncode == 0

    slowly = compare_versions(server, "slow", "--min-agreement", "0.9", "--fail-if-slower")
    assert slowly.returncode == 3
    said = r"slow: 1 eager as the shadow of 1 xla: failed --fail-if-slower: \d+\.\d{3} times the latency\n"
    assert re.fullmatch(said, slowly.stderr)
    assert re.search(r"^  latency:  slower, .* times the latency \(95% interval .*, 12 pairs", slowly.stdout, re.M)
    quickly = compare_versions(server, "fast", "--min-agreement", "0.9", "--fail-if-slower")
    assert (quickly.returncode, quickly.stderr) == (0, "")
    assert "  latency:  faster, 0." in quickly.stdout


def test_a_server_ends_while_shadows_run(server: Server, scans: dict[str, bytes]) -> None:
    """The module's last test, as it ends the server that the others share."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        for _ in range(20):
            stub.Classify(pb.ClassifyRequest(model="digits", images=[scans["3"]] * 8), timeout=PATIENCE_S)
    assert server.stop() == 0
    assert "Traceback" not in server.stderr
