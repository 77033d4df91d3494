"""A process of a role, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Final

from xlaserve import service_manager
from xlaserve.processes.messages import CHANNEL, Kind, Reader, encode
from xlaserve.processes.output import Output
from xlaserve.processes.role import Role
from xlaserve.telemetry.logs import Format

log = logging.getLogger(__name__)

PROCESS: Final = (sys.executable, "-P", "-m", "xlaserve.processes.child")
CHUNK_BYTES: Final = 64 * 1024
UNSET: Final = (service_manager.ADDRESS, service_manager.WATCHDOG_US, service_manager.WATCHDOG_PID)
"""What of the environment is for the supervisor only."""

Hear = Callable[[Kind, bytes], None]


class ChildProcess:
    """A running process. `hear` gets its messages; what it writes on stderr goes into the log.

    It is killed when the thread ends that makes this object: make it on the main thread, on whose event loop the rest
    happens. Raises OSError where the process can't be started.
    """

    def __init__(self, role: Role, hear: Hear, log_level: str = "info", log_format: Format = "human") -> None:
        self.role = role
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its status, negative for the signal that ended it; set after its last message was heard."""
        with ExitStack() as theirs:
            opened = dict(role.connect())
            for descriptor in opened.values():
                theirs.callback(os.close, descriptor)
            self._channel, channel = socket.socketpair()
            theirs.enter_context(channel)
            reading, writing = os.pipe()
            theirs.callback(os.close, writing)
            descriptors = {**role.descriptors, **opened, CHANNEL: channel.fileno()}
            try:
                self._popen, self._pidfd = self._start(theirs, descriptors, writing, (log_level, log_format))
            except OSError:
                self._channel.close()
                os.close(reading)
                raise
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._output = Output(role.name, reading)
        self._loop.add_reader(self._pidfd, self._on_end)

    def _start(
        self, theirs: ExitStack, descriptors: Mapping[str, int], stderr: int, logs: tuple[str, Format]
    ) -> tuple[subprocess.Popen[bytes], int]:
        said = os.memfd_create("xlaserve")
        theirs.callback(os.close, said)
        about = {
            "name": self.role.name,
            "target": self.role.target,
            "cores": sorted(self.role.cores),
            "descriptors": descriptors,
            "log": logs,
        }
        with os.fdopen(os.dup(said), "wb") as file:
            payload = self.role.payload
            file.write(json.dumps(about).encode() + b"\n" + (payload() if callable(payload) else payload))
        os.lseek(said, 0, os.SEEK_SET)
        popen = subprocess.Popen(
            [*PROCESS, str(os.getpid()), str(said)],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[*descriptors.values(), said],
            env={name: value for name, value in os.environ.items() if name not in UNSET},
            start_new_session=True,  # what a terminal sends is for the supervisor to act on
        )
        try:
            return popen, os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()
            popen.wait()
            raise

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._popen.pid

    @property
    def output_closed(self) -> asyncio.Future[None]:
        """Done once nothing more of its stderr will come, up to a second after its end."""
        return self._output.closed

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it `number`, unless it has ended."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def ask(self) -> None:
        """Asks for its metrics, unless it has not read earlier questions or listens no more."""
        with suppress(OSError):
            self._channel.send(encode(Kind.ASK, b""))

    def tell(self, outcome: object) -> None:
        """Tells it what became of its wish for a successor: plain data of JSON."""
        with suppress(OSError):
            self._channel.send(encode(Kind.OUTCOME, json.dumps(outcome).encode()))

    def _receive(self) -> bool:
        """Hears what has come, and returns whether there may be more."""
        try:
            received = self._channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        try:
            for kind, content in self._reader.feed(received):
                self._hear(kind, content)
        except ValueError as error:
            log.error("%s: what it says can't be understood and is not heard any more: %s", self.role.name, error)
            received = b""
        if not received:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
        return bool(received)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._popen.wait()
        while self._channel.fileno() >= 0 and self._receive():  # bounded by what a socket holds: nobody writes any more
            pass
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
        self._output.process_ended()
        self.ended.set_result(status)
