"""Overload: too many images, passed deadlines, and clients that hang up or take their time."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Brake, Connect, NoopClient, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb

SIDE = 224
IMAGE_BYTES = SIDE * SIDE * 3
AT_ONCE_S = 5.0
"""An answer that waits for nothing, on a busy machine."""
PATIENCE_S = 60.0

Status = grpc.StatusCode
StartBraked = Callable[..., Server]


@pytest.fixture
def braked(start_server: StartServer, brake: Brake) -> StartBraked:
    """Starts a server of `noop` on one lane, with a brake, and with `settings`."""

    def start(**settings: Any) -> Server:
        model = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
        return start_server({"models": [model], "lanes": 1, **settings}, env=brake.env)

    return start


def wait_for_images(server: Server, images: int) -> None:
    server.wait_for(
        lambda: server.metric("xlaserve_in_flight_images") == images, f"there were never {images} images in flight"
    )


def test_a_full_queue_refuses_at_once_and_serves_again_afterwards(
    braked: StartBraked, brake: Brake, connect: Connect
) -> None:
    server = braked(max_queue_images=8)
    client = connect(server)
    brake.pull()
    accepted = [(levels, client.send(*levels)) for levels in [(1,), (2, 3), (4, 5, 6), (7, 8)]]
    wait_for_images(server, 8)
    for _ in range(3):
        began = time.monotonic()
        refused = client.send(9)
        assert refused.exception(timeout=PATIENCE_S).code() is Status.RESOURCE_EXHAUSTED
        assert time.monotonic() - began < AT_ONCE_S
        assert "max_queue_images 8" in refused.details()
    assert not any(call.done() for _, call in accepted)
    brake.release()
    assert [client.outcome(call, *levels) for levels, call in accepted] == [Status.OK] * 4
    assert client.ask(10, 11) is Status.OK
    wait_for_images(server, 0)


def test_bytes_are_bounded_as_images_are_the_encoded_ones_included(
    braked: StartBraked, brake: Brake, connect: Connect
) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    encoded = buffer.getvalue()
    server = braked(max_queue_bytes=2 * (IMAGE_BYTES + len(encoded)))
    client = connect(server)
    request = pb.ModelInferRequest(model_name="noop")
    request.inputs.add(name="image", datatype="BYTES", shape=(1,)).contents.bytes_contents.append(encoded)
    brake.pull()
    accepted = [client.stub.ModelInfer.future(request, timeout=PATIENCE_S) for _ in range(2)]
    wait_for_images(server, 2)
    assert server.metric("xlaserve_in_flight_bytes") == 2 * (IMAGE_BYTES + len(encoded))
    refused = client.send(1)
    assert refused.exception(timeout=PATIENCE_S).code() is Status.RESOURCE_EXHAUSTED
    assert "max_queue_bytes" in refused.details()
    brake.release()
    for call in accepted:
        scores = call.result().outputs[0].contents.fp32_contents
        np.testing.assert_array_equal(scores, noise.ravel()[: len(scores)])
    assert client.ask(1) is Status.OK


def test_a_request_larger_than_the_whole_queue_is_refused_and_harms_nobody(
    braked: StartBraked, connect: Connect
) -> None:
    client = connect(braked(max_queue_images=8))
    larger, whole = client.send(*range(9)), tuple(range(8))
    assert larger.exception(timeout=PATIENCE_S).code() is Status.INVALID_ARGUMENT
    assert "images: expected at most 8 in a request (max_queue_images), got 9" in larger.details()
    assert client.ask(*whole) is Status.OK


def test_a_burst_through_a_small_queue_is_accounted_for(braked: StartBraked, connect: Connect) -> None:
    server = braked(max_queue_images=8)
    requests = 200

    def send(client: NoopClient) -> list[Status]:
        calls = [(level, client.send(level, level)) for level in range(requests)]
        return [client.outcome(call, level, level) for level, call in calls]

    with ThreadPoolExecutor(4) as pool:
        outcomes = [status for statuses in pool.map(send, [connect(server) for _ in range(4)]) for status in statuses]
    served = outcomes.count(Status.OK)
    assert served > 0
    assert served + outcomes.count(Status.RESOURCE_EXHAUSTED) == len(outcomes) == 4 * requests
    assert server.metric("xlaserve_images_total") == 2 * served
    assert server.metric("xlaserve_requests_total") == len(outcomes)
    wait_for_images(server, 0)


def test_a_deadline_that_passes_in_the_queue_costs_only_its_own_request(
    braked: StartBraked, brake: Brake, connect: Connect
) -> None:
    server = braked()
    client = connect(server)
    brake.pull()
    mates = [(level, client.send(level)) for level in range(1, 4)]
    late = client.send(100, 101, timeout_s=0.5)
    wait_for_images(server, 5)
    mates += [(level, client.send(level)) for level in range(4, 7)]
    assert late.exception(timeout=AT_ONCE_S).code() is Status.DEADLINE_EXCEEDED
    wait_for_images(server, 6)
    brake.release()
    assert [client.outcome(call, level) for level, call in mates] == [Status.OK] * 6
    wait_for_images(server, 0)


def test_a_request_that_would_be_too_late_is_refused_with_a_retry_time(
    start_server: StartServer, brake: Brake, connect: Connect
) -> None:
    model = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
    server = start_server({"models": [model], "lanes": 1}, env={**brake.env, "BATCH_S": "0.1"})
    client = connect(server)
    calls = [(level, client.send(level, timeout_s=1.0)) for level in range(1, 31)]
    outcomes = [client.outcome(call, level) for level, call in calls]
    assert Status.OK in outcomes
    refused = [call for _, call in calls if call.code() is Status.RESOURCE_EXHAUSTED]
    assert len(refused) >= 20
    for call in refused:
        assert "the deadline is in" in call.details() or "would miss their deadlines" in call.details()
        assert "retry-after" in {key for key, _ in call.trailing_metadata()}
    assert server.metric("xlaserve_refusal_seconds_count", model="noop", reason="deadline") == len(refused)
    wait_for_images(server, 0)
    assert client.ask(1) is Status.OK


def _note(order: list[int], priority: int, _: object) -> None:
    order.append(priority)


def test_the_highest_priority_is_answered_before_what_waits(
    start_server: StartServer, brake: Brake, connect: Connect
) -> None:
    model = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
    server = start_server({"models": [model], "lanes": 1}, env={**brake.env, "BATCH_S": "0.02"})
    client = connect(server)
    brake.pull()
    order: list[int] = []
    calls = []
    for count, priority in ((12, 3), (4, 1)):
        for _ in range(count):
            request = client.request(1)
            request.parameters["priority"].int64_param = priority
            call = client.stub.ModelInfer.future(request, timeout=PATIENCE_S)
            call.add_done_callback(partial(_note, order, priority))
            calls.append(call)
        wait_for_images(server, len(calls))
    brake.release()
    assert [client.outcome(call, 1) for call in calls] == [Status.OK] * 16
    wait_for_images(server, 0)
    server.wait_for(lambda: len(order) == 16, "the callbacks did not run")
    # Two run or were gathered ahead; of each five images that follow four are of priority 1.
    assert order[:8].count(1) == 4


def test_the_timeout_parameter_bounds_the_wait_in_the_queue(
    braked: StartBraked, brake: Brake, connect: Connect
) -> None:
    server = braked()
    client = connect(server)
    brake.pull()
    running = client.send(1)
    wait_for_images(server, 1)
    late = client.send(2, queue_timeout_us=1)
    wait_for_images(server, 2)  # behind another one it would be refused on arrival
    mate = client.send(3, queue_timeout_us=int(PATIENCE_S * 1e6))
    wait_for_images(server, 3)
    brake.release()
    assert client.outcome(running, 1) is Status.OK
    assert client.outcome(mate, 3) is Status.OK
    assert late.exception(timeout=PATIENCE_S).code() is Status.DEADLINE_EXCEEDED
    assert late.details() == "model noop: the deadline passed while the request waited"
    wait_for_images(server, 0)


def test_a_client_that_hangs_up_leaves_nothing_behind(braked: StartBraked, brake: Brake, connect: Connect) -> None:
    server = braked()
    client, other = connect(server), connect(server)
    brake.pull()
    running = other.send(1)
    wait_for_images(server, 1)
    gone = [client.send(50, 51, 52) for _ in range(5)]
    wait_for_images(server, 16)
    mates = [(level, other.send(level)) for level in range(2, 5)]
    wait_for_images(server, 19)
    for call in gone[:3]:
        call.cancel()
    wait_for_images(server, 10)
    client.channel.close()
    wait_for_images(server, 4)
    assert server.metric("xlaserve_queue_images") == 3
    brake.release()
    assert client.outcome(running, 1) is Status.OK
    assert [client.outcome(call, level) for level, call in mates] == [Status.OK] * 3
    wait_for_images(server, 0)
    assert server.metric("xlaserve_in_flight_bytes") == 0
    assert server.metric("xlaserve_in_flight_requests") == 0


def test_a_client_that_hangs_up_while_its_batch_runs_spoils_no_answer(
    braked: StartBraked, brake: Brake, connect: Connect
) -> None:
    server = braked()
    client = connect(server)
    brake.pull()
    running = client.send(1)
    wait_for_images(server, 1)
    gone, mate = client.send(2, 3), client.send(4, 5)
    wait_for_images(server, 5)
    server.wait_for(lambda: server.metric("xlaserve_queue_images") == 0, "the full batch was not gathered")
    gone.cancel()
    wait_for_images(server, 3)
    brake.release()
    assert client.outcome(running, 1) is Status.OK
    assert client.outcome(mate, 4, 5) is Status.OK
    wait_for_images(server, 0)


def test_many_connections_are_all_served(server: Server, connect: Connect) -> None:
    clients = [connect(server) for _ in range(100)]
    calls = [(level, client.send(level)) for client in clients for level in (1, 2, 3)]
    assert [clients[0].outcome(call, level) for level, call in calls] == [Status.OK] * 300


def test_connections_that_never_finish_their_request_hold_nobody_up(server: Server, connect: Connect) -> None:
    begun = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04", b"GET /met"]
    with ExitStack() as sockets:
        for address in (server.grpc, server.http, server.metrics):
            host, port = address.rsplit(":", 1)
            for number in range(60):
                connection = sockets.enter_context(socket.create_connection((host, int(port)), timeout=AT_ONCE_S))
                connection.sendall(begun[number % len(begun)])
        began = time.monotonic()
        assert connect(server).ask(1, 2, 3) is Status.OK
        assert server.metric("xlaserve_ready") == 1
        assert time.monotonic() - began < AT_ONCE_S
