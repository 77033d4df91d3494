"""The name service of a fleet, `fleet://HOST:PORT`, which lists the servers over HTTP.

`GET /v1/servers` answers

    {"servers": [{"address": "10.0.0.3:40121", "state": "ready", "id": "a"}], "generation": 7}

and `GET /v1/servers?after=7&wait_s=20` the same once the generation is another, or after 20 s. Calls may be sent to
servers whose state is `ready`, and to no others.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol, Self, cast

SCHEME: Final = "fleet://"

WAIT_S: Final = 20.0
"""Seconds for which the name service may hold back an unchanged answer."""
ANSWER_S: Final = 10.0
"""Seconds that an answer may take in addition: a name service that has just started waits for its servers first."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
"""Longest pause after a failure; pauses begin with FIRST_PAUSE_S and double."""

_READY: Final = "ready"
MIN_POLL_S: Final = 1.0
"""Least seconds between two equal answers: a name service need not support waiting."""
MIN_PAUSE_S: Final = 0.1
"""Least seconds between two answers: while a fleet starts or is updated, each of its servers is a change."""
_MAX_ANSWER_BYTES: Final = 16 << 20
_MAX_SHOWN: Final = 200
_TARGET: Final = re.compile(r"fleet://(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]?#@]+):(\d{1,5})/?")


def is_fleet(target: str) -> bool:
    """Returns whether a client's target is a fleet and not a server."""
    return target.startswith(SCHEME)


class Listed(NamedTuple):
    """A server in the name service's list."""

    address: str
    """HOST:PORT of its gRPC port."""
    id: str
    """The server's id, which differs from the id of an earlier server at the same address."""
    is_ready: bool
    """Whether it takes calls."""


class Listing(NamedTuple):
    """An answer of the name service."""

    generation: int
    """A number that grows with each change of the list."""
    servers: tuple[Listed, ...]


class Listener(Protocol):
    """A receiver of the name service's answers."""

    def update(self, listing: Listing) -> None:
        """Receives an answer, the list of servers."""

    def service_failed(self, problem: str) -> None:
        """Receives the reason why a request failed."""


@dataclass(frozen=True, slots=True)
class NameService:
    """The address of a name service."""

    host: str
    """Name or address of the host; an IPv6 address has no brackets."""
    port: int

    @classmethod
    def parse(cls, target: str) -> Self:
        """Parses `fleet://HOST:PORT`. Raises ValueError."""
        match = _TARGET.fullmatch(target)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise ValueError(f"target: expected fleet://HOST:PORT, got {target!r}")
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def authority(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The target of a client, `fleet://HOST:PORT`."""
        return f"{SCHEME}{self.authority}"

    @property
    def url(self) -> str:
        """The URL of the list of servers."""
        return f"http://{self.authority}/v1/servers"

    async def ask(self, after: int | None = None) -> Listing:
        """Requests the list of servers; with `after`, the answer comes once its generation is another, or after WAIT_S.

        Raises OSError, HTTPException or ValueError.
        """
        query = "" if after is None else f"?after={after}&wait_s={WAIT_S:g}"
        asked = f"GET /v1/servers{query} HTTP/1.1\r\nhost: {self.authority}\r\nconnection: close\r\n\r\n"
        limit_s = ANSWER_S if after is None else WAIT_S + ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(asked.encode())
                    received = b""
                    while part := await reader.read(_MAX_ANSWER_BYTES):
                        received += part
                        if len(received) > _MAX_ANSWER_BYTES:
                            raise ValueError(f"expected an answer of up to {_MAX_ANSWER_BYTES} bytes")
                finally:
                    writer.close()
        except TimeoutError:
            raise TimeoutError(f"no answer within {limit_s:g} s") from None
        return _read(received)


async def follow(service: NameService, listener: Listener) -> None:
    """Passes the name service's list to `listener`, at once and then at each change, until cancelled.

    After a failure it requests again with growing pauses, without `after`, since a name service that was restarted
    begins with other generations.
    """
    generation: int | None = None
    failures = 0
    while True:
        asked_at = time.monotonic()
        try:
            listing = await service.ask(generation)
        except (OSError, HTTPException, ValueError) as error:
            listener.service_failed(failure_reason(error))
            generation = None
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**failures, MAX_PAUSE_S))
            failures = min(failures + 1, 10)
            continue
        failures = 0
        listener.update(listing)
        least_s = MIN_POLL_S if listing.generation == generation else MIN_PAUSE_S
        await asyncio.sleep(max(0.0, asked_at + least_s - time.monotonic()))
        generation = listing.generation


def failure_reason(error: OSError | HTTPException | ValueError) -> str:
    """Returns the reason of a failed request as text."""
    if isinstance(error, HTTPException):
        return f"expected HTTP: {error!r}"
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)  # asyncio's own text has an address and no reason
    return str(error) or type(error).__name__


def _read(received: bytes) -> Listing:
    """Parses an answer. Raises HTTPException or ValueError."""
    response = HTTPResponse(cast(Any, _Received(received)))
    response.begin()
    body = response.read()
    if response.status != HTTPStatus.OK:
        said = body[:_MAX_SHOWN].decode(errors="replace").strip()
        raise ValueError(f"expected status 200, got {response.status} {response.reason}: {said}")
    try:
        document = json.loads(body)
        servers = tuple(
            Listed(_address(each["address"]), str(each.get("id", "")), each["state"] == _READY)
            for each in document["servers"]
        )
        return Listing(int(document["generation"]), servers)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        expected = '{"servers": [{"address": "HOST:PORT", "state": "ready"}], "generation": 1}'
        raise ValueError(f"expected {expected}, got {body[:_MAX_SHOWN]!r}") from None


class _Received:
    """Received bytes, in the form of a socket from which HTTPResponse reads."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(value)
    return value
