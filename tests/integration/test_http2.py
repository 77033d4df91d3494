"""Bounds of gRPC's connections, as a client meets them that speaks HTTP/2 by hand, and as grpcio's own does."""

from __future__ import annotations

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.attack import http2
from tests.attack.client import HEALTH
from tests.attack.http2 import ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING
from tests.integration.conftest import Server

from xlaserve.wire.grpc.grpc_server import MIN_PING_INTERVAL_MS
from xlaserve.wire.grpc.unreceived import MAX_METADATA_BYTES

POLITE_S = 1.1 * MIN_PING_INTERVAL_MS / 1000
"""Between pings of a client that is to stay."""
PINGS = 5
"""One more than a client may send that does not wait between them."""
ENHANCE_YOUR_CALM = 11


def test_clients_that_ping_stay_with_or_without_a_call(server: Server) -> None:
    with http2.Connection(server.grpc) as idle, http2.Connection(server.grpc) as watching:
        watch = http2.message(health_pb2.HealthCheckRequest().SerializeToString())
        watching.send(http2.frame(HEADERS, END_HEADERS, 1, http2.headers(f"{HEALTH}Watch")))
        watching.send(http2.frame(DATA, END_STREAM, 1, watch))
        seen: dict[http2.Connection, list[int]] = {idle: [], watching: []}
        for _ in range(PINGS):
            began = time.monotonic()
            for connection, kinds in seen.items():
                assert connection.send(http2.frame(PING, 0, 0, bytes(8)))
                left_s = (POLITE_S - (time.monotonic() - began)) / (2 if connection is idle else 1)
                kinds += [kind for kind, flags, *_ in connection.frames(left_s) if kind != PING or flags & ACK]
        for kinds in seen.values():
            assert kinds.count(PING) == PINGS
            assert GOAWAY not in kinds
        assert DATA in seen[watching]


def test_a_client_that_floods_with_pings_is_told_to_go(server: Server) -> None:
    with http2.Connection(server.grpc) as connection:
        connection.send(http2.frame(PING, 0, 0, bytes(8)) * PINGS)
        farewells = [payload for kind, *_, payload in connection.frames(10) if kind == GOAWAY]
        assert farewells
        assert int.from_bytes(farewells[-1][4:8], "big") == ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [(MAX_METADATA_BYTES - 1024, None), (MAX_METADATA_BYTES, grpc.StatusCode.RESOURCE_EXHAUSTED)],
)
def test_metadata_is_taken_up_to_its_bound(
    channel: grpc.Channel, size_bytes: int, expected: grpc.StatusCode | None
) -> None:
    check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{HEALTH}Check")
    for _ in range(10):  # gRPC's default is to refuse some
        try:
            check(b"", metadata=(("x-large", "v" * size_bytes),))
            status = None
        except grpc.RpcError as error:
            status = error.code()
        assert status is expected
