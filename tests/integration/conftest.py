"""Real servers, each a process on free loopback ports that is always stopped again."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2_grpc as vision_grpc

FRONTS = int(os.environ.get("FRONTS", "0"))
"""Fronts of all servers whose configuration says nothing of them: `make test-fronts` gives them two."""
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
POLL_S = 0.02
TAIL = 20_000

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
DIGITS_SIZE = (32, 32)
DIGITS = {"name": "digits", "source": "builtin:digits", "modes": ["xla", "graph", "eager"], "buckets": [1, 2, 4, 8]}
NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
BROKEN = {"name": "broken", "source": "/nonexistent/secret/broken.keras"}
COMPILES = {"compile_cache": None}
"""The setting of a server that compiles what it serves. Others share a compile cache."""

BRAKED_NOOP = """
import os, time
from xlaserve.engine.program import Compilation
from xlaserve.models.sources.noop import NoopProgram

compile = NoopProgram.compile

def compile_with_brake(self, mode, bucket):
    run = compile(self, mode, bucket).executable

    def executable(images):
        # At least too long for the event loop, so that a thread is what the brake stops.
        time.sleep(float(os.environ.get("BATCH_S", "0.001")))
        while os.path.exists(os.environ["BRAKE"]):
            time.sleep(0.005)
        return run(images)

    return Compilation(executable, 0.0, 0.0)

