"""A process of a role, as it sees itself.

python -P -m xlaserve.processes.supervision.child PARENT ORDERS MODULE

PARENT is the number of the process that started it, ORDERS the descriptor of a socket over which that tells it what it
is there for. If MODULE is not empty, it is imported, and each time that orders come another process is forked for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from prometheus_client.registry import Collector

from xlaserve.engine.niceness import LowPriority
from xlaserve.errors import XlaserveError
from xlaserve.processes.supervision import linux, pulse
from xlaserve.processes.supervision.messages import CHANNEL, Kind, MessageReader, encode
from xlaserve.processes.supervision.orders import READY, SPARE, STDERR, Orders, receive
from xlaserve.processes.supervision.pulse import PULSE, Pulse
from xlaserve.processes.supervision.role import NO_USE
from xlaserve.telemetry import log_writer, logs, registry_snapshot

# Not by __name__: this module is run as a program.
log = logging.getLogger("xlaserve.processes.supervision.child")

FAILED: Final = 1
THREADS_END_S: Final = 5.0
"""How long a thread may take to end that has nothing more to do."""
CHUNK_BYTES: Final = 4096
CLOSE_S: Final = 1.0
"""How long the last messages may take to a supervisor that does not read."""
SILENT_BEATS: Final = 30
"""A supervisor that asks for nothing for as many beats may hang: it asks for metrics every few seconds."""
REFRESH_TIMEOUT_S: Final = 0.25
"""How long a look at the metrics waits for the event loop. Then it shows what was seen last."""


class Child:
    """This process: its role's name, payload and descriptors, and what it says to its supervisor, from any thread.

    Nothing here waits for the supervisor, or raises where it is gone. A message that it has not read yet gives way to a
    later one of the same kind. Once it can't be spoken to any more, this process is told to end, by SIGTERM, so that
    another takes its place.
    """

    def __init__(self, name: str, payload: bytes, descriptors: Mapping[str, int]) -> None:
        self.name = name
        self.payload = payload
        self.descriptors = {key: number for key, number in descriptors.items() if key not in (CHANNEL, PULSE)}
        """By names. What this process starts does not inherit them."""
        self.is_cut_off = False
        """Whether the supervisor can't be spoken to any more."""
        self._pulse = Pulse(descriptors[PULSE])
        self._channel = socket.socket(fileno=descriptors[CHANNEL])
        self._unsent: dict[Kind, bytes] = {}
        """The last message of each kind, in the order in which they are sent."""
        self._is_sending = self._is_closing = False
        self._changed = threading.Condition()
        """Of the three above."""
        self._showing = threading.Lock()
        """Held while the metrics are read: what was read before others would look as if counts had fallen."""
        self._shown = registry_snapshot.encode({})
        self._metrics: Callable[[], bytes] = lambda: self._shown
        self._refresh: Callable[[], Future[None]] | None = None
        self._on_outcome: Callable[[Any], object] = lambda outcome: None
        self._is_listening = False
        self._silent_beats = 0
        self.is_supervised = True
        """Whether the supervisor asked lately. It is beats that count: none pass while this process is stopped."""
        self.on_supervision: Callable[[], object] = lambda: None
        """Called on the event loop when `is_supervised` has changed."""
        threading.Thread(target=self._speak, name="to supervisor", daemon=True).start()

    def beat(self) -> None:
        """Shows from now on that the running event loop goes on. If it stops, the supervisor kills this process."""
        self._pulse.beat()
        self._silent_beats += self._is_listening
        if self.is_supervised != (self._silent_beats < SILENT_BEATS):
            self.is_supervised = not self.is_supervised
            if self.is_supervised:
                log.info("the supervisor asks for metrics again")
            else:
                log.error("the supervisor has asked for nothing for %d s: it may hang", SILENT_BEATS * pulse.BEAT_S)
            self.on_supervision()
        asyncio.get_running_loop().call_later(pulse.BEAT_S, self.beat)

    def tell_ready(self, about: Mapping[str, object] | None = None) -> None:
        """Says that it does what it is there for, and what may be known of that."""
        self._tell(Kind.READY, json.dumps(about or {}).encode())

    def show_metrics(self, registry: Collector, refresh: Callable[[], Future[None]]) -> None:
        """Shows the supervisor what is in `registry` whenever it asks, after `refresh`; called on a thread of its own.

        Shown so even while the event loop is busy, as over HTTP.
        """
        self._metrics, self._refresh = lambda: registry_snapshot.encode(registry_snapshot.take(registry)), refresh
        self._listen()

    def keep(self, content: bytes) -> None:
        """Gives what the next process of this role is to begin with, where this one ends unasked."""
        self._tell(Kind.KEEP, content)

    def ask_for_successor(self, content: bytes, on_outcome: Callable[[Any], object]) -> None:
        """Has another process take this one's place, which begins with `content`. `on_outcome` is called on a thread of
        its own with what came of it, as the supervisor's watcher tells it."""
        self._on_outcome = on_outcome
        self._listen()
        self._tell(Kind.SUCCEED, content)

    def pass_reload(self) -> None:
        """Leaves it to the process in this one's place to read the configuration again."""
        self._tell(Kind.RELOAD, b"")

    def close(self) -> None:
        """Shows the metrics for the last time, so that nothing that was counted is lost, says that this process ends,
        and sends what is left."""
        self._tell_metrics()
        self._tell(Kind.ENDS, b"")
        with self._changed:
            self._changed.wait_for(lambda: self.is_cut_off or not (self._unsent or self._is_sending), CLOSE_S)
            self._is_closing = True
            self._changed.notify_all()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        """Not before there is something to answer: a question is asked once."""
        if not self._is_listening:
            self._is_listening = True
            threading.Thread(target=self._hear, name="supervisor", daemon=True).start()

    def _hear(self) -> None:
        reader, reason = MessageReader(), "it has closed the channel"
        try:
            while received := self._channel.recv(CHUNK_BYTES):
                self._silent_beats = 0
                for kind, content in reader.feed(received):
                    if kind is Kind.OUTCOME:
                        self._on_outcome(json.loads(content))
                    else:
                        self._show()
        except Exception as error:
            reason = repr(error)
        self._cut_off(reason)

    def _show(self) -> None:
        try:
            if self._refresh is not None:
                self._refresh().result(REFRESH_TIMEOUT_S)
        except TimeoutError:
            log.debug("the event loop did not answer within %g s", REFRESH_TIMEOUT_S)
        except Exception:
            log.exception("reading the gauges failed")
        self._tell_metrics()

    def _tell_metrics(self) -> None:
        """Shows them, or what was shown last where they can't be read: who gets no answer does not ask again."""
        with self._showing:
            try:
                self._shown = self._metrics()
            except Exception:
                log.exception("the metrics can't be shown")
            self._tell(Kind.METRICS, self._shown)

    def _tell(self, kind: Kind, content: bytes) -> None:
        with self._changed:
            self._unsent.pop(kind, None)
            self._unsent[kind] = content
            self._changed.notify_all()

    def _speak(self) -> None:
        try:
            while message := self._next():
                self._channel.sendall(message)
        except OSError as error:
            self._cut_off(repr(error))

    def _next(self) -> bytes:
        """Waits for a message and takes it; empty once there will be no more."""
        with self._changed:
            self._is_sending = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._unsent or self._is_closing)
            if not self._unsent:
                return b""
            kind = next(iter(self._unsent))
            self._is_sending = True
            return encode(kind, self._unsent.pop(kind))

    def _cut_off(self, reason: str) -> None:
        with self._changed:
            if self.is_cut_off or self._is_closing:
                return
            self.is_cut_off = True
            self._changed.notify_all()
        log.error("the supervisor can't be spoken to any more, and this process ends: %s", reason)
        os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    """Does what the supervisor says, and ends with what that returns."""
    *numbers, module = arguments
    parent, number = map(int, numbers)
    if not linux.end_with(parent, signal.SIGKILL):  # which can't be put off: no orphan may keep a port
        sys.exit(FAILED)
    # Sent to have the configuration read again, which it may come too early for.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervisor = socket.socket(fileno=number)
    received = _forked_for(supervisor, parent, module) if module else receive(supervisor)
    supervisor.close()
    if not received:
        sys.exit(0)  # nothing has become of it
    orders = Orders.read(received)
    descriptors = dict(orders.descriptors)
    os.dup2(descriptors[STDERR], sys.stderr.fileno())
    os.close(descriptors.pop(STDERR))
    linux.set_title(f"xlaserve {orders.name}", orders.name)
    logs.configure(*orders.log, orders.name)
    if orders.cores:
        try:
            os.sched_setaffinity(0, orders.cores)
        except OSError as error:
            log.warning("it runs on any core, not on %s alone: %s", orders.cores, error.strerror)
    child = Child(orders.name, orders.payload, descriptors)  # its threads run where this one does
    status = _run(orders.target, child)
    child.close()
    if child.is_cut_off:
        status = status or FAILED
    log_writer.finish()
    sys.stderr.flush()
    # Not sys.exit, which waits for what nothing can interrupt, such as a compilation.
    os._exit(status)


