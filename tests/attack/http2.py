"""HTTP/2 by hand (RFC 9113), to stop, lie and hang up where no library does."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Final, Self

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
INITIAL_WINDOW_SIZE: Final = 4
ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
CONNECT_S: Final = 10.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str, **more: str) -> bytes:
    """Returns the header block of a call, literally and without compression (RFC 7541, 6.2.2)."""
    fields = {
        **{":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"},
        **{"te": "trailers", "content-type": "application/grpc"},
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, bytearray([127])
    while rest >= 128:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes((*length, rest)) + data


def message(data: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    """Returns a message of gRPC, with its length or another."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


class Connection:
    """A connection with nothing behind it. `window` is how many bytes of each answer it takes."""

    def __init__(self, address: str, *, greets: bool = True, window: int = 65_535) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=CONNECT_S)
        self._received = b""
        if greets:
            self.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Sends, and returns whether the other side still takes it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def frames(self, timeout_s: float) -> Iterator[tuple[int, int, int, bytes]]:
        """Yields the kind, flags, stream and payload of each frame that comes within `timeout_s`; answers pings."""
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            self.socket.settimeout(left_s)
            try:
                data = self.socket.recv(65_536)
            except OSError:
                return
            if not data:
                return
            self._received += data
            while len(self._received) >= 9:
                length = int.from_bytes(self._received[:3], "big")
                if len(self._received) < 9 + length:
                    break
                kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
                payload, self._received = self._received[9 : 9 + length], self._received[9 + length :]
                if kind == PING and not flags & ACK:
                    self.send(frame(PING, ACK, 0, payload))
                yield kind, flags, stream, payload

    def reset(self) -> None:
        """Closes it with a reset, without a goodbye."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
