"""However the server ends, each request is accounted for, and nobody is left waiting."""

from __future__ import annotations

import io
import json
import os
import queue
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import StatusCode as Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from tests.attack import http2
from tests.integration.conftest import (
    COMPILES,
    FRONTS,
    Brake,
    Connect,
    NoopClient,
    Server,
    StartServer,
    not_with_fronts,
)

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import vision_pb2 as vision
from xlaserve_proto import vision_pb2_grpc as vision_grpc

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
DIGITS = {"name": "digits", "source": "builtin:digits", "modes": ["xla", "graph", "eager"], "buckets": [1, 2, 4, 8]}
PATIENCE_S = 60.0
SOON_S = 8.0
"""What takes a second at most, on a busy machine."""

LOST = "the process that runs this model has ended; another one takes its place"
"""What a front says, which can't know whether that is so."""
LOADS_NO_MORE = LOST if FRONTS else "the server is shutting down; no model is loaded any more"

Health = health_pb2.HealthCheckResponse


@pytest.fixture
def braked(start_server: StartServer, brake: Brake) -> Any:
    return start_server({"models": [NOOP]}, env=brake.env)


class Watch:
    """Follows the health of a server, on a thread of its own."""

    def __init__(self, client: NoopClient) -> None:
        self.seen: queue.Queue[int | Status] = queue.Queue()
        stub: Any = health_pb2_grpc.HealthStub(client.channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest())
        threading.Thread(target=self._follow, daemon=True).start()

    def next(self) -> int | Status:
        """Returns the next status of the server, or at the end that of the call."""
        return self.seen.get(timeout=PATIENCE_S)

    def _follow(self) -> None:
        try:
            for response in self._call:
                self.seen.put(response.status)
            self.seen.put(Status.OK)
        except grpc.RpcError as error:
            self.seen.put(error.code())


class Stream:
    """A ModelStreamInfer call that is fed by hand."""

    def __init__(self, client: NoopClient) -> None:
        self._requests: queue.Queue[pb.ModelInferRequest] = queue.Queue()
        self._call = client.stub.ModelStreamInfer(iter(self._requests.get, None))

    def send(self, request: pb.ModelInferRequest) -> None:
        self._requests.put(request)

    def receive(self) -> Status:
        """Returns the status of the next answer; that of the call where the call ends."""
        try:
            message = next(self._call).error_message
        except StopIteration:
            return Status.OK
        except grpc.RpcError as error:
            return error.code()
        return Status[message.partition(":")[0]] if message else Status.OK


def draining(server: Server) -> bool:
    return "draining: " in server.stderr


