"""The first call to a server, as its log tells people once the server is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from xlaserve.config import Settings

DEFAULT_TARGET: Final = "127.0.0.1:8001"
"""The server that `xlaserve-client` asks by itself."""
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def first_call(settings: Settings, addresses: Mapping[str, str | None]) -> str:
    """Returns the address of the server's page, and a command that asks the first of its models.

    `addresses` are HOST:PORT of "http" and "grpc"; where the server listens on all addresses, loopback stands for them.
    """
    scheme = "http" if settings.tls_certificate is None else "https"
    page = f"{scheme}://{_reachable(addresses['http'])}/"
    if settings.access is not None or settings.tls_client_ca is not None:
        return f"try it: {page}"
    target = _reachable(addresses["grpc"])
    options = [] if target == DEFAULT_TARGET else ["--target", target]
    options += [] if settings.tls_certificate is None else ["--tls"]
    return f"try it: {page} or {' '.join(['xlaserve-client run', *options, settings.models[0].name, 'IMAGE'])}"


def _reachable(address: str | None) -> str:
    host, _, port = (address or "").rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
