"""How a client reaches its server: deadlines, message sizes, retries."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Iterable
from typing import Final

from xlaserve_client.calls import IDEMPOTENT

DEFAULT_TARGET: Final = "127.0.0.1:8001"
DEFAULT_DEADLINE_S: Final = 10.0
LOAD_DEADLINE_S: Final = 600.0
"""Loading compiles every bucket, and unloading waits for accepted work."""
READY_POLL_S: Final = 0.1
MAX_PRIORITY: Final = 3

_MAX_MESSAGE_BYTES: Final = 1 << 30
MAX_ATTEMPTS: Final = 5
"""The most that gRPC allows."""


def checked_deadline(deadline_s: float) -> float:
    """Returns `deadline_s`. Raises ValueError unless it is finite and greater than 0."""
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise ValueError(f"deadline_s: expected seconds greater than 0, got {deadline_s}")
    return deadline_s


def checked_priority(priority: int) -> int:
    """Returns `priority`. Raises ValueError unless it is one of the server's, or 0."""
    if priority not in range(MAX_PRIORITY + 1):
        raise ValueError(f"priority: expected 1 (the highest) to {MAX_PRIORITY}, or 0, got {priority}")
    return priority


def channel_options(target: str) -> list[tuple[str, int | str]]:
    """Returns the gRPC channel options for `target`.

    gRPC itself retries idempotent calls that got UNAVAILABLE, within their deadline, with exponential backoff and
    jitter.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        # A call whose request does not fit here (256 KiB by default) is silently not retried.
        ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.service_config", _service_config()),
    ]
    if _is_loopback(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def call_metadata(token: str | None, metadata: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns what goes along with every call. Raises ValueError for a token that can't be sent."""
    if token is None:
        return (*metadata,)
    if not token.isascii() or not token.isprintable():
        raise ValueError("token: expected printable ASCII letters")
    return (("authorization", f"Bearer {token}"), *metadata)


def _service_config() -> str:
    policy = {
        "maxAttempts": MAX_ATTEMPTS,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [{"service": method.service, "method": method.name} for method in IDEMPOTENT]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


def _is_loopback(target: str) -> bool:
    host = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
