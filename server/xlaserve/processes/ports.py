"""The ports of a server: gRPC, HTTP, and metrics in the clear."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.certificates import Certificates
from xlaserve.config import Settings
from xlaserve.telemetry.http import HttpEndpoint
from xlaserve.wire.grpc import port_closing
from xlaserve.wire.grpc.grpc_server import GrpcServer
from xlaserve.wire.http.http_server import HttpServer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """The servers of gRPC, HTTP and metrics, and the `authenticator` and `certificates` that they share."""

    settings: Settings
    grpc: GrpcServer
    http: HttpServer
    telemetry: HttpEndpoint | None
    """The endpoint of the metrics; None if `metrics_port` is off, or if another process has it."""
    authenticator: Authenticator
    certificates: Certificates | None
    metrics_elsewhere: str | None = None
    """HOST:PORT where another process shows the metrics of this one; None if none does."""

    async def open(self) -> None:
        """Listens on all ports. Raises ConfigError; then, `close` closes the ports that were opened."""
        if self.authenticator.watch is not None:
            self.authenticator.watch.follow()
        if self.certificates is not None:
            loop = asyncio.get_running_loop()
            self.certificates.follow(partial(loop.call_soon_threadsafe, self._close_connections))
        if self.telemetry is not None:
            self.telemetry.start()
        await self.http.start()
        await self.grpc.start()

    def announce(self) -> None:
        """Logs the addresses, and who may call there."""
        addresses = self.addresses()
        log.info("listening: gRPC %s, HTTP %s, metrics %s", *(address or "off" for address in addresses.values()))
        self._warn_of_open_access(addresses["metrics"])

    async def leave(self, fronts: int) -> None:
        """Passes new connections on to processes that listen behind the `fronts` of this server.

        The present connections end: of HTTP, each with its next answer; of gRPC, each at `max_connection_age_s`.
        """
        await asyncio.gather(*(port_closing.pass_on(port, fronts) for port in self._numbers))
        self.grpc.close_listeners()
        await self.http.leave()

    def share(self) -> None:
        """Has the kernel spread connections over all processes that listen again, after others have left."""
        for port in self._numbers:
            port_closing.spread(port)

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The numbers of the ports of gRPC and HTTP."""
        return tuple(int(address.rpartition(":")[2]) for address in (self.grpc.address, self.http.address))

    @property
    def connections(self) -> int:
        """Number of open connections of gRPC and HTTP."""
        return self.grpc.connections + self.http.connections

    async def stop_calls(self, grace_s: float) -> None:
        """Closes the ports of gRPC and HTTP; the last answers may take `grace_s` to be sent."""
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))

    def close(self) -> None:
        """Closes the port of the metrics, which is the last one to be closed."""
        if self.telemetry is not None:
            self.telemetry.stop()

    def addresses(self) -> dict[str, str | None]:
        """Returns HOST:PORT of "grpc", "http" and "metrics"; None for metrics that are off."""
        metrics = self.metrics_elsewhere if self.telemetry is None else self.telemetry.address
        return {"grpc": self.grpc.address, "http": self.http.address, "metrics": metrics}

    def _close_connections(self) -> None:
        """Closes all connections, so that clients are checked against the new authorities."""
        log.info("tls: the authorities of clients have changed; connections are closed")
        self.grpc.close_connections()
        self.http.close_connections()

    def _warn_of_open_access(self, metrics_address: str | None) -> None:
        settings = self.settings
        if settings.is_loopback:
            if not self.authenticator.is_locked:
                log.info("only this machine can call: host is %s", settings.host)
        elif not self.authenticator.is_locked:
            log.warning(
                "anybody who reaches %s may call, since `access` is not set; loading, unloading and profiles are off",
                settings.host,
            )
        elif self.certificates is None:
            log.warning("keys and tokens travel in the clear: set `tls_certificate`, unless a proxy in front has one")
        if self.authenticator.is_locked and not settings.is_loopback and metrics_address:
            log.info("metrics are in the clear, for anybody who reaches %s; see `metrics_port`", metrics_address)
        if self.authenticator.asks_for_certificates and settings.tls_client_ca is None:
            log.warning("access: callers with a `certificate` can't be recognised, since `tls_client_ca` is not set")
