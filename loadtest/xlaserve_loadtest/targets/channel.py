"""Channels to servers: plain or over TLS, with headers and compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

COMPRESSIONS: Final[Mapping[str, grpc.Compression]] = {
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


@dataclass(frozen=True, slots=True)
class Transport:
    """How a server is reached."""

    is_secure: bool = False
    """Whether over TLS."""
    authorities: bytes | None = None
    """Certificates that are trusted, PEM; None: the system's."""
    certificate: bytes | None = None
    """The client's own, PEM."""
    key: bytes | None = None
    server_name: str | None = None
    """Name that the server's certificate must hold; None: the address's."""
    headers: tuple[tuple[str, str], ...] = ()
    """Metadata of every call."""
    compression: str | None = None
    """One of COMPRESSIONS, for requests."""
    connections: int = 1
    """To each address, over gRPC."""

    def document(self) -> dict[str, bool | int | str | list[str] | None]:
        """Returns what a record may hold: headers by name alone, since they may hold tokens; no keys."""
        return {
            "tls": self.is_secure,
            "headers": [name for name, _ in self.headers],
            "compression": self.compression,
            "connections": self.connections,
        }


PLAIN: Final = Transport()


def open_channel(address: str, transport: Transport = PLAIN) -> grpc.aio.Channel:
    """Returns a channel with a connection of its own. `transport.headers` are for the caller to send."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        # Without this, channels to the same address share one connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    compression = COMPRESSIONS[transport.compression] if transport.compression else None
    if not transport.is_secure:
        return grpc.aio.insecure_channel(address, options, compression)
    if transport.server_name is not None:
        options.append(("grpc.ssl_target_name_override", transport.server_name))
    credentials = grpc.ssl_channel_credentials(transport.authorities, transport.key, transport.certificate)
    return grpc.aio.secure_channel(address, credentials, options, compression)
