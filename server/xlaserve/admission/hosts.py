"""Under which names requests may come over HTTP.

A web page can have its own name lead to an address of this machine (DNS rebinding): its browser then takes the server
for the page's own, and sends it requests whose header `host` is that name.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Self

from xlaserve.config import Settings
from xlaserve.errors import PermissionDenied, shown

ANY: Final = "*"
LOCALHOST: Final = "localhost"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names that pass beside addresses and localhost; all do where `names` is None."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, settings: Settings, *, is_locked: bool) -> Self:
        """Returns the names that pass on a port where callers are recognised, or where they are not."""
        allowed = settings.allowed_hosts
        if ANY in allowed or not (allowed or (settings.is_loopback and not is_locked)):
            return cls(None)
        return cls(frozenset(map(_comparable, (settings.host, *allowed))))

    def passes(self, host: str | None) -> bool:
        """Whether a request with this header `host` is answered. Browsers always send one."""
        if self.names is None or not host:
            return True
        name = _comparable(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
        return name in self.names or name == LOCALHOST or name.endswith(f".{LOCALHOST}") or _is_address(name)

    def refusal(self, host: str) -> PermissionDenied:
        """Returns the error for a request that does not pass."""
        return PermissionDenied(
            f"host: expected localhost, an address or a name that allowed_hosts lists, got {shown(host)}; "
            "add it to allowed_hosts where clients or a proxy call the server so"
        )


ANY_HOST: Final = Hosts(None)


def _comparable(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """Whether it is one that no page's name is."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
