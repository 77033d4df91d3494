"""A fleet: servers that a name service lists, and that come and go. Requests are spread as `xlaserve_client` does.

Each generator gives a request to the server with the fewest of its own under way. Nothing is sent twice: a request that
fails because its server has gone is a failure, which a client that retries might not have seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.client import HTTPException
from typing import Final, NamedTuple, Self

import grpc
import grpc.aio

from xlaserve_client.aio_fleet import AsyncFleet
from xlaserve_client.errors import Unavailable
from xlaserve_client.name_service import NameService, failure_reason
from xlaserve_loadtest.printable import shortened
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets import open_inference
from xlaserve_loadtest.targets.answers import Checker
from xlaserve_loadtest.targets.channel import PLAIN, Transport, open_channel
from xlaserve_loadtest.targets.grpc_target import GrpcConnection
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Connection, ModelInfo, Reply, TargetError

_NEWS_TIMEOUT_S: Final = 2.0
_CODES: Final = {Status(code.value[0]): code for code in grpc.StatusCode}


class FleetTarget:
    """The servers of a fleet. `deadline_s` bounds every inference."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References = NONE
    ) -> AsyncIterator[Connection]:
        """Follows the name service at the one address; connects to each server when it gets its first request."""
        (address,), transport = addresses, models[0].transport
        fleet = AsyncFleet(
            NameService.parse(address),
            lambda server: _Opened.to(server, transport),
            lambda opened: opened.channel.close(),
        )
        try:
            await fleet.wait_for_update(_NEWS_TIMEOUT_S)
            checker = Checker(models, open_inference.read, references)
            yield _FleetConnection(fleet, checker, transport, self._deadline_s)
        finally:
            await fleet.close()


class _Opened(NamedTuple):
    """A channel, and the one method that is called over it."""

    channel: grpc.aio.Channel
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

    @classmethod
    def to(cls, address: str, transport: Transport) -> Self:
        channel = open_channel(address, transport)
        return cls(channel, channel.unary_unary(open_inference.METHOD))


class _FleetConnection(GrpcConnection):
    """Gives each request the server with the fewest under way."""

    def __init__(
        self, fleet: AsyncFleet[_Opened], checker: Checker[bytes], transport: Transport, deadline_s: float
    ) -> None:
        super().__init__((), checker, transport, deadline_s)
        self._servers = fleet.members

    async def _exchange(self, request: Request) -> tuple[Reply, bytes]:
        try:
            server = self._servers.take()
        except Unavailable as error:
            return Reply(Status.UNAVAILABLE, detail=error.message), b""
        status = grpc.StatusCode.CANCELLED
        try:
            reply, data = await self._exchange_with(0, server.channel.call, request)
            status = _CODES.get(reply.status, grpc.StatusCode.OK)
            return reply, data
        finally:
            self._servers.release(server, status)


def target(deadline_s: float) -> FleetTarget:
    """Returns the target. `deadline_s` bounds every inference."""
    return FleetTarget(deadline_s)


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server of the fleet for its metadata and that of a model. Raises TargetError."""
    return await open_inference.describe(await ready_server(address), model, transport)


async def ready_server(address: str) -> str:
    """Returns HOST:PORT of a server of the fleet at `address` that is ready. Raises TargetError."""
    try:
        listing = await NameService.parse(address).ask()
    except (OSError, HTTPException, ValueError) as error:
        raise TargetError(f"{address}: UNAVAILABLE: {shortened(failure_reason(error))}") from None
    for server in listing.servers:
        if server.is_ready:
            return server.address
    raise TargetError(f"{address}: UNAVAILABLE: no server is ready, of {len(listing.servers)} that are listed")
