"""What a process of the server is there for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from xlaserve.processes.supervision.restarts import RestartPolicy

NO_USE: Final = 78
"""EX_CONFIG of sysexits.h: the status of a process that would end in the same way if it was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process that is to be there always."""

    name: str
    """Such as `front 2`: in the log, in metrics and in `ps`."""
    target: str
    """MODULE:FUNCTION, called with a `child.Child`; what it returns is the exit status."""
    payload: bytes | Callable[[], bytes] = b""
    """Given to it as it is, such as settings: not on the command line, where everybody could read them. A function is
    called for each process."""
    descriptors: Mapping[str, int] = field(default_factory=dict)
    """What every process of this role inherits, by names: sockets that listen."""
    connect: Callable[[], Mapping[str, int]] = dict
    """Opens what only the next process has, such as an end of a socketpair. It is closed here once that has started."""
    has_spare: bool = False
    """Whether a process is kept that has imported its modules and forks the next one when that is needed. Of roles with
    the same target there is one."""
    cores: frozenset[int] = frozenset()
    """The only ones that it runs on; empty for all."""
    stage: int = 0
    """At the end, those of a later stage end before those of an earlier one are told to."""
    stop_timeout_s: float = 30.0
    """How long it may take to end before it is killed."""
    drain_s: float | None = None
    """How long a process that is told to leave, by SIGUSR2, may still serve those that are there; None for roles that
    are told to end."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def module(self) -> str:
        """That of the target."""
        return self.target.partition(":")[0]


class State(StrEnum):
    """Where the process of a role is."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """It has ended, and will be started again."""
    ENDED = "ended"
