"""The start of a role's process: in a fresh interpreter, or by a fork of a spare one that has imported its modules."""

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
"""The interpreter of this process, with links resolved: they may lead to another environment by now."""
PROCESS: Final = (PYTHON, "-P", "-m", "xlaserve.processes.supervision.child")
UNSET: Final = (service_manager.ADDRESS, service_manager.WATCHDOG_US, service_manager.WATCHDOG_PID)
"""Variables of the environment that are for the supervisor only."""
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Has NumPy start no threads when it is imported."""
FORK_S: Final = 1.0
"""How long a spare process may take to fork, which takes some milliseconds of a processor."""
PIDS_BYTES: Final = 64


class Started(NamedTuple):
    """A child process. It is killed when the thread ends that has started it."""

    pid: int
    wait: Callable[[], int]
    """Waits for the end of the process and returns its exit status, negative for the signal that ended it."""


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
    """A process that imports `module` and then waits, to start others by forks; to be used on the main thread.

    Its stderr goes into the log. Raises OSError where it can't be started.
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
        """The exit status of the spare process; None until it has ended."""
        return self._popen.poll()

    @property
    def is_ready(self) -> bool:
        """Whether the spare process has imported its module, and has not ended."""
        if not self._has_imported:
            with suppress(BlockingIOError):
                self._has_imported = bool(self._channel.recv(1, socket.MSG_DONTWAIT))
        return self._has_imported and self.status is None

    def fork(self, orders: Orders) -> Started:
        """Starts a process by a fork. Raises OSError, and ends the spare, where that has ended or is too slow."""
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
        """Ends the spare process, and a process that it forks too late."""
        self._popen.kill()
        self._popen.wait()
        if self._is_forking:
            self._is_forking = False
            threading.Thread(
                target=_end_late, args=[_with_same_descriptor(self._channel)], name="late fork", daemon=True
            ).start()
        self._channel.close()
        self._output.process_ended()


def _forked(channel: socket.socket) -> Started:
    """Waits for a forked process to send its number, once it is this one's child. Raises OSError where none does."""
    if not (numbers := channel.recv(PIDS_BYTES)):
        raise ChildProcessError("the spare process has ended")
    pid, between = map(int, numbers.split())
    with suppress(ChildProcessError):  # the spare process, its parent, waits for it unless it has ended
        os.waitpid(between, os.WNOHANG)
    return Started(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _with_same_descriptor(channel: socket.socket) -> socket.socket:
    """Returns a new socket object of the same descriptor, which it takes over: there may be no free descriptors."""
    return socket.socket(fileno=channel.detach())


def _end_late(channel: socket.socket) -> None:
    """Ends a process that is forked however late, so that it does not stay as a zombie. Returns once none can come."""
    with channel, suppress(OSError):
        channel.settimeout(None)
        late = _forked(channel)
        os.kill(late.pid, signal.SIGKILL)
        late.wait()


def _interpreter(stderr: int, module: str = "") -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a fresh interpreter. Returns it with the socket over which it takes orders. Raises OSError."""
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
                start_new_session=True,  # signals of a terminal are for the supervisor alone
            )
        except BaseException:
            ours.close()
            raise
    return popen, ours
