"""The roles of a server's processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from xlaserve.processes.supervision.restart_policy import RestartPolicy

NO_USE: Final = 78
"""EX_CONFIG of sysexits.h: the exit status of a process that would end in the same way if it was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A function that some process of the server always runs."""

    name: str
    """The name in the log, in metrics and in `ps`, such as `front 2`."""
    target: str
    """MODULE:FUNCTION. The function is called with a `child.Child`, and returns the exit status."""
    payload: bytes | Callable[[], bytes] = b""
    """Bytes for the process, such as its settings: not on the command line, where everybody could read them. A function
    is called for each process."""
    descriptors: Mapping[str, int] = field(default_factory=dict)
    """Descriptors that every process of the role inherits, by their names: sockets that listen."""
    connect: Callable[[], Mapping[str, int]] = dict
    """Opens descriptors for the next process alone, such as an end of a socketpair. They are closed here once it has
    started."""
    has_spare: bool = False
    """Whether a spare process is kept, which has imported the target's module and forks the next process when it is
    needed. Roles with the same target share one."""
    cores: frozenset[int] = frozenset()
    """The only cores that the process runs on; empty for all."""
    stage: int = 0
    """At the end, processes of a later stage end before those of an earlier one are told to."""
    stop_timeout_s: float = 30.0
    """How long the process may take to end before it is killed."""
    drain_s: float | None = None
    """How long a process that is told to drain, by SIGUSR2, may still serve its clients; None for roles that can't
    drain and are told to end."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def module(self) -> str:
        """The module of the target."""
        return self.target.partition(":")[0]


class State(StrEnum):
    """The state of a role."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """The process has ended, and another will be started."""
    ENDED = "ended"
