"""The options and the credentials of gRPC's server: bounds on its clients, and its certificates."""

from __future__ import annotations

from typing import Final

import grpc

from xlaserve.admission.certificates import Certificates, Pem
from xlaserve.config import Settings
from xlaserve.wire.grpc.unreceived import MAX_METADATA_BYTES

HANDSHAKE_TIMEOUT_MS: Final = 10_000
"""How long a client that connects may say nothing."""
KEEPALIVE_MS: Final = 60_000
"""After this time without traffic a client is pinged."""
KEEPALIVE_TIMEOUT_MS: Final = 20_000
MIN_PING_INTERVAL_MS: Final = 500
"""Clients may ping once a second, with or without calls. The third ping that comes sooner than this after another ends
the connection (ENHANCE_YOUR_CALM, too_many_pings). The default of gRPC's core is 5 minutes."""
MAX_CONNECTION_STREAMS: Final = 1024
"""Calls of one connection at a time; further ones wait at the client."""
PENDING_CALLS: Final = 16_384
"""Calls that may wait to be counted: gRPC answers further ones with CANCELLED, at twice as many all of them."""


def options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Returns the options of a server: which messages it takes, and who may connect, and stay."""
    age_s = settings.effective_max_connection_age_s
    return (
        *(() if age_s is None else (("grpc.max_connection_age_ms", int(age_s * 1000)),)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would share its connections unseen; fronts of one server do.
        ("grpc.so_reuseport", int(settings.front_processes > 0)),
        ("grpc.enable_channelz", 0),
        # Who connects, and stays.
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", int(settings.max_connection_idle_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", min(MAX_CONNECTION_STREAMS, settings.max_concurrent_calls)),
        ("grpc.server.max_pending_requests", max(PENDING_CALLS, settings.max_concurrent_calls)),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max(PENDING_CALLS, settings.max_concurrent_calls)),
    )


def credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Returns credentials that follow the files: gRPC asks for them at each handshake, on threads of its own.

    Sessions are resumed, without being verified again, only under the same configuration: where clients show
    certificates, each handshake gets another.
    """

    last = certificates.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        if (pem := certificates.pem) is last and not certificates.asks_clients:
            return None
        last = pem
        return configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(last),
        changed,  # type: ignore[arg-type] # None, where there is nothing new, is documented
        certificates.asks_clients,
    )