def wait_for_images(server: Server, images: int) -> None:
    server.wait_for(
        lambda: server.metric("xlaserve_in_flight_images") == images, f"there were never {images} images in flight"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_accepted_work_is_answered_and_new_work_refused_on_an_open_port(
    braked: Server, brake: Brake, connect: Connect, number: signal.Signals
) -> None:
    server = braked
    client, late = connect(server), connect(server)
    watch = Watch(connect(server))
    assert watch.next() == Health.SERVING
    stream = Stream(client)
    brake.pull()
    accepted = [(levels, client.send(*levels)) for levels in [(1,), (2, 3), tuple(range(4, 11))] * 10]
    stream.send(client.request(7))
    wait_for_images(server, 101)

    server.process.send_signal(number)
    assert watch.next() == Health.NOT_SERVING
    for connection in (client, late):
        refused = connection.send(9)
        assert client.outcome(refused, 9) is Status.UNAVAILABLE
        assert refused.details() == "the server is shutting down; try another one"
        assert not connection.stub.ServerReady(pb.ServerReadyRequest()).ready
    stream.send(client.request(8))
    assert server.metric("xlaserve_ready") == 0
    assert not any(call.done() for _, call in accepted)

    brake.release()
    assert [client.outcome(call, *levels) for levels, call in accepted] == [Status.OK] * 30
    assert [stream.receive(), stream.receive()] == [Status.OK, Status.UNAVAILABLE]
    assert server.wait() == 0
    assert not server.is_ready
    assert watch.next() is Status.UNAVAILABLE


def test_nothing_is_lost_when_the_end_comes_in_the_middle_of_heavy_traffic(
    start_server: StartServer, connect: Connect
) -> None:
    server = start_server({"models": [NOOP], "max_queue_images": 256})
    buffer = io.BytesIO()
    Image.new("RGB", (224, 224), (5, 5, 5)).save(buffer, "PNG")
    encoded = buffer.getvalue()
    answered = threading.Semaphore(0)

    def infer(client: NoopClient, levels: tuple[int, ...]) -> Status:
        status: Status = client.ask(*levels)
        return status

    def classify(client: NoopClient, levels: tuple[int, ...]) -> Status:
        stub = vision_grpc.VisionStub(client.channel)
        try:
            request = vision.ClassifyRequest(model="noop", images=[encoded] * len(levels))
            response = stub.Classify(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            code: Status = error.code()
            return code
        assert [row.categories[0].score for row in response.classifications] == [5.0] * len(levels)
        return Status.OK

    def caller(seed: int) -> Counter[Status]:
        """Sends one request after the other until some were refused: the last of them find no server."""
        rng = random.Random(seed)
        client = clients[seed % len(clients)]
        outcomes: Counter[Status] = Counter()
        while outcomes.total() - outcomes[Status.OK] < 3:
            levels = tuple(rng.randrange(256) for _ in range(rng.choice((1, 1, 2, 5))))
            outcomes[rng.choice((infer, infer, classify))(client, levels)] += 1
            answered.release()
        return outcomes

    def streamer(seed: int) -> Counter[Status]:
        """Keeps 16 requests of a stream under way until the stream ends."""
        client = clients[seed % len(clients)]
        stream = Stream(client)
        outcomes: Counter[Status] = Counter()
        for _ in range(16):
            stream.send(client.request(seed))
        while not (ends := outcomes[Status.UNAVAILABLE]):
            outcomes[stream.receive()] += 1
            answered.release()
            stream.send(client.request(seed))
        return outcomes + Counter({Status.UNAVAILABLE: ends - 1})

    clients = [connect(server) for _ in range(4)]
    with ThreadPoolExecutor(36) as threads:
        calls = [threads.submit(caller, seed) for seed in range(32)]
        calls += [threads.submit(streamer, seed) for seed in range(4)]
        for _ in range(500):
            assert answered.acquire(timeout=PATIENCE_S)
        server.process.terminate()
        outcomes = sum((call.result(PATIENCE_S) for call in calls), Counter[Status]())
    assert server.wait() == 0
    assert outcomes.keys() == {Status.OK, Status.UNAVAILABLE}
    assert outcomes[Status.OK] >= 500


@pytest.mark.parametrize("group", [0, *(pytest.param(group, marks=pytest.mark.slow) for group in (1, 2, 3))])
def test_every_call_is_answered_or_refused_whenever_the_server_ends(
    start_server: StartServer, connect: Connect, group: int
) -> None:
    """64 clients that send one request after the other, and one that doesn't wait for answers; 5 ends in each group."""
    outcomes: Counter[Status] = Counter()
    for end in range(5):
        server = start_server({"models": [NOOP]})
        clients = [connect(server) for _ in range(32)]
        outcomes += calls_until_the_end(server, clients, callers=64, end_after=64 + 23 * (5 * group + end))
    assert outcomes.keys() == {Status.OK, Status.UNAVAILABLE}


def calls_until_the_end(server: Server, clients: list[Any], callers: int, end_after: int) -> Counter[Status]:
    """Stops the server after so many answers, and returns the outcomes of all calls that were made until its end."""
    answered = threading.Semaphore(0)
    gone = threading.Event()

    def call_again_and_again(number: int) -> Counter[Status]:
        client = clients[number % len(clients)]
        outcomes: Counter[Status] = Counter()
        while not gone.is_set():
            outcomes[client.ask(number)] += 1
            answered.release()
        return outcomes

    def call_without_waiting() -> Counter[Status]:
        calls = []
        while not gone.wait(0.001):
            calls.append(clients[0].stub.ServerLive.future(pb.ServerLiveRequest(), timeout=PATIENCE_S))
        return Counter(Status.OK if (error := call.exception()) is None else error.code() for call in calls)

    with ThreadPoolExecutor(callers + 1) as threads:
        counts = [threads.submit(call_again_and_again, number) for number in range(callers)]
        counts.append(threads.submit(call_without_waiting))
        try:
            for _ in range(end_after):
                assert answered.acquire(timeout=PATIENCE_S)
            assert server.stop() == 0
        finally:
            gone.set()
        assert not re.search("ERROR|Traceback|^E[0-9]{4}", server.stderr, re.MULTILINE)
        return sum((count.result(PATIENCE_S) for count in counts), Counter[Status]())


def test_idle_watches_and_streams_do_not_hold_the_end_up(braked: Server, connect: Connect) -> None:
    client = connect(braked)
    watch = Watch(client)
    assert watch.next() == Health.SERVING
    stream = Stream(client)
    stream.send(client.request(1))
    assert stream.receive() is Status.OK
    began = time.monotonic()
    assert braked.stop() == 0
    assert time.monotonic() - began < SOON_S
    assert watch.next() == Health.NOT_SERVING
    assert watch.next() is Status.UNAVAILABLE
    assert stream.receive() is Status.UNAVAILABLE


def test_what_a_client_reads_late_is_not_lost(braked: Server, connect: Connect) -> None:
    client = connect(braked)
    stream = Stream(client)
    for level in range(10):
        stream.send(client.request(level))
    braked.wait_for(lambda: braked.metric("xlaserve_requests_total") == 10, "the requests were not answered")
    assert braked.stop() == 0
    assert [stream.receive() for _ in range(11)] == [Status.OK] * 10 + [Status.UNAVAILABLE]


def encoded_request() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    message = pb.ModelInferRequest(model_name="noop")
    message.inputs.add(name="image", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(struct.pack("<I", len(buffer.getvalue())) + buffer.getvalue())
    return message.SerializeToString()


def test_requests_that_have_begun_to_arrive_are_answered(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP]})
    message = http2.message(encoded_request())
    head = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.headers("/inference.GRPCInferenceService/ModelInfer"))
    body = json.dumps({"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [0, 224, 224, 3], "data": []}]})
    text = (
        f"POST /v2/models/noop/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    host, port = server.http.rsplit(":", 1)
    with ExitStack() as opened:
        by_http = [opened.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(3)]
        by_grpc = [opened.enter_context(http2.Connection(server.grpc)) for _ in range(2)]
        for one, size in zip(by_http, (1, 40, len(text) - 1), strict=True):
            one.sendall(text[:size])
        for each in by_grpc:
            assert each.send(head)
        assert by_grpc[1].send(http2.frame(http2.DATA, 0, 1, message[:9]))
        time.sleep(0.3)  # all of it has reached the server
        server.process.terminate()
        server.wait_for(lambda: draining(server), "it did not drain")
        time.sleep(3)  # more than the ports stayed open without it
        for one, size in zip(by_http, (1, 40, len(text) - 1), strict=True):
            one.sendall(text[size:])
            assert one.recv(65_536).startswith(b"HTTP/1.1 400 ")  # no refusal, but an answer to what it asks
        for each, sent in zip(by_grpc, (0, 9), strict=True):
            assert each.send(http2.frame(http2.DATA, http2.END_STREAM, 1, message[sent:]))
            assert any(b"grpc-status\x010" in payload for _, _, _, payload in each.frames(10))
        assert server.wait() == 0


def test_a_client_that_trickles_is_waited_for_as_long_as_the_drain(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP], "drain_timeout_s": 2})
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client, http2.Connection(server.grpc) as other:
        client.sendall(b"POST /v2/models/noop/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{")
        path = "/inference.GRPCInferenceService/ModelInfer"
        assert other.send(http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.headers(path)))
        time.sleep(0.3)
        began = time.monotonic()
        assert server.stop() == 0
    assert 2 <= time.monotonic() - began < 2 + SOON_S


