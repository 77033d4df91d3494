"""The gRPC server: every service on one port."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from xlaserve.admission.authenticator import OPEN, Authenticator
from xlaserve.admission.calls import Admissions
from xlaserve.admission.certificates import Certificates
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.telemetry.http import taken_port
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.tracing import Tracer
from xlaserve.wire.grpc import handlers, reflection_service, serving_messages, vision_messages
from xlaserve.wire.grpc.admin import Admin
from xlaserve.wire.grpc.ending import RPC_TASK
from xlaserve.wire.grpc.health_service import Health
from xlaserve.wire.grpc.infer_message import InferMessages
from xlaserve.wire.grpc.open_inference_service import OpenInference
from xlaserve.wire.grpc.port_closing import UNLISTED, close_connections, close_listeners, connections, hang_up
from xlaserve.wire.grpc.server_options import credentials, options
from xlaserve.wire.grpc.surplus import close_surplus
from xlaserve.wire.grpc.tensorflow_serving_service import ModelService, PredictionService
from xlaserve.wire.grpc.unreceived import Unreceived
from xlaserve.wire.grpc.vision_service import Vision
from xlaserve_proto import admin_pb2, open_inference_pb2, tensorflow_serving_pb2, vision_pb2

LISTEN_AGAIN_S: Final = 10.0
"""How long a new server tries to get the port of one that ended, every RETRY_S."""
RETRY_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
"""Between attempts to close the connections of a server that ended: each lists all sockets, on the event loop."""
_OF_CLIENTS: Final = (
    "codec can't decode byte",
    "UnicodeDecodeError",
    "Invalid encoding on",
    "ExecuteBatchError raised in core",  # a client that hung up as its answer left
)
"""Messages that grpcio and asyncio log as errors with a traceback, though clients alone cause them."""

_DESCRIPTORS: Final[Sequence[Any]] = (
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    vision_pb2.DESCRIPTOR.services_by_name["Vision"],
    tensorflow_serving_pb2.DESCRIPTOR.services_by_name["PredictionService"],
    tensorflow_serving_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
"""Of `Services`, in their order."""
_HEALTH: Final[Any] = health_pb2.DESCRIPTOR.services_by_name["Health"]
_ADMIN: Final[Any] = admin_pb2.DESCRIPTOR.services_by_name["Admin"]

log = logging.getLogger(__name__)


class Services(NamedTuple):
    """The methods of each protocol."""

    open_inference: OpenInference
    vision: Vision
    prediction: PredictionService
    models: ModelService


class GrpcServer:
    """Serves `services`, health and perhaps `admin`; reflection as `settings` say.

    `on_crash` is called where grpcio's server has ended and none can listen again.
    """

    def __init__(
        self,
        settings: Settings,
        services: Services,
        health: Health,
        admin: Admin | None,
        *,
        message_memory: MessageMemory,
        admissions: Admissions,
        authenticator: Authenticator = OPEN,
        certificates: Certificates | None = None,
        metrics: Metrics,
        on_failed: Callable[[str, Exception], None] = lambda method, error: None,
        on_crash: Callable[[], None],
        tracer: Tracer | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._settings = settings
        self._services = services
        self._health = health
        self._admin = admin
        self._metrics = metrics
        self._on_failed = on_failed
        self._on_crash = on_crash
        self._unreceived = Unreceived(settings.max_message_bytes, metrics.count_refused)
        self._tracer = tracer
        self._headers = headers
        self._message_memory = message_memory
        self._admissions = admissions
        self._authenticator = authenticator
        self._certificates = certificates
        self._server = self._build()
        self._is_stopping = False
        self._counting: asyncio.Task[None] | None = None
        self.address = ""
        """HOST:PORT, once it is started."""

    def _build(self) -> grpc.aio.Server:
        settings, health = self._settings, self._health
        server = grpc.aio.server(options=options(settings))

        # For each registered method grpcio keeps a future, and at every call waits on all of them again, which for all
        # of ours takes 13 microseconds (grpcio 1.85). Generic handlers answer the same methods.
        server.add_registered_method_handlers = _leave_to_generic_handlers  # type: ignore[method-assign, assignment]
        parsers = {
            "ModelInferRequest": InferMessages().parse,
            **vision_messages.PARSERS,
            **serving_messages.PARSERS,
        }
        servicers = [*zip(_DESCRIPTORS, self._services, strict=True)]
        if self._admin is not None:
            servicers.append((_ADMIN, self._admin))
        for service, servicer in servicers:
            handlers.add(
                servicer,
                service,
                server,
                self._message_memory,
                self._admissions,
                authenticator=self._authenticator,
                parsers=parsers,
                on_refused=self._metrics.count_refused,
                on_failed=self._on_failed,
                on_unreceived=self._unreceived.note,
                tracer=self._tracer,
                headers=self._headers,
            )
        add = partial(
            handlers.add,
            server=server,
            message_memory=self._message_memory,
            admissions=self._admissions,
            authenticator=self._authenticator,
            on_failed=self._on_failed,
        )
        add(health, _HEALTH)
        if settings.reflection:
            services = [service.full_name for service, _ in [*servicers, (_HEALTH, health)]]
            reflection = reflection_service.Reflection(services)
            for version in reflection_service.REFLECTIONS:
                add(reflection, version, parsers=reflection_service.PARSERS)
        return server

    async def start(self) -> None:
        """Listens. Raises ConfigError where the port can't be had."""
        port = await self._listen(self._settings.grpc_port)
        self.address = f"{self._host}:{port}"
        for name in ("asyncio", "grpc._cython.cygrpc"):
            logging.getLogger(name).addFilter(_is_ours)
        self._listening = asyncio.create_task(self._listen_again(port))
        if (most := self._settings.effective_max_connections_per_address) < self._settings.max_connections:
            self._counting = asyncio.create_task(close_surplus(port, most))

    @property
    def _host(self) -> str:
        host = self._settings.host
        return f"[{host}]" if ":" in host else host

    async def _listen(self, port: int) -> int:
        try:
            bound = self._add_port(f"{self._host}:{port}")
        except RuntimeError as error:
            raise taken_port("grpc_port", self._settings.host, port, error) from error
        before = asyncio.all_tasks()
        await self._server.start()
        # Tasks of compiled code are grpcio's. Where one of them fails, no more calls are accepted.
        for task in asyncio.all_tasks() - before:
            if not inspect.iscoroutine(task.get_coro()):
                task.add_done_callback(partial(self._accepts_no_more, self._server, bound))
        return bound

    def _add_port(self, address: str) -> int:
        if self._certificates is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials(self._certificates))

    def _accepts_no_more(self, server: grpc.aio.Server, port: int, task: asyncio.Task[None]) -> None:
        if not self._is_stopping and not task.cancelled() and task.exception():
            self._hanging_up = asyncio.create_task(self._hang_up(server, port))

    async def _hang_up(self, server: grpc.aio.Server, port: int) -> None:
        """Closes the connections of a server that grpcio has ended, which would wait until each client did so."""
        pause_s, level = RETRY_S, logging.WARNING
        while self._server is server and not self._is_stopping:
            try:
                close_connections(port)
            except UNLISTED as error:
                log.log(level, "connections to port %d could not be closed: %s", port, error)
                level = logging.DEBUG
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _listen_again(self, port: int) -> None:
        """Makes another server where grpcio has ended its own, as 1.85 does where the path of a call is no UTF-8."""
        while True:
            reason: Exception | None = None
            try:
                await self._server.wait_for_termination()
            except Exception as error:
                reason = error
            if self._is_stopping:
                return
            if isinstance(reason, UnicodeDecodeError):
                log.warning("a call whose path is no UTF-8 ended gRPC and all calls in flight; listening again")
            else:
                log.error("gRPC ended, and with it all calls in flight; listening again", exc_info=reason)
            try:
                async with asyncio.timeout(LISTEN_AGAIN_S):
                    await self._replace(port)
            except TimeoutError:
                log.exception("gRPC can't listen on port %d again", port)
                self._on_crash()
                return

    async def _replace(self, port: int) -> None:
        while True:
            self._server = self._build()
            try:
                await self._listen(port)
            except ConfigError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    def close_listeners(self) -> None:
        """Takes no new connections."""
        try:
            close_listeners(self._port)
        except UNLISTED as error:
            log.warning("gRPC goes on to take connections: %s", error)

    @property
    def connections(self) -> int:
        """How many there are; 0 where the system does not say."""
        try:
            return connections(self._port)
        except UNLISTED as error:
            log.debug("gRPC's connections can't be counted: %s", error)
            return 0

    @property
    def _port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def close_connections(self) -> None:
        """Closes all connections; calls without an answer end as UNAVAILABLE."""
        try:
            close_connections(self._port)
        except UNLISTED as error:
            log.warning("gRPC's connections could not be closed: %s", error)

    async def stop(self, grace_s: float) -> None:
        """Closes the port and the connections; a client that reads slowly has `grace_s` for what was answered.

        Calls without an answer end as UNAVAILABLE.
        """
        if self._counting is not None:
            self._counting.cancel()
        self._is_stopping = True  # a task that waits for the end is not cancelled; grpcio's own would be
        await hang_up(self._port, grace_s)
        await self._server.stop(grace_s)
        # gRPC is done with its last calls before their tasks are, and logs an error where the loop ends first.
        if rest := [task for task in asyncio.all_tasks() if task.get_name() == RPC_TASK]:
            await asyncio.wait(rest, timeout=grace_s)


def _leave_to_generic_handlers(service: str, handlers: object) -> None:
    pass


def _is_ours(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(part in message for part in _OF_CLIENTS)
