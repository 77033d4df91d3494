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
from pathlib import Path
from typing import Final

from xlaserve import priority, service_manager
from xlaserve.processes import pulse
from xlaserve.processes.messages import CHANNEL, Kind, Reader, encode
from xlaserve.processes.output import Output
from xlaserve.processes.pulse import PULSE
from xlaserve.processes.role import Role
from xlaserve.telemetry.logs import Format

log = logging.getLogger(__name__)

PYTHON: Final = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
"""The interpreter of this process, though a link that led to its environment may lead to another one by now."""
PROCESS: Final = (PYTHON, "-P", "-m", "xlaserve.processes.child")
CHUNK_BYTES: Final = 64 * 1024
UNSET: Final = (service_manager.ADDRESS, service_manager.WATCHDOG_US, service_manager.WATCHDOG_PID)
"""What of the environment is for the supervisor only."""

Hear = Callable[[Kind, bytes], None]


class Interpreter:
    """A process that waits to be told what it is there for, with `descriptors` open by their names there.

    It may import what it will need meanwhile: `module`. It is killed when the thread ends that makes this object.
    Raises OSError where it can't be started.
    """

    def __init__(self, descriptors: Mapping[str, int], module: str = "") -> None:
        with ExitStack() as ours, ExitStack() as theirs:
            self.channel, channel = socket.socketpair()
            ours.enter_context(self.channel)
            theirs.enter_context(channel)
            self.stderr, stderr = os.pipe()
            ours.callback(os.close, self.stderr)
            theirs.callback(os.close, stderr)
            begin, self._begin = os.pipe()
            ours.callback(os.close, self._begin)
            theirs.callback(os.close, begin)
            self._said = os.memfd_create("xlaserve")
            ours.callback(os.close, self._said)
            self.pulse = pulse.create()
            ours.callback(os.close, self.pulse)
            self._descriptors = {**descriptors, CHANNEL: channel.fileno(), PULSE: self.pulse}
            self.popen = subprocess.Popen(
                [*PROCESS, str(os.getpid()), str(self._said), str(begin), module],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[*self._descriptors.values(), self._said, begin],
                env={name: value for name, value in os.environ.items() if name not in UNSET},
                start_new_session=True,  # what a terminal sends is for the supervisor to act on
            )
            ours.callback(self.popen.wait)
            ours.callback(self.popen.kill)
            self.pidfd = os.pidfd_open(self.popen.pid)
            ours.callback(os.close, self.pidfd)
            self._ours = ours.pop_all()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def begin(self, role: Role, logs: tuple[str, Format]) -> None:
        """Tells it what it is there for. From now on its descriptors here are the caller's. Raises OSError."""
        payload = role.payload() if callable(role.payload) else role.payload
        about = {
            "name": role.name,
            "target": role.target,
            "cores": sorted(role.cores),
            "descriptors": self._descriptors,
            "log": logs,
        }
        with os.fdopen(os.dup(self._said), "wb") as file:
            file.write(json.dumps(about).encode() + b"\n" + payload)
        os.lseek(self._said, 0, os.SEEK_SET)
        os.write(self._begin, b"\n")
        priority.hasten(self.popen.pid)  # it may import still
        os.close(self._said)
        os.close(self._begin)
        self._ours.pop_all()

    def end(self) -> None:
        """Kills it, where it was not told to begin."""
        self._ours.close()


