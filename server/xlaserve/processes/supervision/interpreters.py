"""How the process of a role is started: as a fresh interpreter, or by a fork of one that has imported what it needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.processes.supervision import linux, service_manager
from xlaserve.processes.supervision.orders import SPARE, STDERR, Orders
from xlaserve.processes.supervision.output import Output

PYTHON: Final = str(Path(sys.executable).parent.resolve() / Path(sys.executable).name)
"""The interpreter of this process, though a link that led to its environment may lead to another one by now."""
PROCESS: Final = (PYTHON, "-P", "-m", "xlaserve.processes.supervision.child")
UNSET: Final = (service_manager.ADDRESS, service_manager.WATCHDOG_US, service_manager.WATCHDOG_PID)
"""What of the environment is for the supervisor only."""
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Has NumPy start no threads when it is imported."""
FORK_S: Final = 1.0
"""How long a process that has imported everything may take to fork, which takes it some milliseconds of a processor."""
PIDS_BYTES: Final = 64


class Started(NamedTuple):
    """A process, which is this one's child. It is killed when the thread ends that has started it."""

    pid: int
    wait: Callable[[], int]
    """Waits for its end and returns its status, negative for the signal that ended it."""


def start(orders: Orders) -> Started:
    """Starts a process in a fresh interpreter. Raises OSError."""
    popen, channel = _interpreter(orders.descriptors[STDERR])
    with channel:
        try:
            orders.send(channel)
        except BaseException:
            popen.kill()
            popen.wait()
            raise
    return Started(popen.pid, popen.wait)


class Spare:
    """A process that imports `module` and then waits, to start others by forks; of use on the main thread.

    What it writes on stderr goes into the log. Raises OSError where it can't be started.
    """

    def __init__(self, module: str) -> None:
        stderr, theirs = os.pipe()
        try:
            self._popen, self._channel = _interpreter(theirs, module)
        except BaseException:
            os.close(stderr)
            raise
        finally:
            os.close(theirs)
        self._output = Output(SPARE, stderr)
        self._has_imported = False
        self._is_forking = False

    @property
    def status(self) -> int | None:
        """That with which it has ended, None until then."""
        return self._popen.poll()

    @property
    def is_ready(self) -> bool:
        """Whether it has imported its module, and has not ended."""
        if not self._has_imported:
            with suppress(BlockingIOError):
                self._has_imported = bool(self._channel.recv(1, socket.MSG_DONTWAIT))
        return self._has_imported and self.status is None

    def fork(self, orders: Orders) -> Started:
        """Starts a process. Where it ends or takes too long it is of no more use, and raises OSError."""
        self._channel.settimeout(FORK_S)
        self._is_forking = True
        try:
            with linux.adopting():
                orders.send(self._channel)
                started = _forked(self._channel)
        except OSError:
            self.end()
            raise
        self._is_forking = False
        return started

    def end(self) -> None:
        """Ends it, and what it forks too late."""
        self._popen.kill()
        self._popen.wait()
        if self._is_forking:
            self._is_forking = False
            threading.Thread(target=_end_late, args=[_moved(self._channel)], name="late fork", daemon=True).start()
        self._channel.close()
        self._output.process_ended()


def _forked(channel: socket.socket) -> Started:
    """Waits for what tells its number once it is this process's child. Raises OSError where nothing can."""
    if not (numbers := channel.recv(PIDS_BYTES)):
        raise ChildProcessError("it has ended")
    pid, between = map(int, numbers.split())
    with suppress(ChildProcessError):  # it is the spare's, which waits for it unless it has ended
        os.waitpid(between, os.WNOHANG)
    return Started(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _moved(channel: socket.socket) -> socket.socket:
    """Returns another that has its descriptor in its place: there may be no more descriptors."""
    return socket.socket(fileno=channel.detach())


def _end_late(channel: socket.socket) -> None:
    """Ends what tells its number however late, so that it does not stay as a zombie. Returns at once if nothing can."""
    with channel, suppress(OSError):
        channel.settimeout(None)
        late = _forked(channel)
        os.kill(late.pid, signal.SIGKILL)
        late.wait()


def _interpreter(stderr: int, module: str = "") -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts one, and returns it with the socket over which it takes orders. Raises OSError."""
    env = {name: value for name, value in os.environ.items() if name not in UNSET}
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            popen = subprocess.Popen(
                [*PROCESS, str(os.getpid()), str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env={**env, **(ONE_THREAD if module else {})},
                start_new_session=True,  # what a terminal sends is for the supervisor to act on
            )
        except BaseException:
            ours.close()
            raise
    return popen, ours
