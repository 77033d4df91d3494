"""grpc.health.v1: the state of the server and of each model, to be asked and to be watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from xlaserve.admission.caller import CURRENT
from xlaserve.errors import NotFound
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.open_streams import OpenStreams
from xlaserve_proto import open_inference_pb2, tensorflow_serving_pb2, vision_pb2

SERVER: Final = (
    "",
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
    vision_pb2.DESCRIPTOR.services_by_name["Vision"].full_name,
    *(service.full_name for service in tensorflow_serving_pb2.DESCRIPTOR.services_by_name.values()),
)
"""The services that stand for the server as a whole."""
LIVENESS: Final = "liveness"
"""The service that serves for as long as the event loop answers and all processes work, while models compile and while
the server drains: for supervisors that restart what does not."""
RESERVED: Final = frozenset({*SERVER, LIVENESS})
MODEL: Final = "model:"
"""Prefix with which any model can be asked for, and one that is called as a reserved service only so."""
STATUS: Final = {
    True: pb.HealthCheckResponse.SERVING,
    False: pb.HealthCheckResponse.NOT_SERVING,
    None: pb.HealthCheckResponse.SERVICE_UNKNOWN,
}


class Health(pb_grpc.HealthServicer):
    """Shows what the repository says. Each model's name is a service of its own, unless it is reserved.

    `is_ready` says whether the server is; `models` which models serve; each watch is one of `streams`; `is_live`
    whether no process that this one depends on hangs. Not grpcio's own servicer, in which a client that watches and
    does not read keeps every later change, the one at shutdown included, from being made.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        models: Callable[[], Mapping[str, bool]],
        streams: OpenStreams,
        is_live: Callable[[], bool] = lambda: True,
    ) -> None:
        self._streams = streams
        self._is_ready = is_ready
        self._models = models
        self._is_live = is_live
        self._has_stopped = False
        self._serves: dict[str, bool] = {}
        """The reserved services, and whether they serve."""
        self._serving_models: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self.refresh()

    def refresh(self) -> None:
        """Updates all states from `is_ready`, `models` and `is_live`."""
        is_open = not self._has_stopped
        self._serves = {**dict.fromkeys(SERVER, self._is_ready() and is_open), LIVENESS: self._is_live()}
        self._serving_models = {name: serves and is_open for name, serves in self._models().items()}
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Turns everything to NOT_SERVING, for good."""
        self._has_stopped = True
        self.refresh()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Says how a service is. NOT_FOUND where there is none of that name."""
        if (serves := self._seen(request.service)) is None:
            raise NotFound("no such service")
        return pb.HealthCheckResponse(status=STATUS[serves])

    async def List(self, request: Any, context: Context) -> Any:  # the published types lack its messages
        """Says how each service is that the caller may know of."""
        models = (f"{MODEL}{name}" if name in RESERVED else name for name in self._serving_models)
        seen = {service: self._seen(service) for service in (*self._serves, *models)}
        shown = {service: serves for service, serves in seen.items() if serves is not None}
        return pb.HealthListResponse(  # type: ignore[attr-defined]
            statuses={service: pb.HealthCheckResponse(status=STATUS[serves]) for service, serves in shown.items()}
        )

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> AsyncIterator[pb.HealthCheckResponse]:
        """Says how a service is, and again at every change; SERVICE_UNKNOWN while there is none of that name."""
        last = None
        async with self._streams.open():
            while True:
                changed = self._changed
                status = STATUS[self._seen(request.service)]
                if status != last:
                    yield pb.HealthCheckResponse(status=status)
                    last = status
                await changed.wait()

    def _seen(self, service: str) -> bool | None:
        """Returns whether a service serves, None where there is none that the caller may know of."""
        if service in RESERVED:
            return self._serves[service]
        name = service.removeprefix(MODEL)
        return self._serving_models.get(name) if CURRENT.get().may_use(name) else None