def _forked_for(supervisor: socket.socket, parent: int, module: str) -> list[int]:
    """Imports a module, and forks a process each time that orders come; returns in each of them with what it received,
    and here once no more come."""
    priority = LowPriority()
    priority.begin()
    import_module(module)
    priority.end()
    _expect_one_thread()
    linux.set_title(f"xlaserve {SPARE}", SPARE)
    supervisor.send(READY)
    while received := receive(supervisor):
        if between := linux.fork_sibling():
            if not linux.end_with(parent, signal.SIGKILL):
                os._exit(FAILED)
            os.setsid()
            supervisor.send(b"%d %d" % (os.getpid(), between))
            break
        for descriptor in received:
            os.close(descriptor)
    return received


def _expect_one_thread() -> None:
    """Raises RuntimeError where there are others: what they hold at a fork would be held for ever there."""
    give_up_at = time.monotonic() + THREADS_END_S
    while len(threads := [*Path("/proc/self/task").iterdir()]) > 1:
        if time.monotonic() > give_up_at:
            names = ", ".join((thread / "comm").read_text().strip() for thread in threads)
            raise RuntimeError(f"expected the modules to start no threads, got {names}")
        time.sleep(0.01)


def _run(target: str, child: Child) -> int:
    module, _, function = target.partition(":")
    try:
        status: int = getattr(import_module(module), function)(child)
    except XlaserveError as error:
        log.error("%s", error)
        return NO_USE
    except Exception:
        log.exception("it failed")
        return FAILED
    return status


if __name__ == "__main__":
    main(sys.argv[1:])
