"""Clients that hold calls open: those that send no message, and those that read no answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.attack import http2
from tests.attack.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM
from tests.integration.conftest import BOUNDS, FRONTS, NOOP, Connect, NoopClient, Server, StartServer, not_with_fronts

from xlaserve_proto import open_inference_pb2 as pb

CALLS = 4096
STREAMS = 1024
"""Calls of one connection."""
PATIENCE_S = 30.0
MOST_MIB = 400
INFERENCE = "/inference.GRPCInferenceService/"


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def hold(server: Server, calls: int, path: str, *, sends: bool, held: ExitStack) -> list[http2.Connection]:
    """Makes calls that wait for their client, for the message that it never `sends` or else to read the answer."""
    connections = []
    for first in range(0, calls, STREAMS):
        connection = held.enter_context(http2.Connection(server.grpc, window=0))
        for stream in range(1, 2 * min(STREAMS, calls - first), 2):
            data = http2.frame(HEADERS, END_HEADERS, stream, http2.headers(path))
            if sends:
                data += http2.frame(DATA, END_STREAM, stream, http2.message(b""))
            assert connection.send(data)
        connections.append(connection)
    return connections


def ended(connection: http2.Connection, streams: set[int]) -> set[int]:
    """Returns those of `streams` that the server ends soon."""
    left = set(streams)
    for kind, flags, stream, _ in connection.frames(PATIENCE_S):
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            left.discard(stream)
        if not left:
            break
    return streams - left


def last_words(connection: http2.Connection) -> list[bytes]:
    """Returns the last headers of each call that has ended, or does within a second."""
    return [payload for kind, flags, _, payload in connection.frames(1.0) if kind == HEADERS and flags & END_STREAM]


def ended_calls(server: Server) -> int:
    return sum(map(int, re.findall(r"ended (\d+) calls", server.stderr)))


def is_well(client: NoopClient) -> bool:
    """Returns whether all probes are answered; fails where one is neither answered nor refused."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    try:
        return bool(
            health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status
            == health_pb2.HealthCheckResponse.SERVING
            and client.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live
            and client.stub.ServerReady(pb.ServerReadyRequest(), timeout=PATIENCE_S).ready
        )
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False


@pytest.mark.parametrize(
    ("method", "sends"),
    [("ServerMetadata", True), ("ServerLive", True), ("ModelInfer", False), ("ModelStreamInfer", False)],
)
def test_calls_that_wait_for_one_client_keep_no_other_out(
    start_server: StartServer, connect: Connect, held: ExitStack, method: str, sends: bool
) -> None:
    server = start_server({"models": [NOOP]})
    client = connect(server)
    assert client.ask(1) is grpc.StatusCode.OK
    before_bytes = server.resident_bytes()
    hold(server, CALLS + STREAMS, f"{INFERENCE}{method}", sends=sends, held=held)
    if method == "ServerLive":  # as many probes at once are refused, but not for long
        server.wait_for(lambda: is_well(client), "it never answered probes again", PATIENCE_S)
    else:
        assert is_well(client)
    server.wait_for(lambda: client.ask(1) is grpc.StatusCode.OK, "it never served again", PATIENCE_S)

    def serves_all() -> bool:
        return [client.ask(level) for level in range(50)] == [grpc.StatusCode.OK] * 50

    if FRONTS:  # the front that is asked may be another one than the front that ends calls, which looks once a second
        server.wait_for(serves_all, "it refused some", PATIENCE_S)
    else:
        assert serves_all()
    assert (server.resident_bytes() - before_bytes) / 2**20 < MOST_MIB * BOUNDS


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_who_gives_way_is_told_at_once(
    start_server: StartServer, connect: Connect, held: ExitStack, method: str
) -> None:
    server = start_server({"models": [NOOP], "max_concurrent_calls": 4})
    client = connect(server)
    connections: list[http2.Connection] = []

    def is_full() -> bool:
        connections.extend(hold(server, 1, f"{INFERENCE}{method}", sends=False, held=held))
        return client.ask(1) is grpc.StatusCode.RESOURCE_EXHAUSTED

    server.wait_for(is_full, "it took more calls than it may", PATIENCE_S)
    server.wait_for(lambda: client.ask(1) is grpc.StatusCode.OK, "it never served again", PATIENCE_S)
    with ThreadPoolExecutor(len(connections)) as threads:
        ends = [end for found in threads.map(last_words, connections) for end in found]
    (told,) = [end for end in ends if b"max_concurrent_calls: gave way to a new call" in end]
    assert b"grpc-status\x018" in told
    assert "ERROR" not in server.stderr


@not_with_fronts("the next call, for which grpcio forgets the last one, may come to another front")
def test_transfers_have_a_time_limit_and_silent_streams_have_none(
    start_server: StartServer, connect: Connect, held: ExitStack
) -> None:
    server = start_server({"models": [NOOP], "max_transfer_s": 0.5})
    client = connect(server)
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING

    def send_late() -> Iterator[pb.ModelInferRequest]:
        yield client.request(1)
        server.wait_for(lambda: ended_calls(server) == 2 * len(streams), "it did not end the calls", PATIENCE_S)
        for connection in unsent:
            assert ended(connection, streams) == streams
        assert is_well(client)  # grpcio refers to the call that came last until the next one comes
        for connection in unread:
            assert ended(connection, streams) == streams
        yield client.request(2)

    streams = set(range(1, 2 * 200, 2))
    unread = hold(server, len(streams), f"{INFERENCE}ServerMetadata", sends=True, held=held)
    unsent = hold(server, len(streams), f"{INFERENCE}ModelInfer", sends=False, held=held)
    answers = [*client.stub.ModelStreamInfer(send_late(), timeout=2 * PATIENCE_S)]
    assert [answer.error_message for answer in answers] == ["", ""]
    assert watch.is_active()
    watch.cancel()
