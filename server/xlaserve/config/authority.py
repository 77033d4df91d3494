"""HOST:PORT, as URLs have it (RFC 3986, 3.2)."""

from __future__ import annotations


def authority(host: str, port: int | str) -> str:
    """Returns HOST:PORT, where `host` has no brackets: those of an IPv6 address are added."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