NoopProgram.compile = compile_with_brake
"""

BOUNDS = max(1, FRONTS)
"""How many times a server has what each front bounds by itself, such as connections."""


def not_with_fronts(reason: str) -> pytest.MarkDecorator:
    """Marks a test of what is otherwise where a server has fronts."""
    return pytest.mark.skipif(FRONTS > 0, reason=f"with fronts {reason}")


MakeRequest = Callable[..., pb.ModelInferRequest]


class Server:
    """An `xlaserve serve` process with `config`; what it says is kept in `folder`.

    Servers share a compile cache beside that, except those whose `config` says otherwise.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._ready_file = folder / "ready.json"
        self._log = folder / "stderr"
        self.config_file = folder / "config.yaml"
        # JSON is YAML as well.
        self.config_file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "xlaserve", "serve", "--config", str(self.config_file)]
        flags = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--ready-file", str(self._ready_file)]
        if FRONTS and "fronts" not in config:
            flags += ["--fronts", str(FRONTS)]
        if "compile_cache" not in config:
            # What another test's server has compiled is not compiled again: most of what a start takes.
            flags += ["--compile-cache", str(folder.parent / "compile_cache")]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**inherited, **(env or {})}
            )
        self.pid = self.process.pid

    @property
    def serving(self) -> psutil.Process:
        """The process that runs the models."""
        children = psutil.Process(self.pid).children()
        return next((child for child in children if child.name() == "engine"), children[0])

    def processes(self) -> list[psutil.Process]:
        """Returns the processes that it consists of now, and those that these have started."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def resident_bytes(self) -> int:
        """Returns the resident memory of its processes; what several share counts for each."""
        total_bytes = 0
        for process in self.processes():
            with suppress(psutil.Error):  # it has just ended
                total_bytes += process.memory_info().rss
        return total_bytes

    def connections(self, address: str) -> Iterator[list[Any]]:
        """Yields for each of its processes the established connections to HOST:PORT."""
        port = int(address.rpartition(":")[2])
        for process in self.processes():
            with suppress(psutil.Error):  # it has just ended
                found = process.net_connections("tcp")
                yield [one for one in found if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]

    @property
    def stderr(self) -> str:
        """What it said so far, on stdout and stderr."""
        return self._log.read_text(errors="replace")

    @property
    def grpc(self) -> str:
        """HOST:PORT; waits until it listens, which is before it is ready."""
        return self._addresses[0]

    @property
    def http(self) -> str:
        """HOST:PORT; waits until it listens, which is before it is ready."""
        return self._addresses[1]

    @property
    def metrics(self) -> str:
        """HOST:PORT of /metrics; waits until it listens, which is before it is ready."""
        return self._addresses[2]

    @property
    def is_ready(self) -> bool:
        return self._ready_file.exists()

    @cached_property
    def _addresses(self) -> tuple[str, str, str]:
        self.wait_for(lambda: "listening: " in self.stderr, "it did not listen")
        # One that was started again after a crash has said it twice.
        *_, found = re.findall(r"listening: gRPC (\S+), HTTP (\S+), metrics ([^\s\"]+)", self.stderr)
        grpc, http, metrics = found
        return grpc, http, metrics

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: self.is_ready, "it was not ready")
        ready = json.loads(self._ready_file.read_text())
        assert ready == {"grpc": self.grpc, "http": self.http, "metrics": self.metrics, "pid": self.pid}

    def wait_for(self, condition: Callable[[], object], otherwise: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once `condition` holds; fails where the server ends first, or `timeout_s` passes."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the server exited with {self.process.returncode}\n{self.stderr}"
            assert time.monotonic() < give_up_at, f"{otherwise} within {timeout_s} s\n{self.stderr}"
            time.sleep(POLL_S)

    def scrape(self) -> str:
        """Returns what /metrics shows now."""
        host, port = self.metrics.rsplit(":", 1)
        connection = HTTPConnection(host, int(port), timeout=STOP_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Returns what /metrics shows now: the sum over the series of `name` that have `labels`."""
        text = self.scrape()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def stop(self) -> int:
        """Sends SIGTERM, waits for the end, and returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits for the end and returns the exit status; what doesn't end is killed and fails the test."""
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not stop within {STOP_TIMEOUT_S} s\n{self.stderr}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that all tests share: leave its models ready. `digits` offers every mode; `broken` failed."""
    config = {
        **COMPILES,  # else what it counts as compiled depends on which tests ran before
        "models": [DIGITS, NOOP, BROKEN],
        "exit_on_model_failure": False,
        "max_message_bytes": 16 * 1024 * 1024,
        "log_level": "debug",
    }
    server = Server(config, tmp_path_factory.mktemp("server"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        status = server.stop()
    assert status == 0, server.stderr


@pytest.fixture(scope="session")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc, UNLIMITED) as channel:
        yield channel


@pytest.fixture(scope="session")
def oip(channel: grpc.Channel) -> oip_grpc.GRPCInferenceServiceStub:
    return oip_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(scope="session")
def vision(channel: grpc.Channel) -> vision_grpc.VisionStub:
    return vision_grpc.VisionStub(channel)


@pytest.fixture(scope="session")
def scans() -> dict[str, bytes]:
    """A PNG image of each digit, by the digit."""
    files = sorted((Path(__file__).parents[2] / "scripts" / "samples" / "digits").glob("*.png"))
    return {file.stem.partition("_")[0]: file.read_bytes() for file in files}


@pytest.fixture
def valid(scans: dict[str, bytes]) -> MakeRequest:
    """Makes a valid request to `digits`: `image` as one scan, or black `pixels` of `datatype`, raw or not."""

    def make(name: str = "pixels", *, n: int = 1, datatype: str = "UINT8", raw: bool = True) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name="digits")
        if name == "image":
            tensor = request.inputs.add(name="image", datatype="BYTES", shape=[n])
            elements = [scans["3"]] * n
            if raw:
                request.raw_input_contents.append(b"".join(struct.pack("<I", len(e)) + e for e in elements))
            else:
                tensor.contents.bytes_contents.extend(elements)
            return request
        tensor = request.inputs.add(name="pixels", datatype=datatype, shape=[n, *DIGITS_SIZE, 3])
        field, size_bytes = {"UINT8": ("uint", 1), "INT32": ("int", 4), "FP32": ("fp32", 4)}[datatype]
        values = n * DIGITS_SIZE[0] * DIGITS_SIZE[1] * 3
        if raw:
            request.raw_input_contents.append(bytes(values * size_bytes))
        else:
            getattr(tensor.contents, f"{field}_contents").extend([0] * values)
        return request

    return make


class StartServer:
    """Starts servers of a test's own; `wait=False` returns before they are ready."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self.started: list[Server] = []

    def __call__(self, config: Mapping[str, Any], env: Mapping[str, str] | None = None, wait: bool = True) -> Server:
        server = Server(config, self._folders.mktemp("server"), env)
        self.started.append(server)
        if wait:
            server.wait_until_ready()
        return server


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    start = StartServer(tmp_path_factory)
    yield start
    for server in start.started:
        server.stop()