def test_what_does_not_finish_in_time_is_told_so(start_server: StartServer, brake: Brake, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "drain_timeout_s": 1}, env=brake.env)
    client = connect(server)
    stream = Stream(client)
    brake.pull()
    stuck = [client.send(1, 2, 3) for _ in range(10)]
    stream.send(client.request(7))
    wait_for_images(server, 31)
    began = time.monotonic()
    server.process.terminate()
    assert [client.outcome(call, 1, 2, 3) for call in stuck] == [Status.UNAVAILABLE] * 10
    assert (LOST if FRONTS else "model noop") in stuck[0].details()
    assert stream.receive() is Status.UNAVAILABLE
    assert server.wait() == 0
    assert 1 <= time.monotonic() - began < 1 + SOON_S
    assert not server.is_ready


def test_a_second_signal_stops_at_once(braked: Server, brake: Brake, connect: Connect) -> None:
    server = braked
    client = connect(server)
    brake.pull()
    stuck = client.send(1)
    wait_for_images(server, 1)
    began = time.monotonic()
    while server.process.poll() is None:
        server.process.terminate()
        assert time.monotonic() - began < SOON_S
        time.sleep(0.05)
    assert server.process.returncode == 128 + signal.SIGTERM
    assert client.outcome(stuck, 1) is Status.UNAVAILABLE
    assert not server.is_ready


