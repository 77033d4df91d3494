"""Servers over gRPC, whatever the protocol of their messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from typing import Any, Final

import grpc
import grpc.aio

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.printable import shortened
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.answers import Checker, Reader
from xlaserve_loadtest.targets.channel import Transport, open_channel
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Array, Connection, ModelInfo, Reply, RequestError, TargetError

_METADATA_DEADLINE_S: Final = 10.0
_HTTP1: Final = "Trying to connect an http1.x server"
"""Part of gRPC's text where a port answers HTTP/1."""
_CONNECT_TIMEOUT_S: Final = 2.0


class GrpcTarget:
    """Servers that answer requests to `method`, which `read` reads. `deadline_s` bounds every inference."""

    def __init__(self, method: str, read: Reader[bytes], deadline_s: float) -> None:
        self._method = method
        self._read = read
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References = NONE
    ) -> AsyncIterator[Connection]:
        """Opens connections to each of `addresses`, which take requests in turn."""
        transport = models[0].transport
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(Address.parse(address).authority, transport))
                for address in [*addresses] * transport.connections
            ]
            # Connecting is not part of the first request; where it fails, the requests fail.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await asyncio.gather(*(channel.channel_ready() for channel in channels))
            # Without serialisers: bytes go out as they are and come back as they are.
            calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [
                channel.unary_unary(self._method) for channel in channels
            ]
            checker = Checker(models, self._read, references)
            yield GrpcConnection(calls, checker, transport, self._deadline_s, len(addresses))


class GrpcConnection:
    """Distributes requests over several channels in turn."""

    def __init__(
        self,
        calls: Sequence[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]],
        checker: Checker[bytes],
        transport: Transport,
        deadline_s: float,
        addresses: int = 1,
    ) -> None:
        """Over `calls` to the first of so many addresses, to the second and so on, and again."""
        self._turns: Iterator[tuple[int, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]] = cycle(
            [(number % addresses, call) for number, call in enumerate(calls)]
        )
        self._checker = checker
        self._headers = transport.headers
        self._deadline_s = deadline_s

    async def send(self, request: Request) -> Reply:
        """Does what `Connection` says."""
        reply, _ = await self._exchange(request)
        return reply

    async def outputs(self, request: Request) -> list[Array]:
        """Does what `Connection` says."""
        reply, data = await self._exchange(request)
        if reply.status is not Status.OK:
            raise RequestError(reply.status, reply.detail)
        return self._checker.outputs(data, request)

    async def _exchange(self, request: Request) -> tuple[Reply, bytes]:
        return await self._exchange_with(*next(self._turns), request)

    async def _exchange_with(
        self, target: int, call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], request: Request
    ) -> tuple[Reply, bytes]:
        """Sends a request to the target of that index."""
        try:
            data = await call(request.data, timeout=self._deadline_s, metadata=self._headers)
            arrived_ns = time.monotonic_ns()
        except grpc.aio.AioRpcError as error:
            return Reply(Status(error.code().value[0]), detail=error.details() or "", target=target), b""
        return self._checker.reply(data, request)._replace(target=target, arrived_ns=arrived_ns), data


async def ask(address: str, transport: Transport, method: Any, request: Any) -> Any:
    """Calls a method of a stub. Raises TargetError."""
    try:
        return await method(request, timeout=_METADATA_DEADLINE_S, metadata=transport.headers)
    except grpc.aio.AioRpcError as error:
        reason = shortened(error.details() or "")
        if _HTTP1 in (error.details() or ""):
            reason = f"this port speaks HTTP/1: name the gRPC port, or http://{address} to measure over HTTP"
        raise TargetError(f"{address}: {error.code().name}: {reason}") from None
