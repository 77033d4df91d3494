"""A process of a role, seen from within.

python -P -m xlaserve.processes.supervision.child PARENT ORDERS MODULE

PARENT is the number of the process that started this one, ORDERS the descriptor of a socket over which the orders of
this process come. If MODULE is not empty, it is imported, and a process is forked each time that orders come.
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
"""How long the threads of an imported module may take to end."""
CHUNK_BYTES: Final = 4096
CLOSE_S: Final = 1.0
"""How long `close` waits for a supervisor that does not read the last messages."""
SILENT_BEATS: Final = 30
"""Beats without a question of the supervisor after which it may hang: it asks for metrics every few seconds."""
REFRESH_TIMEOUT_S: Final = 0.25
"""How long the metrics wait for the event loop to refresh the gauges. Then the gauges stand as they were."""


class Child:
    """This process: its role's name, payload and descriptors, and its messages to the supervisor, from any thread.

    Nothing here waits for the supervisor, or raises where that is gone. A message that is not sent yet is replaced by a
    later one of the same kind. Once the connection is lost, this process is told to end, by SIGTERM, so that another
    takes its place.
    """

    def __init__(self, name: str, payload: bytes, descriptors: Mapping[str, int]) -> None:
        self.name = name
        self.payload = payload
        self.descriptors = {key: number for key, number in descriptors.items() if key not in (CHANNEL, PULSE)}
        """Descriptors by their names. Processes that this one starts do not inherit them."""
        self.is_cut_off = False
        """Whether the connection to the supervisor is lost."""
        self._pulse = Pulse(descriptors[PULSE])
        self._channel = socket.socket(fileno=descriptors[CHANNEL])
        self._unsent: dict[Kind, bytes] = {}
        """The last message of each kind, in the order in which they are sent."""
        self._is_sending = self._is_closing = False
        self._changed = threading.Condition()
        """The condition of `_unsent`, `_is_sending` and `_is_closing`."""
        self._showing = threading.Lock()
        """Held from reading the metrics until they are queued: sent in another order, counts would seem to fall."""
        self._shown = registry_snapshot.encode({})
        self._metrics: Callable[[], bytes] = lambda: self._shown
        self._refresh: Callable[[], Future[None]] | None = None
        self._on_outcome: Callable[[Any], object] = lambda outcome: None
        self._is_listening = False
        self._silent_beats = 0
        self.is_supervised = True
        """Whether the supervisor has asked lately: in beats, of which none pass while this process is stopped."""
        self._on_supervision: list[Callable[[], object]] = []
        threading.Thread(target=self._send_messages, name="to supervisor", daemon=True).start()

    def beat(self) -> None:
        """Counts the pulse of the running event loop from now on. If that stops, the supervisor kills this process."""
        self._pulse.beat()
        self._silent_beats += self._is_listening
        if self.is_supervised != (self._silent_beats < SILENT_BEATS):
            self.is_supervised = not self.is_supervised
            if self.is_supervised:
                log.info("the supervisor asks for metrics again")
            else:
                log.error("the supervisor has asked for nothing for %d s: it may hang", SILENT_BEATS * pulse.BEAT_S)
            for on_change in self._on_supervision:
                on_change()
        asyncio.get_running_loop().call_later(pulse.BEAT_S, self.beat)

    def follow_supervision(self, on_change: Callable[[], object]) -> None:
        """Has `on_change` called, on the event loop, whenever `is_supervised` has changed."""
        self._on_supervision.append(on_change)

    def tell_ready(self, about: Mapping[str, object] | None = None) -> None:
        """Tells the supervisor that this process is ready, with details in plain data of JSON."""
        self._queue(Kind.READY, json.dumps(about or {}).encode())

    def show_metrics(self, registry: Collector, refresh: Callable[[], Future[None]]) -> None:
        """Sends the metrics in `registry` whenever the supervisor asks for them, after a `refresh` of the gauges.

        A thread of its own does so, and calls `refresh`: the metrics are sent even while the event loop is busy.
        """
        self._metrics, self._refresh = lambda: registry_snapshot.encode(registry_snapshot.take(registry)), refresh
        self._listen()

    def keep(self, content: bytes) -> None:
        """Gives the supervisor `content` for the next process of this role, if this one ends unasked."""
        self._queue(Kind.KEEP, content)

    def ask_for_successor(self, content: bytes, on_outcome: Callable[[Any], object]) -> None:
        """Asks for another process in this one's place, which begins with `content`.

        `on_outcome` is called, on a thread of its own, with the outcome that the supervisor's watcher tells.
        """
        self._on_outcome = on_outcome
        self._listen()
        self._queue(Kind.SUCCEED, content)

    def pass_reload(self) -> None:
        """Has the process in this one's place read the configuration again."""
        self._queue(Kind.RELOAD, b"")

    def close(self) -> None:
        """Sends the last metrics, so that no count is lost, then that this process ends, and all that is unsent."""
        self._tell_metrics()
        self._queue(Kind.ENDS, b"")
        with self._changed:
            self._changed.wait_for(lambda: self.is_cut_off or not (self._unsent or self._is_sending), CLOSE_S)
            self._is_closing = True
            self._changed.notify_all()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        """Starts to receive messages. Not before they can be answered: the supervisor asks once."""
        if not self._is_listening:
            self._is_listening = True
            threading.Thread(target=self._receive_messages, name="supervisor", daemon=True).start()

    def _receive_messages(self) -> None:
        reader, reason = MessageReader(), "it has closed the channel"
        try:
            while received := self._channel.recv(CHUNK_BYTES):
                self._silent_beats = 0
                for kind, content in reader.feed(received):
                    if kind is Kind.OUTCOME:
                        self._on_outcome(json.loads(content))
                    else:
                        self._answer()
        except Exception as error:
            reason = repr(error)
        self._cut_off(reason)

    def _answer(self) -> None:
        try:
            if self._refresh is not None:
                self._refresh().result(REFRESH_TIMEOUT_S)
        except TimeoutError:
            log.debug("the event loop did not answer within %g s", REFRESH_TIMEOUT_S)
        except Exception:
            log.exception("reading the gauges failed")
        self._tell_metrics()

    def _tell_metrics(self) -> None:
        """Queues the metrics, or the last ones where they can't be read: an unanswered supervisor asks no more."""
        with self._showing:
            try:
                self._shown = self._metrics()
            except Exception:
                log.exception("the metrics can't be shown")
            self._queue(Kind.METRICS, self._shown)

    def _queue(self, kind: Kind, content: bytes) -> None:
        with self._changed:
            self._unsent.pop(kind, None)
            self._unsent[kind] = content
            self._changed.notify_all()

    def _send_messages(self) -> None:
        try:
            while message := self._next():
                self._channel.sendall(message)
        except OSError as error:
            self._cut_off(repr(error))

    def _next(self) -> bytes:
        """Waits for the next message and returns its bytes; empty once there will be no more."""
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
        log.error("the connection to the supervisor is lost, and this process ends: %s", reason)
        os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    """Waits for orders, runs the function that they name, and ends this process with the status that it returns."""
    *numbers, module = arguments
    parent, number = map(int, numbers)
    if not linux.end_with(parent, signal.SIGKILL):  # a signal that can't be blocked: no orphan may keep a port
        sys.exit(FAILED)
    # SIGHUP has the configuration read again, and may come before there is a handler for it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervisor = socket.socket(fileno=number)
    received = _forked_for(supervisor, parent, module) if module else receive(supervisor)
    supervisor.close()
    if not received:
        sys.exit(0)  # the spare process was not needed
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
            log.warning("this process runs on any core, not on %s alone: %s", orders.cores, error.strerror)
    child = Child(orders.name, orders.payload, descriptors)  # its threads run where this one does
    status = _run(orders.target, child)
    child.close()
    if child.is_cut_off:
        status = status or FAILED
    log_writer.finish()
    sys.stderr.flush()
    # Not sys.exit, which waits for threads that nothing can interrupt, such as one that compiles.
    os._exit(status)


def _forked_for(supervisor: socket.socket, parent: int, module: str) -> list[int]:
    """Imports a module, and forks a process each time that orders come.

    Returns the received descriptors in each forked process; here none, once no more orders come.
    """
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
    """Raises RuntimeError where there are other threads: locks that they hold at a fork stay locked after it."""
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
        log.exception("this process failed")
        return FAILED
    return status


if __name__ == "__main__":
    main(sys.argv[1:])
