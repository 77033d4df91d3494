"""Bounds of gRPC's connections, as a client meets them that speaks HTTP/2 by hand, and as grpcio's own does."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.attack import http2
from tests.attack.client import HEALTH
from tests.attack.http2 import ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING
from tests.integration.conftest import Server

from xlaserve.wire.grpc.server_options import MIN_PING_INTERVAL_MS
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


def test_grpcs_own_client_that_keeps_its_connections_alive_keeps_its_calls(server: Server) -> None:
    """Calls of such a client ended UNAVAILABLE (too_many_pings) after some pings that nothing was sent between."""
    options = [
        ("grpc.keepalive_time_ms", int(POLITE_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(server.grpc, options) as channel:
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{HEALTH}Watch")
        watching = watch(health_pb2.HealthCheckRequest().SerializeToString())
        assert next(watching)
        ended = threading.Event()
        assert watching.add_callback(ended.set)
        assert not ended.wait((PINGS + 1) * POLITE_S), watching.details()
        watching.cancel()


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
