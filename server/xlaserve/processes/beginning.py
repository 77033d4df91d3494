"""The beginning of a server of one process: as the child of a small process, which starts it again after a crash.

The parent costs no second import and no second compilation: this process forks before it has loaded any model, and the
parent then executes `supervision.parent` in its own place.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from xlaserve.engine import under_way
from xlaserve.engine.under_way import UnderWay
from xlaserve.errors import ConfigError
from xlaserve.processes.crashes import Crashes
from xlaserve.processes.handover import command
from xlaserve.processes.ready_file import ReadyFile
from xlaserve.processes.supervision import linux, parent, pulse
from xlaserve.processes.supervision.interpreters import PYTHON
from xlaserve.processes.supervision.process import as_words
from xlaserve.processes.supervision.pulse import Pulse
from xlaserve.processes.supervision.restart_policy import RestartPolicy
from xlaserve.processes.supervision.service_manager import WATCHDOG_PID, ServiceManager
from xlaserve.processes.supervision.supervisor import FAILED

LEFT: Final = "LEFT_TO_XLASERVE"
"""The environment variable with the descriptors of the files that a process leaves, and with its crashes so far."""

LOOK_S: Final = 1.0
"""How often the parent looks at the pulse of the server."""
LATER_S: Final = 10.0
"""How much later than the end of its drain the server may end, to close its ports and send its last traces; then it is
killed."""

log = logging.getLogger(__name__)


class CrashedError(Exception):
    """The process before has crashed, and another one would, too. `status` is the exit status of the server."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The state that a process which serves begins with."""

    pid: int = field(default_factory=os.getpid)
    """Number of the process that was started as the server: the parent, if there is one."""
    under_way: UnderWay = field(default_factory=UnderWay)
    set_aside: Mapping[bytes, str] = field(default_factory=dict)
    service_manager: ServiceManager = field(default_factory=ServiceManager)
    has_served: bool = False
    """Whether another process of this server was ready before it crashed."""
    channel: socket.socket | None = None
    """The channel to the parent; None without one."""
    pulse: Pulse | None = None
    """The pulse by which the parent sees that the event loop runs; None without one."""

    def end(self) -> None:
        """Tells the parent that this process ends without a crash, and has logged the reason."""
        if self.channel is not None:
            with suppress(OSError):
                self.channel.send(parent.ENDS)
            self.channel.close()


def end_at_sigterm() -> None:
    """Has SIGTERM end this process until another handler is set; also a SIGTERM that has come since a crash.

    By default, no signal ends a process that is the first one of a container.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(parent.exit_status(-number)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, parent.STOPS)


def begin(
    ready_file: ReadyFile,
    environment: MutableMapping[str, str] = os.environ,
    *,
    delay_s: float = 0.0,
    drain_s: float = 30.0,
) -> Beginning:
    """Forks, and returns in the child; this process becomes its parent. Returns here if the system has no pidfds.

    The parent kills a server that takes more than `delay_s`, `drain_s` and `LATER_S` to end. Raises CrashedError if
    the process before has ended and no model is known to have caused that.
    """
    crashes, ends, has_served = _after_crash(ready_file, environment)
    if not _can_have_parent():
        return Beginning()
    notes, last_words, beats = under_way.create(), os.memfd_create("xlaserve-last-words"), pulse.create()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    this = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may be inherited as ignored: then no status could be waited for
    signal.pthread_sigmask(signal.SIG_BLOCK, parent.PASSED)  # until each process can act on them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads end at a fork, and begin anew
        server = os.fork()
    if server:
        environment[LEFT] = f"{notes} {last_words} {json.dumps(ends, separators=(',', ':'))} {crashes.text}"
        times_s = LOOK_S, delay_s, drain_s + LATER_S
        _become_parent(server, [notes, last_words], theirs.fileno(), beats, *map(str, times_s))
    if not linux.end_with(this, signal.SIGKILL):
        os._exit(1)
    # The parent passes on the signals of a terminal. No new session: the kernel divides processors among sessions, and
    # clients in the session of the parent would take some from the server.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it is no container's first process
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal may stop a background process that writes
    os.set_inheritable(last_words, False)
    faulthandler.enable(last_words)
    faulthandler.register(parent.SILENCED, last_words, chain=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, parent.PASSED)
    theirs.close()
    if environment.get(WATCHDOG_PID) == str(this):
        environment[WATCHDOG_PID] = str(os.getpid())
    return Beginning(
        pid=this,
        under_way=UnderWay(notes),
        set_aside=crashes.set_aside,
        service_manager=ServiceManager(channel=ours.dup()),
        has_served=has_served,
        channel=ours,
        pulse=Pulse(beats),
    )


def _after_crash(ready_file: ReadyFile, environment: MutableMapping[str, str]) -> tuple[Crashes, list[float], bool]:
    """Returns the crashes of this server until now, the times of those within the last minute, in seconds of the
    monotonic clock, and whether the server has been ready. Raises CrashedError.
    """
    left, ended = environment.pop(LEFT, ""), environment.pop(parent.ENDED, "")
    if not (left and ended):
        return Crashes(), [], False
    status, was_ready = map(int, ended.split())
    notes, last_words, ends_before, known = left.split(" ", 3)
    now, policy = time.monotonic(), RestartPolicy()
    ends = [end for end in json.loads(ends_before) if end > now - policy.window_s] + [now]
    crashes = Crashes(known)
    how = crashes.note(status, int(notes), int(last_words))
    os.close(int(notes))
    os.close(int(last_words))
    with suppress(ConfigError):
        ready_file.remove_left()
    if not how and status != -parent.SILENCED:
        cause = "no model is known to have caused it"
        if status == -signal.SIGKILL:
            cause = "the kernel does that where memory runs out"
        log.critical("the process that served ended with %s; %s", as_words(status), cause)
        raise CrashedError(_crash_status(status))
    if len(ends) > policy.most:
        said = "the process that served ended with %s (%s), and %d others within %g s: the server gives up"
        log.critical(said, as_words(status), how or "it stood still", policy.most, policy.window_s)
        raise CrashedError(_crash_status(status))
    during = f" while {how}" if how else ""
    log.error("the process that served ended with %s%s; another is started", as_words(status), during)
    service_manager = ServiceManager()
    service_manager.tell_restarting()
    service_manager.close()
    return crashes, ends, bool(was_ready)


def _crash_status(status: int) -> int:
    """Returns the exit status for a crash: never 0, at which a service manager would not start the server again."""
    return parent.exit_status(status) or FAILED


def _can_have_parent() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or an old kernel
        return False
    return True


def _become_parent(server: int, inherited: list[int], channel: int, beats: int, *times_s: str) -> None:
    for descriptor in (*inherited, channel, beats):
        os.set_inheritable(descriptor, True)
    arguments = [str(server), str(channel), str(beats), *times_s, *command()]
    try:
        os.execv(PYTHON, [PYTHON, "-I", "-S", parent.__file__, *arguments])
    finally:
        os.kill(server, signal.SIGKILL)
