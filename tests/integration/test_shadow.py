"""Shadows of real models, and what `xlaserve compare-versions` says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import grpc
import pytest
from tests.integration.conftest import DIGITS, Server, StartServer

from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc

PATIENCE_S = 60
SHADOWED = {**DIGITS, "modes": ["xla", "graph"], "shadow": {"mode": "graph", "share": 1.0}}


def compare_versions(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xlaserve", "compare-versions", "--server", server.grpc, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def wait_until_compared(server: Server, images: int) -> None:
    compared = partial(server.metric, "xlaserve_shadow_agreement_count")
    server.wait_for(lambda: compared() >= images, f"{images} images were not compared")


@pytest.fixture(scope="module")
def server(start_module_server: StartServer) -> Server:
    return start_module_server({"models": [SHADOWED]})


def test_a_mode_that_computes_the_same_agrees(server: Server, scans: dict[str, bytes]) -> None:
    before = compare_versions(server)
    assert before.returncode == 1
    assert "no request had a shadow yet" in before.stderr
    with grpc.insecure_channel(server.grpc) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        for compared in range(1, 9):
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


def test_a_server_ends_while_shadows_run(start_server: StartServer, scans: dict[str, bytes]) -> None:
    server = start_server({"models": [SHADOWED]})
    with grpc.insecure_channel(server.grpc) as channel:
        stub = vision_pb2_grpc.VisionStub(channel)
        for _ in range(20):
            stub.Classify(pb.ClassifyRequest(model="digits", images=[scans["3"]] * 8), timeout=PATIENCE_S)
    assert server.stop() == 0
    assert "Traceback" not in server.stderr
