"""grpc.health.v1: the state of the server and of each model, to be asked and to be watched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from grpc_health.v1 import health, health_pb2

from xlaserve_proto import open_inference_pb2, vision_pb2

SERVER: Final = (
    "",
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
    vision_pb2.DESCRIPTOR.services_by_name["Vision"].full_name,
)
"""The services that stand for the server as a whole."""
STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}


class Health:
    """Keeps the health service in step with the repository. Each model's name is a service of its own.

    `is_ready` says whether the server is; `models` which models serve.
    """

    def __init__(self, is_ready: Callable[[], bool], models: Callable[[], Mapping[str, bool]]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._is_ready = is_ready
        self._models = models
        self._changed = asyncio.Event()
        self._changed.set()
        self._task = asyncio.create_task(self._follow(), name="health")

    def refresh(self) -> None:
        """Takes over what `is_ready` and `models` say now."""
        self._changed.set()

    async def stop(self) -> None:
        """Turns everything to NOT_SERVING, for good."""
        self._task.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            services = {**dict.fromkeys(SERVER, self._is_ready()), **self._models()}
            for service, is_serving in services.items():
                await self.servicer.set(service, STATUS[is_serving])