@pytest.fixture(scope="module")
def start_module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that the tests of a module share."""
    start = StartServer(tmp_path_factory)
    yield start
    for server in start.started:
        server.stop()


class Brake:
    """Stops the batches of `builtin:noop` in servers that are started with its `env`, for as long as it is pulled."""

    def __init__(self, folder: Path) -> None:
        self._pulled = folder / "pulled"
        # Python runs this before the server.
        (folder / "sitecustomize.py").write_text(BRAKED_NOOP)
        path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.env = {"PYTHONPATH": path, "BRAKE": str(self._pulled)}

    def pull(self) -> None:
        self._pulled.touch()

    def release(self) -> None:
        self._pulled.unlink(missing_ok=True)


@pytest.fixture
def brake(tmp_path: Path) -> Iterator[Brake]:
    brake = Brake(tmp_path)
    yield brake
    brake.release()


class NoopClient:
    """Asks `builtin:noop`, which answers an image with its first bytes. Shares no connection.

    Retries nothing, or, if it `retries`, what gRPC's clients do by default: calls that have not left this process.
    """

    def __init__(self, address: str, *, retries: bool = False) -> None:
        options = [
            ("grpc.enable_retries", int(retries)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        self.channel = grpc.insecure_channel(address, options)
        self.stub = oip_grpc.GRPCInferenceServiceStub(self.channel)

    def send(
        self,
        *levels: int,
        timeout_s: float = STOP_TIMEOUT_S,
        queue_timeout_us: int = 0,
        wait_for_ready: bool | None = None,
    ) -> Any:
        """Sends images, each all of one level, and returns the call, to be kept until it is done."""
        request = self.request(*levels)
        if queue_timeout_us:
            request.parameters["timeout"].int64_param = queue_timeout_us
        return self.stub.ModelInfer.future(request, timeout=timeout_s, wait_for_ready=wait_for_ready)

    def ask(self, *levels: int) -> grpc.StatusCode:
        """Sends images and returns the `outcome`."""
        return self.outcome(self.send(*levels), *levels)

    @staticmethod
    def request(*levels: int) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name="noop")
        request.inputs.add(name="pixels", datatype="UINT8", shape=(len(levels), 224, 224, 3))
        request.raw_input_contents.append(b"".join(bytes([level]) * (224 * 224 * 3) for level in levels))
        return request

    @staticmethod
    def outcome(call: Any, *levels: int) -> grpc.StatusCode:
        """Waits for a call and returns its status; an answer must be the one that belongs to `levels`."""
        error = call.exception(timeout=STOP_TIMEOUT_S)
        if error is not None:
            code: grpc.StatusCode = error.code()
            return code
        rows = np.frombuffer(call.result().raw_output_contents[0], np.float32).reshape(len(levels), -1)
        np.testing.assert_array_equal(rows, np.array(levels, np.float32)[:, None] + np.zeros(1000))
        return grpc.StatusCode.OK


Connect = Callable[[Server], NoopClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens a new connection to a server each time."""
    with ExitStack() as channels:

        def connect(server: Server) -> NoopClient:
            client = NoopClient(server.grpc)
            channels.callback(client.channel.close)
            return client

        yield connect


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        used = getattr(item, "funcargs", {})
        servers = [used["server"]] if "server" in used else []
        for start in ("start_server", "start_module_server"):
            servers += used[start].started if start in used else []
        report.sections += [
            (f"server {server.pid}", server.stderr[-TAIL:]) for server in servers if isinstance(server, Server)
        ]
    return report