class Launcher:
    """Starts processes. For roles that have a spare it keeps an interpreter ready for the next one."""

    def __init__(self, log_level: str = "info", log_format: Format = "human") -> None:
        self._logs: tuple[str, Format] = log_level, log_format
        self._spares: dict[str, Interpreter] = {}
        """By the target of their roles."""

    def __call__(self, role: Role, hear: Hear) -> ChildProcess:
        """Starts the process of a role. Raises OSError."""
        self._forget_ended(role)
        return ChildProcess(role, hear, self._logs, self._spares.pop(role.target, None))

    def prepare(self, role: Role) -> bool:
        """Keeps an interpreter for the next process of a role with this target, if it is to have one.

        Returns whether there is one, or none is to be. Where the one before has ended by itself, it is left to the
        caller when to try again.
        """
        if self._forget_ended(role):
            return False
        if not role.has_spare or role.target in self._spares:
            return True
        try:
            self._spares[role.target] = Interpreter(role.descriptors, role.module)
        except OSError as error:
            log.warning("%s: no other can be kept ready for its place: %s", role.name, error)
            return False
        return True

    def _forget_ended(self, role: Role) -> bool:
        """Lets go of what was kept ready and has ended by itself; returns whether that is so."""
        spare = self._spares.get(role.target)
        if spare is None or spare.is_running:
            return False
        log.warning("%s: what was kept ready for its place ended with status %d", role.name, spare.popen.returncode)
        self._spares.pop(role.target).end()
        return True

    def close(self) -> None:
        """Ends what was kept ready."""
        while self._spares:
            self._spares.popitem()[1].end()


class ChildProcess:
    """A running process. `hear` gets its messages; what it writes on stderr goes into the log.

    It is killed when the thread ends that makes this object, or made the `interpreter`: make it on the main thread, on
    whose event loop the rest happens. Raises OSError where the process can't be started.
    """

    def __init__(
        self,
        role: Role,
        hear: Hear,
        logs: tuple[str, Format] = ("info", "human"),
        interpreter: Interpreter | None = None,
    ) -> None:
        self.role = role
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._reader = Reader()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its status, negative for the signal that ended it; set after its last message was heard."""
        interpreter = interpreter or _interpreter(role)
        try:
            interpreter.begin(role, logs)
        except BaseException:
            interpreter.end()
            raise
        self._popen, self._pidfd, self._channel = interpreter.popen, interpreter.pidfd, interpreter.channel
        self._pulse = interpreter.pulse
        self._unsent = bytearray()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._output = Output(role.name, interpreter.stderr)
        self._loop.add_reader(self._pidfd, self._on_end)

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

    @property
    def beats(self) -> int:
        """How often its event loop has shown that it goes on; 0 once it has ended."""
        return 0 if self.ended.done() else pulse.beats(self._pulse)

    def ask(self) -> None:
        """Asks for its metrics; not again before it has shown them."""
        self._send(Kind.ASK, b"")

    def tell(self, outcome: object) -> None:
        """Tells it what became of its wish for a successor: plain data of JSON."""
        self._send(Kind.OUTCOME, json.dumps(outcome).encode())

    def _send(self, kind: Kind, content: bytes) -> None:
        """Sends a message, what it has no room for as soon as it has read others. Nothing where it listens no more."""
        if self._channel.fileno() >= 0:
            self._unsent += encode(kind, content)
            self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, or is about to
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._channel.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._channel.fileno())

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
                self._take(kind, content)
        except ValueError as error:
            log.error("%s: what it says can't be understood, and it is killed: %s", self.role.name, error)
            self.send_signal(signal.SIGKILL)
            received = b""
        if not received:
            self._close_channel()
        return bool(received)

    def _take(self, kind: Kind, content: bytes) -> None:
        try:
            self._hear(kind, content)
        except ValueError as error:
            log.error("%s: a message can't be understood, %s: %s", self.role.name, kind.name, error)

    def _close_channel(self) -> None:
        if (number := self._channel.fileno()) >= 0:
            self._loop.remove_reader(number)
            self._loop.remove_writer(number)
            self._channel.close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._popen.wait()
        while self._channel.fileno() >= 0 and self._receive():  # bounded by what a socket holds: nobody writes any more
            pass
        self._close_channel()
        self._output.process_ended()
        self.ended.set_result(status)
        os.close(self._pidfd)
        os.close(self._pulse)


def _interpreter(role: Role) -> Interpreter:
    """Starts one for this process alone, with what the role connects."""
    with ExitStack() as theirs:
        opened = dict(role.connect())
        for descriptor in opened.values():
            theirs.callback(os.close, descriptor)
        return Interpreter({**role.descriptors, **opened})
