"""`fronts: auto` where the environment says that there is a GPU, on a CPU that stands in for it."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
from tests.integration.conftest import StartServer
from tests.integration.test_fronts import processes

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

DIGITS = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1, 4]}
CORES = 3
MORE_CORES = f"""
import os

os.sched_getaffinity = lambda pid: {{*range({CORES})}}
"""


def test_the_first_front_is_followed_by_as_many_as_the_gpu_needs(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MORE_CORES)  # Python runs this before the server
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    server = start_server({"models": [DIGITS]}, env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0"})
    assert "fronts: 1 more, for up to" in server.stderr
    assert {*processes(server)} == {"xlaserve engine", "xlaserve front 1", "xlaserve front 2"}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ServerReady.with_call(pb.ServerReadyRequest(), timeout=60)
        assert dict(call.trailing_metadata())["xlaserve-front"] in ("1/2", "2/2")
