"""Checks of a request's head. Proxies may read a refused head in another way, and pass on two requests for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from xlaserve.errors import XlaserveError

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line and headers, and of the trailers and sizes of its chunks beyond as much again as its body."""
MAX_HEADERS: Final = 100
HOST: Final = re.compile(rb"(\[[A-Za-z0-9.:%_~-]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""The header `host` (RFC 9110, 7.2): no user, path or blank is in it, and nothing but a port behind an address."""
ONCE: Final = frozenset(
    (
        b"host",
        b"origin",
        b"authorization",
        b"x-api-key",
        b"content-type",
        b"content-encoding",
        b"transfer-encoding",
        b"inference-header-content-length",
    )
)
"""Headers that a request has once at most, as nobody knows which of two is meant."""


_TLS: Final = b"\x16\x03"
"""How a handshake of TLS begins."""
_UNREADABLE: Final = {
    "Duplicate Content-Length": "content-length: expected one, got two",  # equal ones too: RFC 9110, 8.6, allows either
    "can't be present with": "content-length and transfer-encoding: expected one of them, got both",
    "Pause on PRI": "expected HTTP/1.1, got HTTP/2, as gRPC speaks it: that is for the port grpc_port",
    "Content-Length overflow": "content-length: expected less than 2^64 bytes, got more",
    "Content-Length": "content-length: expected a number of bytes, got another text",
}
"""Messages for clients, by a part of llhttp's message."""


class TooMuch(XlaserveError):
    """A request's head, or what surrounds its body, is larger than any honest one's. Ends the connection."""


class Ambiguous(XlaserveError):
    """A request's head can be read in several ways. Ends the connection."""


def check_head(method: bytes, target: bytes, headers: Headers, version: str) -> None:
    """Raises Ambiguous."""
    once = [name for name, _ in headers if name in ONCE]
    if len(once) != len({*once}):
        raise Ambiguous(f"one of these headers came twice: {b', '.join(sorted(ONCE)).decode()}")
    if version not in ("1.0", "1.1"):
        raise Ambiguous("version: expected HTTP/1.1 or 1.0, got another")
    if method == b"CONNECT":
        raise Ambiguous("method: expected another than CONNECT, behind which are no requests")
    if version == "1.1" and b"host" not in once:
        raise Ambiguous("host: expected one, got none")
    host = next((value for name, value in headers if name == b"host"), b"")
    if not HOST.fullmatch(host):
        raise Ambiguous("host: expected a name or an address, and perhaps a port, got another text")
    if b"#" in target:
        raise Ambiguous("target: expected a path without #, got one with it")
    if not target.startswith(b"/") and target != b"*" and authority_of(target) != host.lower():
        raise Ambiguous("target: expected a path, or an address at the host that the header host names")
    if b"transfer-encoding" in once:
        (encoding,) = (value for name, value in headers if name == b"transfer-encoding")
        if version != "1.1" or encoding.strip().lower() != b"chunked":
            raise Ambiguous("transfer-encoding: expected chunked, in HTTP/1.1")


def unreadable(reason: str, data: bytes) -> str:
    """Returns what is wrong with bytes that the parser refused; `reason` is what it says of them."""
    if data.startswith(_TLS):
        return "expected plain HTTP, got TLS: this server has no tls_certificate, use http:// in place of https://"
    return next((said for part, said in _UNREADABLE.items() if part in reason), f"not HTTP/1.1: {reason}")


def authority_of(target: bytes) -> bytes:
    """Returns HOST:PORT of an absolute target, in lower case."""
    return target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].lower()


def without_upgrade(method: bytes, target: bytes, headers: Headers, version: str) -> bytes:
    """Returns a request's head as it is sent, without the header `upgrade`."""
    lines = [name + b": " + value + b"\r\n" for name, value in headers if name != b"upgrade"]
    return b"".join((method, b" ", target, b" HTTP/", version.encode(), b"\r\n", *lines, b"\r\n"))
