from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from xlaserve.wire.grpc import port_closing


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _connect(listener: socket.socket, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
    accepted, _ = listener.accept()
    return client, stack.enter_context(accepted)


def test_the_port_is_closed_and_so_are_its_connections(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with ExitStack() as stack:
        client, accepted = _connect(listener, stack)

        asyncio.run(port_closing.hang_up(port, flush_s=0))

        assert client.recv(1) == b""
        assert accepted.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_connections_are_closed_while_the_port_stays_open(listener: socket.socket) -> None:
    with ExitStack() as stack:
        client, _ = _connect(listener, stack)

        port_closing.close_connections(listener.getsockname()[1])

        assert client.recv(1) == b""
        _connect(listener, stack)


def test_what_grpc_closed_meanwhile_spoils_nothing(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = listener.getsockname()[1]
    with ExitStack() as stack:
        client, accepted = _connect(listener, stack)
        other, peer = map(stack.enter_context, socket.socketpair())
        with socket.socket() as gone:
            free = gone.fileno()

        def as_it_was(port: int, *, listening: bool) -> list[int]:
            return [free, other.fileno(), accepted.fileno()]

        monkeypatch.setattr(port_closing, "_fds", as_it_was)
        asyncio.run(port_closing.hang_up(port, flush_s=0))

        assert client.recv(1) == b""
        other.sendall(b"x")
        assert peer.recv(1) == b"x"
        assert caplog.records == []


def test_a_port_is_passed_on_once_all_that_it_was_given_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_closing, "PASSED_ON_S", 0.0)
    with ExitStack() as stack:
        here = stack.enter_context(socket.create_server(("127.0.0.1", 0), reuse_port=True))
        port = here.getsockname()[1]
        given = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))

        async def pass_on() -> None:
            # Both are sockets of this process, which are then left to none of them but the second.
            there = stack.enter_context(socket.create_server(("127.0.0.1", port), reuse_port=True))
            passing = asyncio.create_task(port_closing.pass_on(port, 1))
            await asyncio.sleep(0.05)
            assert not passing.done()
            stack.enter_context(here.accept()[0])
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                stack.enter_context(there.accept()[0])
            await passing

        asyncio.run(pass_on())
        here.close()
        given.sendall(b"x")


def test_where_nothing_can_be_passed_on_nothing_is_waited_for(listener: socket.socket) -> None:
    with ExitStack() as stack:
        stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
        asyncio.run(asyncio.wait_for(port_closing.pass_on(listener.getsockname()[1], 1), 1))


def test_a_port_of_which_the_system_says_nothing_is_passed_on_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(port: int, *, listening: bool) -> list[int]:
        raise PermissionError

    monkeypatch.setattr(port_closing, "_fds", fails)
    asyncio.run(port_closing.pass_on(1, 1))
    port_closing.spread(1)
