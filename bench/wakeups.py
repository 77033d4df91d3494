"""What it costs to wake another process with small records: `python -m bench.wakeups [--seconds S] [--rounds N]`.

Two processes, each with uvloop's event loop, send records of 104 bytes to and fro. Records of one turn of the loop
leave together. Ways: a Unix stream socket; rings in shared memory with an eventfd to wake; ZeroMQ over ipc, where pyzmq
is installed (it is no dependency). Prints, for each number of records in flight, microseconds from sending a record to
its echo, and of CPU for each record and process, as medians of interleaved rounds with the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import uvloop

from bench.trials import interleaved
from xlaserve.programs.tf.device import cpu_name

RECORD: Final = struct.Struct("=Q96x")
IN_FLIGHT: Final = (1, 8, 32)
SLOTS: Final = 1024
_COUNT: Final = struct.Struct("=Q")
_HEAD, _TAIL, _RECORDS = 0, 64, 128
RING_BYTES: Final = _RECORDS + SLOTS * RECORD.size
US_PER_S: Final = 1e6

Receive = Callable[[bytes], None]


class End(Protocol):
    """One end of a way to send records; `receive` is called with whole records."""

    def send(self, data: bytes) -> None:
        """Sends records at once, and wakes the other end."""

    async def open(self, receive: Receive) -> None:
        """Begins to receive."""

    def close(self) -> None:
        """Ends."""


class SocketEnd(asyncio.Protocol):
    """A Unix stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._left = b""
        self._transport: Any = None

    async def open(self, receive: Receive) -> None:
        """Begins to receive."""
        self._receive = receive
        self._socket.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self._socket)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hands over whole records."""
        data = self._left + data if self._left else data
        whole = len(data) - len(data) % RECORD.size
        self._left = data[whole:]
        if whole:
            self._receive(data[:whole])

    def send(self, data: bytes) -> None:
        """Sends records."""
        self._transport.write(data)

    def close(self) -> None:
        """Ends."""
        self._transport.close()


class RingEnd:
    """Two rings in shared memory, each with one writer and one reader, and an eventfd that wakes its reader."""

    def __init__(self, memory: int, wake_me: int, wake_other: int, *, is_first: bool) -> None:
        self._map = mmap.mmap(memory, 2 * RING_BYTES)
        self._in, self._out = (0, RING_BYTES) if is_first else (RING_BYTES, 0)
        self._wake_me, self._wake_other = wake_me, wake_other

    async def open(self, receive: Receive) -> None:
        """Begins to receive."""
        self._receive = receive
        asyncio.get_running_loop().add_reader(self._wake_me, self._read)

    def _get(self, at: int) -> int:
        return int(_COUNT.unpack_from(self._map, at)[0])

    def send(self, data: bytes) -> None:
        """Writes records behind the others."""
        head = self._get(self._out + _HEAD)
        for start in range(0, len(data), RECORD.size):
            at = self._out + _RECORDS + head % SLOTS * RECORD.size
            self._map[at : at + RECORD.size] = data[start : start + RECORD.size]
            head += 1
        _COUNT.pack_into(self._map, self._out + _HEAD, head)
        os.eventfd_write(self._wake_other, 1)

    def _read(self) -> None:
        os.eventfd_read(self._wake_me)
        tail, head = self._get(self._in + _TAIL), self._get(self._in + _HEAD)
        records = []
        while tail < head:
            at = self._in + _RECORDS + tail % SLOTS * RECORD.size
            records.append(self._map[at : at + RECORD.size])
            tail += 1
        _COUNT.pack_into(self._map, self._in + _TAIL, tail)
        if records:
            self._receive(b"".join(records))

    def close(self) -> None:
        """Ends."""
        asyncio.get_running_loop().remove_reader(self._wake_me)


class ZmqEnd:
    """A pair of ZeroMQ's sockets; the records of one turn are one message."""

    def __init__(self, path: str, *, is_first: bool) -> None:
        self._path, self._is_first = path, is_first

    async def open(self, receive: Receive) -> None:
        """Begins to receive."""
        import zmq  # noqa: PLC0415

        self._zmq: Any = zmq
        self._receive = receive
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        (self._socket.bind if self._is_first else self._socket.connect)(f"ipc://{self._path}")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fd, self._read)
        self._loop.call_soon(self._read)

    def send(self, data: bytes) -> None:
        """Sends records."""
        self._socket.send(data, self._zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # sending may clear the edge that tells of what came

    def _read(self) -> None:
        while self._socket.events & self._zmq.POLLIN:
            self._receive(self._socket.recv(self._zmq.NOBLOCK))

    def close(self) -> None:
        """Ends."""
        self._loop.remove_reader(self._socket.fd)
        self._context.destroy(linger=0)


class Sender:
    """Gathers the records of one turn of the loop."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._leaving: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def send(self, record: bytes) -> None:
        """Sends a record with the others of this turn."""
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(record)

    def _flush(self) -> None:
        data = b"".join(self._leaving)
        self._leaving.clear()
        self._end.send(data)


class Run(NamedTuple):
    """What one run showed."""

    latency_us: float
    """The median."""
    sender_cpu_us: float
    """For each record and its echo."""
    echo_cpu_us: float


async def _echo(end: End, control: Connection) -> None:
    sender = Sender(end)

    def receive(data: bytes) -> None:
        for start in range(0, len(data), RECORD.size):
            RECORD.unpack_from(data, start)
            sender.send(data[start : start + RECORD.size])

    await end.open(receive)
    control.send("open")
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(control.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        if not control.poll():
            continue
        if control.recv() is None:
            break
        control.send(time.process_time())
    loop.remove_reader(control.fileno())
    end.close()


def _echo_process(end: End, control: Connection) -> None:
    uvloop.run(_echo(end, control))


async def _measure(end: End, control: Connection, in_flight: int, seconds: float) -> Run:
    sender = Sender(end)
    latencies: list[float] = []
    sent: deque[float] = deque()
    finished = asyncio.get_running_loop().create_future()
    stops_at = 0.0

    def receive(data: bytes) -> None:
        now = time.perf_counter()
        for start in range(0, len(data), RECORD.size):
            RECORD.unpack_from(data, start)
            latencies.append(now - sent.popleft())
            if now < stops_at:
                send()
        if not sent and not finished.done():
            finished.set_result(None)

    def send() -> None:
        sent.append(time.perf_counter())
        sender.send(RECORD.pack(len(latencies)))

    await end.open(receive)
    before = _cpu_s(control)
    began = time.process_time()
    stops_at = time.perf_counter() + seconds
    for _ in range(in_flight):
        send()
        await asyncio.sleep(0)  # not all in one turn
    await finished
    own_s = time.process_time() - began
    echo_s = _cpu_s(control) - before
    end.close()
    records = len(latencies)
    return Run(median(latencies) * US_PER_S, own_s / records * US_PER_S, echo_s / records * US_PER_S)


def _cpu_s(control: Connection) -> float:
    control.send("cpu")
    return float(control.recv())


@contextlib.contextmanager
def _socket_ends() -> Iterator[tuple[End, End]]:
    here, there = socket.socketpair()
    with here, there:
        yield SocketEnd(here), SocketEnd(there)


@contextlib.contextmanager
def _ring_ends() -> Iterator[tuple[End, End]]:
    memory = os.memfd_create("rings")
    os.ftruncate(memory, 2 * RING_BYTES)
    events = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    try:
        yield RingEnd(memory, *events, is_first=True), RingEnd(memory, *events[::-1], is_first=False)
    finally:
        for file in (memory, *events):
            os.close(file)


@contextlib.contextmanager
def _zmq_ends() -> Iterator[tuple[End, End]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "zmq"))
        yield ZmqEnd(path, is_first=False), ZmqEnd(path, is_first=True)


def _run(ends: Callable[[], contextlib.AbstractContextManager[tuple[End, End]]], in_flight: int, seconds: float) -> Run:
    context = get_context("fork")
    with ends() as (here, there):
        control, other = context.Pipe()
        process = context.Process(target=_echo_process, args=(there, other))
        process.start()
        try:
            assert control.recv() == "open"
            run: Run = uvloop.run(_measure(here, control, in_flight, seconds))
            return run
        finally:
            control.send(None)
            process.join(5)
            process.kill()


def _cell(values: list[float]) -> str:
    return f"{median(values):6.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.wakeups", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ways = {"socket": _socket_ends, "ring and eventfd": _ring_ends}
    with contextlib.suppress(ImportError):
        import zmq  # noqa: F401, PLC0415

        ways["ZeroMQ"] = _zmq_ends
    print(f"{cpu_name()}, {os.cpu_count()} cores, {options.rounds} rounds of {options.seconds:g} s")
    print("| in flight | way | latency, us | CPU of the sender, us | CPU of the echo, us |\n|--:|---|--:|--:|--:|")
    for in_flight in IN_FLIGHT:
        arms = {name: partial(_run, ends, in_flight, options.seconds) for name, ends in ways.items()}
        for name, runs in interleaved(arms, options.rounds).items():
            columns = " | ".join(_cell(list(column)) for column in zip(*runs, strict=True))
            print(f"| {in_flight} | {name} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
