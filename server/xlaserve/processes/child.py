"""A process of a role, as it sees itself.

python -P -m xlaserve.processes.child PARENT SAID BEGIN MODULE

PARENT is the number of the process that started it. SAID and BEGIN are descriptors: a file with what that says to it,
and the end of a pipe, out of which a byte comes once it is there. MODULE is imported before that, if it is not empty.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from prometheus_client.registry import Collector

from xlaserve.errors import XlaserveError
from xlaserve.priority import LowPriority
from xlaserve.processes import linux
from xlaserve.processes.messages import CHANNEL, Kind, Reader, encode
from xlaserve.processes.role import NO_USE
from xlaserve.telemetry import log_writer, logs, snapshot

log = logging.getLogger(__name__)

FAILED: Final = 1
SPARE: Final = "xlaserve spare"
"""What `ps` shows of a process that waits."""
CHUNK_BYTES: Final = 4096
SEND_TIMEOUT_S: Final = 1
"""How long a message may take to a supervisor that does not read. Then none is sent any more."""
REFRESH_TIMEOUT_S: Final = 0.25
"""How long a look at the metrics waits for the event loop. Then it shows what was seen last."""


class Child:
    """This process: its role's name, payload and descriptors, and what it says to its supervisor, from any thread.

    Nothing here raises where the supervisor is gone: the kernel ends this process then.
    """

    def __init__(self, name: str, payload: bytes, descriptors: Mapping[str, int]) -> None:
        self.name = name
        self.payload = payload
        self.descriptors = {key: number for key, number in descriptors.items() if key != CHANNEL}
        """By names. What this process starts does not inherit them."""
        self._channel = socket.socket(fileno=descriptors[CHANNEL])
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._sending = threading.Lock()
        self._metrics: Callable[[], bytes] | None = None
        self._refresh: Callable[[], Future[None]] | None = None
        self._on_outcome: Callable[[Any], object] = lambda outcome: None
        self._is_listening = False

    def tell_ready(self, about: Mapping[str, object] | None = None) -> None:
        """Says that it does what it is there for, and what may be known of that."""
        self._tell(Kind.READY, lambda: json.dumps(about or {}).encode())

    def show_metrics(self, registry: Collector, refresh: Callable[[], Future[None]]) -> None:
        """Shows the supervisor what is in `registry` whenever it asks, after `refresh`; called on a thread of its own.

        Shown so even while the event loop is busy, as over HTTP.
        """
        self._metrics, self._refresh = lambda: snapshot.encode(snapshot.take(registry)), refresh
        self._listen()

    def keep(self, content: bytes) -> None:
        """Gives what the next process of this role is to begin with, where this one ends unasked."""
        self._tell(Kind.KEEP, lambda: content)

    def ask_for_successor(self, content: bytes, on_outcome: Callable[[Any], object]) -> None:
        """Has another process take this one's place, which begins with `content`. `on_outcome` is called on a thread of
        its own with what came of it, as the supervisor's watcher tells it."""
        self._on_outcome = on_outcome
        self._listen()
        self._tell(Kind.SUCCEED, lambda: content)

    def pass_news(self) -> None:
        """Leaves it to the process in this one's place to read the configuration again."""
        self._tell(Kind.NEWS, bytes)

    def close(self) -> None:
        """Shows the metrics for the last time, so that nothing that was counted is lost."""
        self._tell_metrics()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            threading.Thread(target=self._hear, name="supervisor", daemon=True).start()

    def _hear(self) -> None:
        reader = Reader()
        with suppress(OSError):
            while received := self._channel.recv(CHUNK_BYTES):
                for kind, content in reader.feed(received):
                    if kind is Kind.OUTCOME:
                        self._on_outcome(json.loads(content))
                    else:
                        self._show()

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
        if self._metrics is None:
            return
        try:
            self._tell(Kind.METRICS, self._metrics)
        except Exception:
            log.exception("the metrics can't be shown")

    def _tell(self, kind: Kind, make: Callable[[], bytes]) -> None:
        """Sends what is made in its turn: a snapshot that came after a later one would look as if counts had fallen."""
        with self._sending:
            message = encode(kind, make())
            try:
                self._channel.sendall(message)
            except OSError as error:  # half of it may have gone
                log.debug("the supervisor does not listen: %r", error)
                with suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)


def main(arguments: Sequence[str]) -> None:
    """Does what the supervisor says, and ends with what that returns."""
    *numbers, module = arguments
    parent, said, begin = map(int, numbers)
    if not linux.end_with(parent, signal.SIGKILL):  # which can't be put off: no orphan may keep a port
        sys.exit(FAILED)
    # Sent to have the configuration read again, which it may come too early for.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if module:
        _import_at_leisure(module)
    if not os.read(begin, 1):
        sys.exit(0)  # nothing has become of it
    os.close(begin)
    with os.fdopen(said, "rb") as file:
        about: dict[str, Any] = json.loads(file.readline())
        payload = file.read()
    for descriptor in about["descriptors"].values():
        os.set_inheritable(descriptor, False)
    child = Child(about["name"], payload, about["descriptors"])
    linux.set_title(f"xlaserve {child.name}", child.name)
    level, form = about["log"]
    logs.configure(level, form, child.name)
    if cores := about["cores"]:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            log.warning("it runs on any core, not on %s alone: %s", cores, error.strerror)
    status = _run(about["target"], child)
    child.close()
    log_writer.finish()
    sys.stderr.flush()
    # Not sys.exit, which waits for what nothing can interrupt, such as a compilation.
    os._exit(status)


def _import_at_leisure(module: str) -> None:
    """Imports a module, and leaves the processors to others meanwhile."""
    linux.set_title(SPARE, "spare")
    priority = LowPriority()
    priority.begin()
    try:
        import_module(module)
    except Exception as error:
        log.debug("%s: %r", module, error)  # it is imported again, and that is told, by who needs it
    priority.end()


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
