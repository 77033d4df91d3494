from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from xlaserve.wire.grpc import surplus
from xlaserve.wire.grpc.surplus import close_newest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listen(stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def connect(stack: ExitStack, listener: socket.socket, address: str) -> socket.socket:
    """Connects from one of loopback's addresses."""
    client = stack.enter_context(
        socket.create_connection(listener.getsockname(), timeout=5, source_address=(address, 0))
    )
    stack.enter_context(listener.accept()[0])
    return client


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.0)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_newest_connections_of_an_address_that_has_too_many_are_closed(stack: ExitStack) -> None:
    listener, another = listen(stack), listen(stack)
    stack.enter_context(socket.socket())  # numbers of descriptors don't ascend with age
    theirs = [connect(stack, listener, "127.0.0.2") for _ in range(5)]
    others = [connect(stack, listener, "127.0.0.3") for _ in range(3)]
    elsewhere = [connect(stack, another, "127.0.0.2") for _ in range(5)]
    assert close_newest(listener.getsockname()[1], 3) == 2
    assert [is_open(client) for client in theirs] == [True, True, True, False, False]
    assert all(map(is_open, [*others, *elsewhere]))
    assert close_newest(listener.getsockname()[1], 3) == 0


def test_a_descriptor_that_is_another_s_by_now_is_left_alone(stack: ExitStack) -> None:
    listener = listen(stack)
    client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
    accepted = stack.enter_context(listener.accept()[0])
    port, client_port = listener.getsockname()[1], client.getsockname()[1]
    mine, other = map(stack.enter_context, socket.socketpair())
    for fd, ports in (
        (accepted.fileno(), (port, client_port + 1)),
        (mine.fileno(), (port, client_port)),
        (999, (1, 1)),
    ):
        surplus._close(fd, *ports)
    assert is_open(client) and is_open(other)
    surplus._close(accepted.fileno(), port, client_port)
    assert not is_open(client)
