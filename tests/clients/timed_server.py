"""A server of known times, for clients that measure: every request takes one lane for exactly so long.

python -m tests.clients.timed_server SECONDS READY_FILE
"""

# ruff: noqa: N802 (the methods of a gRPC servicer are named by its contract)

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from xlaserve_loadtest.targets.null_server import announce
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

THREADS: Final = 64
SPIN_S: Final = 0.0003
"""How long before the end of a request the clock is polled: a thread wakes up late by less than that."""


class Timed(oip_grpc.GRPCInferenceServiceServicer):
    """Answers one request after the other, in order, each `seconds` after it was begun."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Any) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="timed", version="1")

    def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        metadata = oip.ModelMetadataResponse(name=request.name)
        metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 256])
        metadata.outputs.add(name="y", datatype="FP32", shape=[-1, 1])
        return metadata

    def ModelConfig(self, request: oip.ModelConfigRequest, context: Any) -> oip.ModelConfigResponse:
        config = oip.ModelConfig(name=request.name, max_batch_size=8)
        config.input.add(name="x")
        return oip.ModelConfigResponse(config=config)

    def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        with self._lock:
            end_s = self._free_at_s = max(time.monotonic(), self._free_at_s) + self._seconds
        time.sleep(max(end_s - time.monotonic() - SPIN_S, 0))
        while time.monotonic() < end_s:
            pass
        response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="y", datatype="FP32", shape=[request.inputs[0].shape[0], 1])
        response.raw_output_contents.append(bytes(4 * request.inputs[0].shape[0]))
        return response


def serve(seconds: float, ready: Path) -> None:
    """Serves on a free port of loopback until SIGTERM."""
    server = grpc.server(ThreadPoolExecutor(THREADS))
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(Timed(seconds), server)  # type: ignore[abstract]
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(ready, port)
    server.wait_for_termination()


if __name__ == "__main__":
    serve(float(sys.argv[1]), Path(sys.argv[2]))