def test_a_signal_that_is_delivered_twice_still_lets_accepted_work_finish(
    braked: Server, brake: Brake, connect: Connect
) -> None:
    client = connect(braked)
    brake.pull()
    accepted = client.send(1)
    wait_for_images(braked, 1)
    braked.process.terminate()
    braked.process.terminate()
    braked.wait_for(lambda: draining(braked), "it did not drain")
    brake.release()
    assert client.outcome(accepted, 1) is Status.OK
    assert braked.wait() == 0


def test_a_server_with_a_delay_serves_on_until_load_balancers_know(start_server: StartServer, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "shutdown_delay_s": 3600})
    client = connect(server)
    watch = Watch(connect(server))
    assert watch.next() == Health.SERVING
    server.process.terminate()
    assert watch.next() == Health.NOT_SERVING
    assert server.metric("xlaserve_ready") == 0
    assert [client.ask(level) for level in range(50)] == [Status.OK] * 50
    assert not draining(server)
    time.sleep(0.6)  # what comes sooner is the same signal
    server.process.terminate()
    server.wait_for(lambda: draining(server), "the second signal did not end the delay")
    assert server.wait() == 0


def test_the_delay_ends_by_itself(start_server: StartServer, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "shutdown_delay_s": 0.5})
    client = connect(server)
    server.process.terminate()
    while (outcome := client.ask(1)) is Status.OK:
        pass
    assert outcome is Status.UNAVAILABLE
    assert server.wait() == 0


def test_a_delay_holds_nothing_up_that_never_served(start_server: StartServer, brake: Brake) -> None:
    brake.pull()
    server = start_server({"models": [NOOP], "shutdown_delay_s": 3600}, env=brake.env, wait=False)
    server.wait_for(lambda: "noop: compiling" in server.stderr, "it did not compile")
    assert server.stop() == 0


def test_a_signal_during_compilation_ends_the_server_soon_and_well(start_server: StartServer) -> None:
    server = start_server({"models": [DIGITS], **COMPILES}, wait=False)
    server.wait_for(lambda: re.search(r"digits: xla 1x\S+ compiled", server.stderr), "nothing was compiled")
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < SOON_S
    assert not server.is_ready
    assert "Traceback" not in server.stderr


def test_a_signal_during_a_hanging_warm_up_ends_the_server_soon(start_server: StartServer, brake: Brake) -> None:
    brake.pull()
    server = start_server({"models": [NOOP]}, env=brake.env, wait=False)
    server.wait_for(lambda: "noop: compiling" in server.stderr, "it did not compile")
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < SOON_S
    assert "Traceback" not in server.stderr


def test_a_load_that_a_signal_ends_is_told_so(braked: Server, brake: Brake, connect: Connect) -> None:
    client = connect(braked)
    brake.pull()
    load = client.stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="noop"))
    braked.wait_for(lambda: braked.stderr.count("noop: compiling") == 2, "it did not compile")
    braked.process.terminate()
    error = load.exception(timeout=PATIENCE_S)
    assert isinstance(error, grpc.RpcError)
    assert (error.code(), error.details()) == (Status.UNAVAILABLE, LOADS_NO_MORE)
    assert braked.wait() == 0


