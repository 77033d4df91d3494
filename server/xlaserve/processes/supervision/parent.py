"""The parent of a server that is one process: passes on signals and messages, and starts it again after a crash.

python -I -S parent.py SERVER CHANNEL COMMAND...

SERVER is the number of the server's process, a child of this one. CHANNEL is the descriptor of a datagram socket over
which the server sends messages for the service manager, which accepts them from this process only, and ENDS before it
ends by itself. Where it ends in another way, COMMAND takes the place of this program. Nothing of the server is imported
here, as this process takes memory for as long as the server runs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

ENDED = "ENDED_BEFORE_XLASERVE"
"""The environment variable that tells COMMAND the exit status of the server, and 1 if it was ready before, else 0."""
CRASHES = frozenset(
    {
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
        *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU),
    }
)
"""Signals that a process ends by itself with: for a fault, or for a timer or a limit that a library has set."""
SILENCED = signal.SIGXCPU
"""The signal that ends a process whose event loop stands still, one of `CRASHES`; other crashes have other signals."""
ENDS = b"ENDS=1"
"""The message of a server that ends by itself and has logged the reason."""
STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
PASSED = frozenset({*STOPS, signal.SIGHUP})
"""Signals that are for the server."""
MESSAGE_BYTES = 4096


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of the server, or does not return where it is started again."""
    server, channel, *command = arguments
    pidfd = os.pidfd_open(int(server))
    is_ending = is_ready = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        is_ending = is_ending or number in STOPS
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    for number in PASSED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    with socket.socket(fileno=int(channel)) as messages, _service_manager() as service_manager:
        while messages.fileno() in select.select([pidfd, messages.fileno()], [], [])[0]:
            message = messages.recv(MESSAGE_BYTES)
            if message == ENDS:
                is_ending = True
                continue
            is_ready = is_ready or b"READY=1" in message
            with suppress(OSError):  # there is no service manager, or none any more
                service_manager.send(message)
    status = os.waitstatus_to_exitcode(os.waitpid(int(server), 0)[1])
    # For COMMAND, once it can act on them: the first process of a container has no default action for them. What has
    # come until now is known below.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    if -status not in PASSED and not is_ending:  # it could not say that it ends, so that COMMAND has to
        _reap()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.environ[ENDED] = f"{status} {int(is_ready)}"
        os.execvp(command[0], command)
    return exit_status(status)


def exit_status(status: int) -> int:
    """Returns the exit status of a process, negative for a signal, as shells return it: 128 and the signal's number."""
    return status if status >= 0 else 128 - status


def _reap() -> None:
    """Waits for orphans that have ended, where this process is a container's first: COMMAND knows none of them."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _service_manager() -> socket.socket:
    """Returns a socket to the service manager, connected where there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.setblocking(False)
    with suppress(OSError, ValueError):
        if address:
            found.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
