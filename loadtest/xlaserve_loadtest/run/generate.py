"""`loadtest generate`: sends load for a coordinator on another machine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from xlaserve_loadtest.parser import Parser, checked, host_and_port
from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.run import handshake
from xlaserve_loadtest.run.handshake import HandshakeError
from xlaserve_loadtest.run.workers import start_worker

LISTEN: Final = ("127.0.0.1", 7070)
MAX_GREETINGS: Final = 32
"""Connections that have not yet shown the key; more are closed at once."""

_HAND_OVER_S: Final = 2.0
"""How long a coordinator waits for the workers of the one before to end."""


class Agent:
    """Gives each connection of a coordinator that has the key a worker process, and works for one at a time."""

    def __init__(self, key: bytes, say: Callable[[str], None]) -> None:
        self._key = key
        self._say = say
        self._greetings = 0
        self._session = ""
        self._coordinator = ""
        self._sockets: set[socket.socket] = set()
        """Connections of the session."""
        self._is_free = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is cancelled, which ends the workers."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        async with asyncio.TaskGroup() as connections:
            while True:
                try:
                    sock, address = await loop.sock_accept(listener)
                except OSError as error:
                    self._say(f"can't accept: {error.strerror}")
                    await asyncio.sleep(1)
                    continue
                if self._greetings >= MAX_GREETINGS:
                    sock.close()
                    continue
                self._greetings += 1
                connections.create_task(self._serve_one(sock, str(address[0])))

    async def _serve_one(self, sock: socket.socket, peer: str) -> None:
        with sock:
            try:
                try:
                    sock.setblocking(False)
                    async with asyncio.timeout(handshake.TIMEOUT_S):
                        await handshake.greet_coordinator(sock, self._key, partial(self._admit, sock, peer))
                    handshake.bound_silence(sock)
                finally:
                    self._greetings -= 1
                await self._work(sock)
            except (HandshakeError, OSError) as error:
                self._say(f"{peer} {str(error) or 'did not show the key in time'}")
            finally:
                self._leave(sock)

    async def _admit(self, sock: socket.socket, peer: str, session: str) -> str:
        """Returns why a session is refused, or "" where `sock` is now a connection of the session."""
        if self._session not in ("", session):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_free.wait(), _HAND_OVER_S)
        if self._session not in ("", session):
            return f"is at work for another coordinator, {self._coordinator}"
        if not self._session:
            self._say(f"working for {peer}")
        self._session, self._coordinator = session, peer
        self._sockets.add(sock)
        self._is_free.clear()
        return ""

    def _leave(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            self._sockets.remove(sock)
            if not self._sockets:
                self._say(f"done for {self._coordinator}")
                self._session = ""
                self._is_free.set()

    async def _work(self, sock: socket.socket) -> None:
        process = await start_worker(sock.fileno())
        # From now on the connection is the worker's alone, so that it ends with it.
        sock.close()
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if status:
            self._say(f"a worker ended with status {status}")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = Parser(
        prog="loadtest generate",
        description="Sends load for `loadtest --generator HOST:PORT` on another machine. Both need the same key and "
        "version. Coordinator and generator exchange Python objects, neither encrypted nor signed: anyone who can "
        "change what they send runs code on both, so listen on other than loopback in a trusted network only, or go "
        "through an SSH tunnel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--listen",
        type=checked(host_and_port),
        default="{}:{}".format(*LISTEN),
        metavar="[HOST:]PORT",
        help="where coordinators connect",
    )
    add_key(parser)
    return parser


def add_key(parser: argparse._ActionsContainer) -> None:
    """Adds the option for the key that coordinator and generators share."""
    parser.add_argument(
        "--generator-key",
        type=Path,
        metavar="FILE",
        help=f"holds the key that coordinator and generators share; {handshake.KEY_VARIABLE} does without",
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    command = parser()
    chosen = command.parse_args(arguments)
    try:
        key = handshake.read_key(chosen.generator_key)
    except ValueError as error:
        command.error(str(error))
    host, port = chosen.listen
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        sys.stderr.write(f"loadtest generate: {host}:{port}: {error.strerror}\n")
        return 1
    with listener:
        uvloop.run(_serve(Agent(key, _say), listener))
    return 0


async def _serve(agent: Agent, listener: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    task = asyncio.create_task(agent.serve(listener))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    host, port = listener.getsockname()[:2]
    _say(f"ready at {host}:{port}")
    with suppress(asyncio.CancelledError):
        await task


def _say(text: str) -> None:
    sys.stderr.write(f"loadtest generate: {printable(text)}\n")
    sys.stderr.flush()