@not_with_fronts("another engine loads it, which starts no process for that")
def test_a_signal_ends_a_load_its_process_and_folder_on_a_busy_machine(
    start_server: StartServer, connect: Connect, tmp_path: Path
) -> None:
    server = start_server({"models": [{**DIGITS, "modes": ["xla"]}], **COMPILES}, env={"TMPDIR": str(tmp_path)})
    load = connect(server).stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="digits"))
    server.wait_for(lambda: preparing(server), "it started no process")
    (child,) = preparing(server)
    processor = min(os.sched_getaffinity(0))
    for thread in child.threads():
        os.sched_setaffinity(thread.id, {processor})
    assert list(tmp_path.glob("xlaserve-prepared-*"))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            os.sched_setaffinity(busy.pid, {processor})
            server.process.terminate()
            error = load.exception(timeout=PATIENCE_S)
            status = server.wait()
        finally:
            busy.kill()
    assert isinstance(error, grpc.RpcError)
    assert (error.code(), error.details()) == (Status.UNAVAILABLE, LOADS_NO_MORE)
    assert status == 0
    assert not list(tmp_path.glob("xlaserve-prepared-*"))
    child.wait(PATIENCE_S)
    assert "Traceback" not in server.stderr


def preparing(server: Server) -> list[psutil.Process]:
    """Returns the processes that compile a model for the server."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [child for child in children if "xlaserve.models.preparer_process" in child.cmdline()]


def test_a_killed_server_leaves_no_client_waiting(braked: Server, brake: Brake, connect: Connect) -> None:
    client = connect(braked)
    stream = Stream(client)
    brake.pull()
    under_way = [client.send(1, 2) for _ in range(20)]
    stream.send(client.request(7))
    wait_for_images(braked, 41)
    began = time.monotonic()
    braked.process.kill()
    assert [client.outcome(call, 1, 2) for call in under_way] == [Status.UNAVAILABLE] * 20
    assert stream.receive() is Status.UNAVAILABLE
    assert time.monotonic() - began < SOON_S


DEFECT = """
import os
from xlaserve.engine.batching.lanes import Lanes

acquire = Lanes.acquire

async def acquire_or_die(self, share):
    if os.path.exists(os.environ["DEFECT"]):
        raise ZeroDivisionError("a defect of the batch loop")
    await acquire(self, share)

Lanes.acquire = acquire_or_die
Lanes.try_acquire = lambda self, share: False
"""


@pytest.fixture
def defect(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    return tmp_path / "defect"


@not_with_fronts("another engine takes the place of one that ends so")
def test_a_batch_loop_that_dies_ends_the_server_with_a_failure(
    start_server: StartServer, connect: Connect, defect: Path
) -> None:
    path = f"{defect.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    server = start_server({"models": [NOOP]}, env={"PYTHONPATH": path, "DEFECT": str(defect)})
    client = connect(server)
    watch = Watch(client)
    assert watch.next() == Health.SERVING
    assert client.ask(1) is Status.OK
    defect.touch()
    # The loop asked for its next lane before: the first batch still runs. Three images are no brief batch.
    outcomes = [client.ask(level, level, level) for level in range(3)]
    assert Status.INTERNAL in outcomes
    assert set(outcomes) <= {Status.OK, Status.INTERNAL, Status.UNAVAILABLE}
    assert watch.next() == Health.NOT_SERVING
    assert server.wait() == 1
    assert "the batch loop died" in server.stderr
    assert "a defect of the batch loop" in server.stderr
    assert not server.is_ready


def test_an_unwritable_ready_file_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    ready_file = tmp_path / ("r" * 255)  # what is written first has a longer name
    models = json.dumps([NOOP])
    command = [
        sys.executable,
        "-m",
        "xlaserve",
        "serve",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--metrics-port",
        "0",
        "--models",
        models,
    ]
    command += ["--ready-file", str(ready_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last.startswith("xlaserve: ready_file: expected a file that can be made")) == (1, True)
    assert "Traceback" not in done.stderr
