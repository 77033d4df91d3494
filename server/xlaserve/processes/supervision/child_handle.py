"""A process of a role, seen from its supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from xlaserve.processes.supervision import pulse
from xlaserve.processes.supervision.interpreters import Spare, Started, start
from xlaserve.processes.supervision.messages import CHANNEL, Kind, MessageReader, OnMessage, encode
from xlaserve.processes.supervision.orders import STDERR, Orders
from xlaserve.processes.supervision.output import Output
from xlaserve.processes.supervision.pulse import PULSE
from xlaserve.processes.supervision.role import Role
from xlaserve.telemetry.logs import Format

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 64 * 1024


class Launcher:
    """Starts the processes of roles. For roles that have a spare it keeps a spare process, which forks theirs."""

    def __init__(self, log_level: str = "info", log_format: Format = "human") -> None:
        self._logs: tuple[str, Format] = log_level, log_format
        self._spares: dict[str, Spare] = {}
        """Spare processes, by the target of their roles."""

    def __call__(self, role: Role, on_message: OnMessage) -> ChildProcess:
        """Starts the process of a role. Raises OSError."""
        return ChildProcess(role, on_message, self._logs, self._start)

    def _start(self, orders: Orders) -> Started:
        spare = self._spares.get(orders.target)
        if spare is not None and spare.is_ready:
            try:
                return spare.fork(orders)
            except OSError as error:
                log.warning(
                    "%s: starts in a fresh interpreter, as the spare process did not fork: %s", orders.name, error
                )
        return start(orders)

    def prepare(self, role: Role) -> bool:
        """Starts a spare process for a role's target, if the role is to have one and there is none.

        Returns False where that failed, or where the spare process has ended: the caller decides when to try again.
        """
        if not role.has_spare:
            return True
        if (spare := self._spares.get(role.target)) is None:
            try:
                self._spares[role.target] = Spare(role.module)
            except OSError as error:
                log.warning("%s: a spare process could not be started: %s", role.name, error)
                return False
        elif (status := spare.status) is not None:
            log.warning("%s: the spare process ended with status %d", role.name, status)
            self._spares.pop(role.target).end()
            return False
        return True

    def close(self) -> None:
        """Ends all spare processes."""
        while self._spares:
            self._spares.popitem()[1].end()


class ChildProcess:
    """A running process. `on_message` is called with its messages; its stderr goes into the log.

    The process is killed when the thread ends that makes this object: make it on the main thread, whose event loop runs
    all the rest. Raises OSError where the process can't be started.
    """

    def __init__(
        self,
        role: Role,
        on_message: OnMessage,
        logs: tuple[str, Format] = ("info", "human"),
        start: Callable[[Orders], Started] = start,
    ) -> None:
        self.role = role
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """The exit status, negative for the signal that ended the process. Set after the last message was handled."""
        self._unsent = bytearray()
        with ExitStack() as ours, ExitStack() as theirs:
            self._channel, channel = socket.socketpair()
            ours.enter_context(self._channel)
            theirs.enter_context(channel)
            stderr, stderr_there = os.pipe()
            ours.callback(os.close, stderr)
            theirs.callback(os.close, stderr_there)
            self._pulse = pulse.create()
            ours.callback(os.close, self._pulse)
            opened = role.connect()
            for descriptor in opened.values():
                theirs.callback(os.close, descriptor)
            own = {CHANNEL: channel.fileno(), PULSE: self._pulse, STDERR: stderr_there}
            payload = role.payload() if callable(role.payload) else role.payload
            orders = Orders(
                role.name, role.target, payload, sorted(role.cores), logs, {**role.descriptors, **opened, **own}
            )
            self.pid, self._wait = start(orders)
            ours.callback(self._wait)
            ours.callback(os.kill, self.pid, signal.SIGKILL)
            self._pidfd = os.pidfd_open(self.pid)
            ours.pop_all()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._output = Output(role.name, stderr)
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def output_closed(self) -> asyncio.Future[None]:
        """Done once nothing more of the process's stderr will come, up to a second after its end."""
        return self._output.closed

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the process a signal, unless it has ended."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def beats(self) -> int:
        """How often the event loop of the process has counted; 0 once the process has ended."""
        return 0 if self.ended.done() else pulse.beats(self._pulse)

    def ask_for_metrics(self) -> None:
        """Asks for the metrics of the process; not to be called again before they have come."""
        self._send(Kind.ASK_METRICS, b"")

    def tell_outcome(self, outcome: object) -> None:
        """Sends the process the outcome of its wish for a successor: plain data of JSON."""
        self._send(Kind.OUTCOME, json.dumps(outcome).encode())

    def _send(self, kind: Kind, content: bytes) -> None:
        """Sends a message, as soon as the socket has room for it; drops it where the process receives no more."""
        if self._channel.fileno() >= 0:
            self._unsent += encode(kind, content)
            self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: self._channel.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended, or is about to
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._channel.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._channel.fileno())

    def _receive(self) -> bool:
        """Handles the messages that have come, and returns whether there may be more."""
        try:
            received = self._channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        try:
            for kind, content in self._reader.feed(received):
                self._handle(kind, content)
        except ValueError as error:
            log.error("%s: the process is killed, as its messages can't be understood: %s", self.role.name, error)
            self.send_signal(signal.SIGKILL)
            received = b""
        if not received:
            self._close_channel()
        return bool(received)

    def _handle(self, kind: Kind, content: bytes) -> None:
        try:
            self._on_message(kind, content)
        except ValueError as error:
            log.error("%s: a message can't be understood, %s: %s", self.role.name, kind.name, error)

    def _close_channel(self) -> None:
        if (number := self._channel.fileno()) >= 0:
            self._loop.remove_reader(number)
            self._loop.remove_writer(number)
            self._channel.close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._wait()
        # At most as much as a socket holds: the writer has ended.
        while self._channel.fileno() >= 0 and self._receive():
            pass
        self._close_channel()
        self._output.process_ended()
        self.ended.set_result(status)
        os.close(self._pidfd)
        os.close(self._pulse)
