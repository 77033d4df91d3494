"""Addresses of servers. What stands before `://` is their protocol."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple, Self

DEFAULT_PORTS: Final[dict[str, int | None]] = {
    "": None,
    "http": 80,
    "https": 443,
    "tfs": None,
    "tfs+http": 80,
    "tfs+https": 443,
    "fleet": None,
}
"""By protocol: Open Inference over gRPC and REST, TensorFlow Serving over gRPC and REST, and FLEET."""
EXPECTED: Final = "HOST:PORT, http://HOST[:PORT], https://, tfs://, tfs+http://, tfs+https:// or fleet://"
FLEET: Final = "fleet"
"""Not the address of a server, but of the name service that lists some. They speak Open Inference over gRPC."""
SECURE: Final = ("https", "tfs+https")
"""Protocols whose name says TLS."""
CLEAR: Final = ("http", "tfs+http")
"""Protocols whose name says that there is none."""

_ADDRESS: Final = re.compile(r"(?:([a-z+]+)://)?(\[[^\s\[\]]+\]|[^\s/?#@]+?)(?::(\d{1,5}))?/?")
_MAX_PORT: Final = 65_535


class Address(NamedTuple):
    """Where a server listens, and in which protocol."""

    protocol: str
    """One of DEFAULT_PORTS."""
    host: str
    """Without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses HOST:PORT or PROTOCOL://HOST:PORT. Raises ValueError."""
        match = _ADDRESS.fullmatch(text)
        protocol, host, digits = match.groups(default="") if match else ("", "", "")
        port = int(digits) if digits else DEFAULT_PORTS.get(protocol)
        if protocol not in DEFAULT_PORTS or port is None or not 0 < port <= _MAX_PORT:
            raise ValueError(f"expected {EXPECTED}, got {text!r}")
        return cls(protocol, host.strip("[]"), port)

    @property
    def authority(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it means the machine itself, as it does on every machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
