"""HTTP/2 frames that libraries don't send in such numbers or sizes: pings, metadata, header blocks without an end."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from tests.attack import http2
from tests.attack.client import HEALTH, INFERENCE
from tests.attack.connections import check_serving, serving
from tests.attack.http2 import ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING
from tests.attack.registry import OK, Round, attack

from xlaserve.wire.grpc.unreceived import MAX_METADATA_BYTES

PING_S: Final = 1.0
"""How often a client may ping."""
POLITE_PINGS: Final = 6
FLOOD: Final = 200
FAREWELL_S: Final = 10.0
BLOCKS: Final = 3
"""Connections with a header block without an end."""
BLOCK_BYTES: Final = 8 * 2**20
MOST_MIB: Final = 160
"""MiB that gRPC's core may hold of one such block: it stops to keep headers after some 4 MiB of the smallest ones."""
SMALL_HEADERS: Final = b"\0\x01a\0" * 4000
"""Headers of one letter without a value, which take the most memory for their bytes (RFC 7541, 6.2.2)."""
OTHER_METADATA_BYTES: Final = 1024
"""More than gRPC sends along itself."""
LARGEST_BYTES: Final = 200_000
WATCH: Final[Message] = health_pb2.HealthCheckRequest()


@attack(allowed={OK, "GOAWAY"}, is_short=False)
def pings(round: Round) -> None:
    """Clients that ping once a second keep a call that says nothing; those that flood are told to go."""
    with serving(round) as client:
        while round.has_time:
            with http2.Connection(round.server.grpc) as watching:
                watching.send(http2.frame(HEADERS, END_HEADERS, 1, http2.headers(f"{HEALTH}Watch")))
                watching.send(http2.frame(DATA, END_STREAM, 1, http2.message(WATCH.SerializeToString())))
                answers: list[int] = []
                for _ in range(POLITE_PINGS):
                    watching.send(http2.frame(PING, 0, 0, bytes(8)))
                    answers += [kind for kind, flags, *_ in watching.frames(PING_S) if kind != PING or flags & ACK]
                stayed = answers.count(PING) == POLITE_PINGS and GOAWAY not in answers
                round.count(OK if stayed else "GOAWAY", f"{POLITE_PINGS} pings, one a second", frozenset({OK}))
            with http2.Connection(round.server.grpc) as flooding:
                is_open = flooding.send(http2.frame(PING, 0, 0, bytes(8)) * FLOOD)
                is_ended = not is_open or any(kind == GOAWAY for kind, *_ in flooding.frames(FAREWELL_S))
                round.count("GOAWAY" if is_ended else OK, f"{FLOOD} pings at once", frozenset({"GOAWAY"}))
            check_serving(round, client)


@attack(allowed={OK, "refused"}, is_short=False, most_mib=BLOCKS * MOST_MIB)
def endless_header_blocks(round: Round) -> None:
    """Header blocks of the smallest headers without an end: what they take is bounded, and others are served."""
    with serving(round) as client:
        while round.has_time:
            for number in range(BLOCKS):
                with http2.Connection(round.server.grpc) as connection:
                    connection.send(http2.frame(HEADERS, 0, 1, http2.headers(f"{INFERENCE}ModelInfer")))
                    more = http2.frame(CONTINUATION, 0, 1, SMALL_HEADERS)
                    is_open = all(connection.send(more) for _ in range(BLOCK_BYTES // len(more)))
                    round.count(OK if is_open else "refused", f"block {number}")
                    check_serving(round, client)


@attack(allowed={"RESOURCE_EXHAUSTED"})
def metadata_of_any_size(round: Round) -> None:
    """Metadata up to their bound, which must be taken each time, and beyond it, which must be refused."""
    rng = round.random
    with serving(round) as client:
        while round.has_time:
            for is_taken, size_bytes in (
                (True, rng.randrange(MAX_METADATA_BYTES - OTHER_METADATA_BYTES)),
                (False, rng.randrange(MAX_METADATA_BYTES, LARGEST_BYTES)),
            ):
                call = client.send(f"{HEALTH}Check", b"", metadata=(("x-large", "v" * size_bytes),))
                round.settle(call, f"{size_bytes} bytes of metadata", allowed=frozenset({OK}) if is_taken else None)
            check_serving(round, client)
