"""What a request's head may be. Proxies may read otherwise what is refused here, and pass on two requests for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xlaserve.errors import XlaserveError

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line and headers, and of the trailers and sizes of its chunks beyond as much again as its body."""
MAX_HEADERS: Final = 100
ONCE: Final = frozenset(
    (
        b"host",
        b"authorization",
        b"x-api-key",
        b"content-encoding",
        b"transfer-encoding",
        b"inference-header-content-length",
    )
)
"""Headers that a request has once at most, as nobody knows which of two is meant."""


class TooMuch(XlaserveError):
    """A request's head, or what surrounds its body, is larger than any honest one's. Ends the connection."""


class Ambiguous(XlaserveError):
    """A request's head can be read in several ways. Ends the connection."""


def check_head(headers: Sequence[tuple[bytes, bytes]], version: str) -> None:
    """Raises Ambiguous."""
    once = [name for name, _ in headers if name in ONCE]
    if len(once) != len({*once}):
        raise Ambiguous(f"one of these headers came twice: {b', '.join(sorted(ONCE)).decode()}")
    if version not in ("1.0", "1.1"):
        raise Ambiguous("version: expected HTTP/1.1 or 1.0, got another")
    if version == "1.1" and b"host" not in once:
        raise Ambiguous("host: expected one, got none")
    if b"transfer-encoding" in once:
        (encoding,) = (value for name, value in headers if name == b"transfer-encoding")
        if version != "1.1" or encoding.strip().lower() != b"chunked":
            raise Ambiguous("transfer-encoding: expected chunked, in HTTP/1.1")
