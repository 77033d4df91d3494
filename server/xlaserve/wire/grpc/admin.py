"""Methods for operators alone: `xlaserve.v1.Admin`."""

from __future__ import annotations

from xlaserve.admission.audit import audited
from xlaserve.admission.caller import CURRENT
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.shared.backend import Backend
from xlaserve_proto import admin_pb2 as pb
from xlaserve_proto import admin_pb2_grpc as pb_grpc


class Admin(pb_grpc.AdminServicer):
    """`xlaserve.v1.Admin`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        """Records a profile."""
        with audited("profile", f"{request.seconds:g}s"):
            CURRENT.get().check_all_models()
            recording = await self._backend.profile(request.seconds)
        return pb.ProfileResponse(folder=recording.name, size_bytes=recording.size_bytes, seconds=request.seconds)
