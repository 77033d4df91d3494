"""The state of a fleet: what it is to be, and how Serve and the name service see it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_fleet.addresses import READY, Entry
from xlaserve_fleet.settings import FleetSettings

FAILED: Final = "DEPLOY_FAILED"
RUNNING: Final = "RUNNING"


@dataclass(frozen=True, slots=True)
class Deployed:
    """The target state of a fleet."""

    names: str
    """HOST:PORT of the name service."""
    revision: str
    """The revision that all servers are to have."""


@dataclass(frozen=True, slots=True)
class Status:
    """A fleet as Serve and the name service see it."""

    state: str
    """Serve's word for the application: RUNNING, DEPLOYING, DEPLOY_FAILED."""
    message: str
    replicas: dict[str, int]
    """How many servers are in each of Serve's states, in lower case."""
    names: str
    """HOST:PORT of the name service; empty where it does not answer."""
    servers: list[Entry]

    @property
    def counts(self) -> str:
        """The servers in each state, in words: `2 running, 1 starting`."""
        return ", ".join(f"{count} {state}" for state, count in sorted(self.replicas.items()) if count)

    def is_complete(self, min_servers: int, revision: str) -> bool:
        """Returns whether the list has all servers that there should be, and none of another revision."""
        ready = sum(entry.state == READY for entry in self.servers)
        return (
            self.state == RUNNING
            and bool(self.names)
            and ready >= max(min_servers, self.replicas.get("running", 0))
            and all(entry.about.get("revision") == revision for entry in self.servers)
        )


def next_revision(fleet: FleetSettings, servers: Sequence[Entry], *, restart: bool) -> str:
    """Returns the settings' revision, or the newest of those that restarts have made of it and that servers run as."""
    if restart:
        return f"{fleet.revision}-{int(time.time() * 1000):x}"
    running = {str(one.about.get("revision", "")) for one in servers}
    return max((one for one in running if one.startswith(f"{fleet.revision}-")), default=fleet.revision)
