"""Connections to servers, as far as no call waits: checked arguments, channel options, channels."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import grpc

from xlaserve_client.call import Call
from xlaserve_client.calls import IDEMPOTENT, OF_ONE_SERVER

DEFAULT_TARGET: Final = "127.0.0.1:8001"
DEFAULT_DEADLINE_S: Final = 10.0
LOAD_DEADLINE_S: Final = 600.0
"""Default deadline of loading, which compiles every bucket, and of unloading, which waits for accepted requests."""
READY_POLL_S: Final = 0.1
MAX_PRIORITY: Final = 3

ChannelT = TypeVar("ChannelT")

Metadata = tuple[tuple[str, str], ...]
Options = list[tuple[str, int | str]]

_MAX_MESSAGE_BYTES: Final = 1 << 30
_CONNECT_TIMEOUT_MS: Final = 2_000
"""Time-out of connecting to a server of a fleet, which has other servers. gRPC's default is 20 s."""
OWN_CONNECTION: Final[Options] = [("grpc.use_local_subchannel_pool", 1)]
"""Options of a channel that shares no connection with other channels to the same address."""
MAX_ATTEMPTS: Final = 5
"""Attempts at a call, the first included: the most that gRPC allows."""


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


def checked_hedge(hedge_after_s: float | None, *, is_fleet: bool) -> float | None:
    """Returns `hedge_after_s`. Raises ValueError unless it is finite and greater than 0, and for a single server."""
    if hedge_after_s is not None and not is_fleet:
        raise ValueError("hedge_after_s: expected a fleet as the target, fleet://HOST:PORT")
    if hedge_after_s is not None and not (math.isfinite(hedge_after_s) and hedge_after_s > 0):
        raise ValueError(f"hedge_after_s: expected seconds greater than 0, got {hedge_after_s}")
    return hedge_after_s


def check_for_fleet(call: Call[Any]) -> None:
    """Raises ValueError for a call that changes one server, which would then differ from the others."""
    if call.method in OF_ONE_SERVER:
        raise ValueError(f"{call.method.name}: expected a client of one server, HOST:PORT, got one of a fleet")


def channel_options(target: str) -> Options:
    """Returns the gRPC channel options for `target`.

    gRPC itself retries idempotent calls that got UNAVAILABLE, within their deadline, with exponential backoff and
    jitter.
    """
    return [
        *_common_options(target),
        # A call whose request does not fit here (256 KiB by default) is silently not retried.
        ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES),
        ("grpc.service_config", _service_config()),
    ]


def member_options(address: str) -> Options:
    """Returns the gRPC channel options for a server of a fleet, without retries: these go to another server."""
    return [*_common_options(address), ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS)]


def _common_options(target: str) -> Options:
    options: Options = [
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if _is_loopback(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def channel_opener(
    insecure: Callable[..., ChannelT],
    secure: Callable[..., ChannelT],
    credentials: grpc.ChannelCredentials | None,
    options: Options,
    address: str,
) -> Callable[[bool], ChannelT]:
    """Returns a function that opens channels to `address`; its argument is whether one has a connection of its own.

    `insecure` and `secure` are the functions of gRPC, or of its asyncio API, that make channels.
    """

    def open_channel(is_own: bool) -> ChannelT:
        chosen = [*options, *OWN_CONNECTION] if is_own else options
        return (
            insecure(address, options=chosen) if credentials is None else secure(address, credentials, options=chosen)
        )

    return open_channel


def callable_of(channel: Any, call: Call[Any]) -> Any:
    """Returns gRPC's callable of the call's method on a channel of either API."""
    return channel.unary_unary(
        call.method.path,
        request_serializer=type(call.request).SerializeToString,
        response_deserializer=call.method.response.FromString,
    )


def call_metadata(token: str | None, metadata: Iterable[tuple[str, str]]) -> Metadata:
    """Returns the metadata of every call. Raises ValueError for a token that can't be sent."""
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
