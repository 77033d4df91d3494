"""A small HTTP server in the test's own process that answers with any bytes, pauses and ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

HANG_UP: Final = "hang up"
NEVER: Final = "never"
Step = bytes | float | str
"""Bytes to send, seconds to wait, or one of the words above."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Got(NamedTuple):
    head: bytes
    body: bytes


class Liar:
    """Answers request number n as `script(n)` says, whatever was asked."""

    def __init__(self, script: Callable[[int], Sequence[Step]]) -> None:
        self.script = script
        self.got: list[Got] = []
        self.connections = 0
        self.closed = asyncio.Event()
        """Set when a client has closed a connection."""
        self.address = ""
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.create_task(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(ConnectionError):
                while await self._answer(reader, writer):
                    pass
        except asyncio.IncompleteReadError:
            self.closed.set()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        self.got.append(Got(head, await reader.readexactly(int(length[1])) if length else b""))
        for step in self.script(len(self.got) - 1):
            if step == HANG_UP:
                return False
            if step == NEVER:
                await reader.readexactly(1)  # until the client hangs up
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
        return True


@asynccontextmanager
async def lying(*steps: Step, script: Callable[[int], Sequence[Step]] | None = None) -> AsyncIterator[Liar]:
    """Runs a server that answers every request with `steps`, or as `script` says."""
    liar = Liar(script or (lambda number: steps))
    server = await asyncio.start_server(liar.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    liar.address = f"http://{host}:{port}"
    try:
        yield liar
    finally:
        server.close()
        for task in liar.tasks:
            task.cancel()
        await asyncio.gather(*liar.tasks, return_exceptions=True)


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    named = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body
