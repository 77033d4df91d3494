from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from xlaserve.wire.grpc import reuseport

CONNECTIONS = 30


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listen(stack: ExitStack) -> Callable[..., socket.socket]:
    def listen(port: int = 0) -> socket.socket:
        return stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=128, reuse_port=True))

    return listen


@pytest.fixture
def group(listen: Callable[..., socket.socket]) -> list[socket.socket]:
    """Three sockets of one port."""
    first = listen()
    return [first, *(listen(first.getsockname()[1]) for _ in range(2))]


def connected(to: socket.socket, stack: ExitStack) -> None:
    for _ in range(CONNECTIONS):
        stack.enter_context(socket.create_connection(to.getsockname(), timeout=5))


def test_all_connections_go_to_the_socket_at_the_place(group: list[socket.socket], stack: ExitStack) -> None:
    reuseport.steer(group[0], 2)
    connected(group[0], stack)
    assert [*map(reuseport.waiting, group)] == [0, 0, CONNECTIONS]


def test_a_place_that_nobody_has_leaves_connections_to_all(group: list[socket.socket], stack: ExitStack) -> None:
    reuseport.steer(group[0], 3)
    connected(group[0], stack)
    assert 0 not in map(reuseport.waiting, group)


def test_a_socket_that_closes_gives_its_place_to_the_last(group: list[socket.socket], stack: ExitStack) -> None:
    reuseport.steer(group[0], 0)
    group[0].close()
    connected(group[1], stack)
    assert [*map(reuseport.waiting, group[1:])] == [0, CONNECTIONS]


def test_any_of_them_ends_it(group: list[socket.socket], stack: ExitStack) -> None:
    reuseport.steer(group[0], 2)
    reuseport.spread(group[2])
    reuseport.spread(group[1])  # it has ended
    connected(group[0], stack)
    assert 0 not in map(reuseport.waiting, group)


def test_a_socket_that_shares_its_port_with_none_is_left_as_it_is(listen: Callable[..., socket.socket]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alone:
        with pytest.raises(OSError):
            reuseport.steer(alone, 1)
        reuseport.spread(alone)
