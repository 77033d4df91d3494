"""HTTP/1.1 by hand: requests that need not be right, and connections that need not read."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tests.attack.client import LOST, PATIENCE_S, leak

LENGTH: Final = "Inference-Header-Content-Length"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Request(NamedTuple):
    """A request; its JSON is `body` unless it is given as `damaged`, and `raw` stands behind it."""

    method: str
    path: str
    body: Any = None
    raw: bytes = b""
    damaged: bytes | None = None
    json_length: str | None = None
    headers: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns it as it is sent."""
        text = self.damaged
        if text is None:
            text = b"" if self.body is None else json.dumps(self.body).encode()
        lines = ["Host: localhost", f"Content-Length: {len(text) + len(self.raw)}", *self.headers]
        if self.json_length is not None or self.raw:
            lines.append(f"{LENGTH}: {len(text) if self.json_length is None else self.json_length}")
        head = f"{self.method} {self.path} HTTP/1.1\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
        return head.encode("latin-1") + text + self.raw


class Connection:
    """A connection that sends what it is given; `window_bytes` bounds what it takes in without reading."""

    def __init__(self, address: str, window_bytes: int = 0) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if window_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect((host.strip("[]"), int(port)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, data: bytes, within_s: float = 2.0) -> bool:
        """Sends what the server takes within some time; False where it closed the connection."""
        self._socket.settimeout(within_s)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def half_close(self) -> None:
        """Sends no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Ends the connection with a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def outcome(self, within_s: float) -> tuple[str, str | None]:
        """Returns the first answer's status, OK for 200, `closed` where there is none; and what is wrong with it."""
        give_up_at, data = time.monotonic() + within_s, b""
        while (left_s := give_up_at - time.monotonic()) > 0 and len(data) < 2000:
            self._socket.settimeout(left_s)
            try:
                part = self._socket.recv(65_536)
            except OSError:
                break
            if not part:
                break
            data += part
        found = _STATUS.match(data)
        status = found[1].decode() if found else "closed"
        return "OK" if status in ("200", "100") else status, leak(data[:2000].decode("latin-1"))


class Client:
    """Asks, over one connection as long as the server keeps it open; from the address `source`, where one is given."""

    def __init__(self, address: str, source: str | None = None) -> None:
        host, port = address.rsplit(":", 1)
        self._source = None if source is None else (source, 0)
        self._address = host.strip("[]"), int(port)
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, request: Request) -> tuple[str, bytes, str | None]:
        """Returns the status, OK for 200 and LOST for none in time; the answer; and what is wrong with a refusal."""
        data = request.to_bytes()
        for _ in range(2):
            is_fresh = self._socket is None
            try:
                return self._ask(data)
            except TimeoutError:
                self._close()
                return LOST, b"", None
            except (OSError, HTTPException):
                self._close()
                if is_fresh:
                    break  # else the server had closed it before
        return "closed", b"", None

    def _ask(self, data: bytes) -> tuple[str, bytes, str | None]:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=PATIENCE_S, source_address=self._source)
        broken: OSError | None = None
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:
            broken = error  # the answer may be there all the same
        response = HTTPResponse(self._socket)
        try:
            response.begin()
            body = response.read()
        finally:
            response.close()
        if broken or response.will_close:
            self._close()
        if response.status == 200:
            return "OK", body, None
        return str(response.status), body, _wrong(body)


def _wrong(body: bytes) -> str | None:
    try:
        (said,) = json.loads(body).values()
    except (ValueError, AttributeError):
        return f"expected an error in JSON, got {body[:200]!r}"
    return leak(str(said))
