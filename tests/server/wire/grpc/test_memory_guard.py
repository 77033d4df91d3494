"""Connections that are closed where the memory comes to its bound."""

from __future__ import annotations

import socket
from collections import Counter

import pytest

from xlaserve.wire.grpc.memory_guard import (
    RECEIVED_BYTES,
    RISE_BYTES,
    TRIM_LOOKS,
    TRIMS,
    Client,
    MemoryGuard,
    received_by,
)

MUCH, LITTLE = Client(1, 3, 50_001), Client(2, 4, 50_002)
BOUND = 10 * RISE_BYTES


class World:
    """A process whose memory and connections are what the test says."""

    def __init__(self) -> None:
        self.taken = RISE_BYTES
        self.bound = BOUND
        self.sent = Counter({MUCH: 0, LITTLE: 0})
        self.closed: list[Client] = []
        self.trims = 0
        self.guard = MemoryGuard(
            lambda: self.bound, lambda: dict(self.sent), self.closed.append, lambda: self.taken, self._trim
        )

    def look(self, sent: int = RECEIVED_BYTES) -> int:
        self.sent[MUCH] += sent
        self.sent[LITTLE] += RECEIVED_BYTES - 1
        return self.guard.look()

    def _trim(self) -> None:
        self.trims += 1


@pytest.fixture
def world() -> World:
    return World()


def test_above_the_bound_those_that_send_much_are_closed(world: World) -> None:
    assert [world.look(), world.look()] == [0, 0]
    world.taken = BOUND
    assert [world.look(), world.look()] == [0, 1]
    assert world.closed == [MUCH]
    world.taken = BOUND - 1
    assert not any(world.look() for _ in range(2 * TRIMS * TRIM_LOOKS))
    assert world.trims == TRIMS


def test_below_the_bound_nobody_is_closed(world: World) -> None:
    for _ in range(5):
        world.look()
        world.taken = BOUND - 1
    assert not world.closed


def test_a_process_that_is_always_above_its_bound_closes_nobody(world: World) -> None:
    world.taken, world.bound = RISE_BYTES, 1
    for _ in range(5):
        world.look()
        world.taken = 2 * RISE_BYTES - 1
    assert not world.closed


def test_a_new_connection_counts_from_its_beginning(world: World) -> None:
    world.look()
    world.taken = BOUND
    world.look(0)
    new = Client(3, 5, 50_003)
    world.sent[new] = RECEIVED_BYTES
    assert world.look(0) == 1
    assert world.closed == [new]


def test_what_a_connection_has_sent_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client, listener.accept()[0] as accepted:
            client.sendall(bytes(1000))
            accepted.recv(1000, socket.MSG_WAITALL)
            ((found, sent),) = received_by(address[1]).items()
            assert (found.descriptor, found.port, sent) == (accepted.fileno(), client.getsockname()[1], 1000)
