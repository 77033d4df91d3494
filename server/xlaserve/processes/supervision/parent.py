"""The parent of a server that is one process: passes on signals and messages, ends it where it does not end by itself
or stands still, and starts it again after a crash.

python -I -S parent.py SERVER CHANNEL PULSE LOOK_S DELAY_S DRAIN_S COMMAND...

SERVER is the number of the server's process, a child of this one. CHANNEL is the descriptor of a datagram socket over
which the server sends messages for the service manager, which accepts them from this process only, and ENDS before it
ends by itself. Where it ends in another way, COMMAND takes the place of this program. PULSE is the descriptor of the
file in which the server's event loop counts (see `pulse`), at which this process looks once in LOOK_S seconds. The
server may take DELAY_S seconds after a signal until it drains, and DRAIN_S more until it ends. Nothing of the server is
imported here, as this process takes memory for as long as the server runs.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import time
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
PULSE_BYTES = 8
SILENT_LOOKS = 70
"""Consecutive looks without a beat after which the server is ended. Later than `BatchWatch`, which knows more, ends a
process whose event loop a batch holds; that can't run where the model's code keeps Python's lock."""
KILL_LOOKS = 5
"""Looks after that at which it is killed, where it has not ended."""
SAME_SIGNAL_S = 0.5
"""A signal within this time after another is the same one; see `SECOND_SIGNAL_S` of the server."""
AT_ONCE_S = 3.0
"""How long the server may take to end after a signal that ends it at once."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of the server, or does not return where it is started again."""
    server, channel, pulse, look_s, delay_s, drain_s, *command = arguments
    pidfd = os.pidfd_open(int(server))
    is_ending = is_ready = False
    limit, silence = Limit(float(delay_s), float(drain_s)), Silence(int(pulse))

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if number in STOPS:
            is_ending = True
            limit.on_signal(time.monotonic())
        send(number)

    for number in PASSED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    with socket.socket(fileno=int(channel)) as messages, _service_manager() as service_manager:
        while True:
            came = select.select([pidfd, messages.fileno()], [], [], float(look_s))[0]
            if time.monotonic() > limit.ends_at_s:
                limit.ends_at_s = math.inf
                send(signal.SIGKILL)
                tell("it has not ended in time after a signal, and is killed")  # which may wait for a reader
            if messages.fileno() in came:  # before its end is seen
                message = messages.recv(MESSAGE_BYTES)
                is_ending = is_ending or message == ENDS
                is_ready = is_ready or b"READY=1" in message
                if message != ENDS:
                    with suppress(OSError):  # there is no service manager, or none any more
                        service_manager.send(message)
            elif came:
                break
            elif not is_ending and not is_stopped(server) and (due := silence.look()):
                send(due)
                tell(f"its event loop has stood still for {silence.looks * float(look_s):g} s, and it is ended")
    status = os.waitstatus_to_exitcode(os.waitpid(int(server), 0)[1])
    os.close(int(pulse))
    if silence.has_ended_it and not is_ending:
        status = -SILENCED  # even where that did not suffice
    # For COMMAND, once it can act on them: the first process of a container has no default action for them. What has
    # come until now is known below.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    if -status not in PASSED and not is_ending:  # it could not say that it ends, so that COMMAND has to
        _reap()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.environ[ENDED] = f"{status} {int(is_ready)}"
        os.execvp(command[0], command)
    return exit_status(status)


class Limit:
    """The time at which the server is killed, by the signals that were to end it. In seconds of the monotonic clock.

    The server waits for up to `delay_s`, which a second signal ends, then drains for up to `drain_s`. A signal during
    the drain ends it at once.
    """

    def __init__(self, delay_s: float, drain_s: float) -> None:
        self.ends_at_s = math.inf
        self._delay_s, self._drain_s = delay_s, drain_s
        self._drains_at_s = math.inf
        self._last_at_s = -math.inf

    def on_signal(self, now_s: float) -> None:
        """Counts a signal."""
        if now_s - self._last_at_s < SAME_SIGNAL_S:
            return
        is_first, self._last_at_s = self._last_at_s == -math.inf, now_s
        if now_s < self._drains_at_s:
            self._drains_at_s = now_s + (self._delay_s if is_first else 0)
            self.ends_at_s = self._drains_at_s + self._drain_s
        else:
            self.ends_at_s = min(self.ends_at_s, now_s + AT_ONCE_S)


class Silence:
    """The silence of an event loop that counts in the file `pulse`, from its first beat on. Looks are counted, not
    seconds: there are none while this process is stopped as well."""

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse
        self._beats = bytes(PULSE_BYTES)
        self.looks = 0
        """Consecutive looks without a beat."""

    @property
    def has_ended_it(self) -> bool:
        """Whether it was long enough to end the server."""
        return self.looks >= SILENT_LOOKS

    def look(self) -> int:
        """Returns the number of the signal that is due, 0 for none."""
        before, self._beats = self._beats, os.pread(self._pulse, PULSE_BYTES, 0)
        self.looks = self.looks + 1 if self._beats == before and any(before) else 0
        return {SILENT_LOOKS: SILENCED, SILENT_LOOKS + KILL_LOOKS: signal.SIGKILL}.get(self.looks, 0)


def is_stopped(process: str) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    with suppress(OSError), open(f"/proc/{process}/stat", "rb") as stat:  # noqa: PTH123 - pathlib takes memory
        return stat.read().rpartition(b")")[2].split()[0] in b"Tt"
    return False


def tell(what: str) -> None:
    """Writes a line for the log; who reads it may have gone."""
    with suppress(OSError):
        os.write(2, f"xlaserve: the process that serves: {what}\n".encode())


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
