"""The gRPC server: every service on one port."""

from __future__ import annotations

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.rpc import handlers, infer_message
from xlaserve.rpc.admin import Admin
from xlaserve.rpc.hang_up import hang_up
from xlaserve.rpc.health import Health
from xlaserve.rpc.open_inference import OpenInference
from xlaserve.rpc.vision import Vision
from xlaserve_proto import admin_pb2, open_inference_pb2, vision_pb2


class GrpcServer:
    """Serves `open_inference`, `vision`, health and perhaps `admin`; reflection and channelz as `settings` say."""

    def __init__(
        self, settings: Settings, open_inference: OpenInference, vision: Vision, health: Health, admin: Admin | None
    ) -> None:
        self._settings = settings
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would share its connections unseen.
                ("grpc.so_reuseport", 0),
                ("grpc.enable_channelz", int(settings.channelz)),
            )
        )
        # For each registered method grpcio keeps a future and waits on all of them anew at every call, which for all of
        # ours takes 13 microseconds (grpcio 1.85). Generic handlers answer the same methods.
        self._server.add_registered_method_handlers = _leave_to_generic_handlers  # type: ignore[method-assign, assignment]
        handlers.add(
            open_inference,
            open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
            self._server,
            parsers={"ModelInferRequest": infer_message.parse},
        )
        handlers.add(vision, vision_pb2.DESCRIPTOR.services_by_name["Vision"], self._server)
        if admin is not None:
            handlers.add(admin, admin_pb2.DESCRIPTOR.services_by_name["Admin"], self._server)
        handlers.add(health, health_pb2.DESCRIPTOR.services_by_name["Health"], self._server)  # type: ignore[arg-type]
        if settings.channelz:
            channelz.add_channelz_servicer(self._server)
        if settings.reflection:
            services = [
                service.full_name
                for file in (open_inference_pb2, vision_pb2, health_pb2, *([admin_pb2] if admin else ()))
                for service in file.DESCRIPTOR.services_by_name.values()
            ]
            reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), self._server)
        self.address = ""
        """HOST:PORT, once it is started."""

    async def start(self) -> None:
        """Listens. Raises ConfigError where the port can't be had."""
        host, port = self._settings.host, self._settings.grpc_port
        if ":" in host:
            host = f"[{host}]"
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"grpc_port: expected a free port of {host}, got {port}, which can't be had") from error
        await self._server.start()
        self.address = f"{host}:{bound}"

    async def stop(self, grace_s: float) -> None:
        """Closes the port and the connections; a client that reads slowly has `grace_s` for what was answered.

        Calls without an answer end as UNAVAILABLE.
        """
        await hang_up(int(self.address.rpartition(":")[2]), grace_s)
        await self._server.stop(grace_s)


def _leave_to_generic_handlers(service: str, handlers: object) -> None:
    pass
