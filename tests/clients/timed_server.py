"""A server of known times, for clients that measure: every request takes one lane for exactly so long.

python -m tests.clients.timed_server SECONDS READY_FILE [SLOW_EVERY SLOW_SECONDS]

One in SLOW_EVERY requests, in turn, takes SLOW_SECONDS.

When it ends, it writes how late it was (seconds, a JSON list with a number for each request) to READY_FILE.late.
"""

# ruff: noqa: N802 (the methods of a gRPC servicer are named by its contract)

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.targets.null_server import announce
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

THREADS: Final = 64
SPIN_S: Final = 0.0003
"""How long before the end of a request the clock is polled: a thread wakes up late by less than that."""
START_TIMEOUT_S: Final = 30.0


class Timed(oip_grpc.GRPCInferenceServiceServicer):
    """Answers one request after the other, in order, each `seconds` after it was begun.

    One in `slow_every`, in turn, takes `slow_seconds` (0: none).
    """

    def __init__(self, seconds: float, slow_every: int = 0, slow_seconds: float = 0.0) -> None:
        self.late_s: list[float] = []
        """How long after its time each request was answered: the machine's own error."""
        self._takes_s = itertools.cycle([*[seconds] * (slow_every - 1), slow_seconds] if slow_every else [seconds])
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
            end_s = self._free_at_s = max(time.monotonic(), self._free_at_s) + next(self._takes_s)
        time.sleep(max(end_s - time.monotonic() - SPIN_S, 0))
        while time.monotonic() < end_s:
            pass
        self.late_s.append(time.monotonic() - end_s)
        response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="y", datatype="FP32", shape=[request.inputs[0].shape[0], 1])
        response.raw_output_contents.append(bytes(4 * request.inputs[0].shape[0]))
        return response


def serve(ready: Path, timed: Timed) -> None:
    """Serves on a free port of loopback until SIGTERM."""
    server = grpc.server(ThreadPoolExecutor(THREADS))
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(timed, server)
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(ready, port)
    server.wait_for_termination()
    _late_file(ready).write_text(json.dumps(timed.late_s))


def _late_file(ready: Path) -> Path:
    return ready.with_name(f"{ready.name}.late")


@dataclass(slots=True)
class Server:
    """A server that runs in a process of its own."""

    address: str
    late_s: list[float] = field(default_factory=list)
    """How late it answered each request; known once it has ended."""


@contextmanager
def running(seconds: float, slow_every: int = 0, slow_seconds: float = 0.0) -> Iterator[Server]:
    """Runs the server in a process of its own; for the arguments see `Timed`."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        arguments = (str(seconds), str(ready), *((str(slow_every), str(slow_seconds)) if slow_every else ()))
        process = subprocess.Popen([sys.executable, "-m", "tests.clients.timed_server", *arguments])
        try:
            until_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError("the server does not start")
                time.sleep(0.05)
            server = Server(json.loads(ready.read_text())["grpc"])
            yield server
        finally:
            process.terminate()
            process.wait()
        server.late_s = json.loads(_late_file(ready).read_text())


def by_plain_client(address: str, requests: int) -> list[float]:
    """Returns how long requests took, in seconds, one after the other: what the least of clients sees."""
    took_s = []
    with grpc.insecure_channel(address) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        request = oip.ModelInferRequest(model_name="timed", raw_input_contents=[bytes(4 * 256)])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 256])
        for _ in range(requests + 1):
            began_s = time.monotonic()
            stub.ModelInfer(request)
            took_s.append(time.monotonic() - began_s)
    return took_s[1:]  # the first connected


def by_loadtest(address: str, folder: Path, *options: str) -> Run:
    """Measures the server with loadtest's command, and returns what it recorded."""
    file = folder / "loadtest.run.jsonl.gz"
    file.unlink(missing_ok=True)
    asked = ("--target", address, "--model", "timed", "--warmup", "1", *options)
    command = (sys.executable, "-m", "xlaserve_loadtest", *asked, "--record", str(file))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"loadtest: {done.stdout}{done.stderr}")
    return read_run(file)


if __name__ == "__main__":
    _, seconds, path, *slow = sys.argv
    serve(Path(path), Timed(float(seconds), *((int(slow[0]), float(slow[1])) if slow else ())))  # type: ignore[abstract]
