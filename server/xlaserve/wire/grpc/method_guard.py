"""The roles of gRPC's methods, and the check of each call: by metadata before its message, or by a certificate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc

from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.caller import ANYONE, INFER, OBSERVE, READ, Role
from xlaserve.admission.certificates import names_in
from xlaserve.admission.method_access import MethodAccess
from xlaserve.wire.grpc.context import Context, address

ROLES: Final[dict[str, dict[str, Sequence[Role]]]] = {
    "inference.GRPCInferenceService": {
        "ServerLive": ANYONE,
        "ServerReady": ANYONE,
        "ModelInfer": INFER,
        "ModelStreamInfer": INFER,
        "ModelReady": READ,
        "ServerMetadata": READ,
        "ModelMetadata": READ,
        "ModelConfig": READ,
        "RepositoryIndex": READ,
        "ModelStatistics": OBSERVE,
    },
    "xlaserve.v1.Vision": {
        "Classify": INFER,
        "Detect": INFER,
        "Segment": INFER,
        "Embed": INFER,
        "Transcribe": INFER,
        "Locate": INFER,
        "ListModels": READ,
    },
    "tensorflow.serving.PredictionService": {
        "Predict": INFER,
        "Classify": INFER,
        "Regress": INFER,
        "MultiInference": INFER,
        "GetModelMetadata": READ,
    },
    "tensorflow.serving.ModelService": {"GetModelStatus": READ},
    "grpc.health.v1.Health": {"Check": ANYONE, "List": ANYONE, "Watch": ANYONE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": READ},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": READ},
}
"""Who may call which method: one of these roles is needed, where there are any. What is not here is for ADMIN."""


class MethodGuard:
    """Checks the calls of one method; see `MethodAccess`."""

    __slots__ = ("_access",)

    def __init__(self, authenticator: Authenticator, roles: Sequence[Role], action: str = "") -> None:
        self._access = MethodAccess(authenticator, roles, action)

    def check_details(self, details: grpc.HandlerCallDetails) -> None:
        """Checks the metadata of a call, as grpcio hands it to interceptors and handlers; see `check_metadata`."""
        if not self._access.is_open:
            self.check_metadata(details.invocation_metadata or ())

    def check_metadata(self, metadata: Iterable[tuple[str, Any]]) -> None:
        """Notes who calls. Raises Unauthenticated or PermissionDenied."""
        if not self._access.is_open:
            self._access.check_headers({key: value for key, value in metadata if isinstance(value, str)})

    def check_connection(self, context: Context) -> None:
        """Notes who calls where the metadata did not tell. Raises Unauthenticated or PermissionDenied."""
        if self._access.asks_connection:
            names = (name for pem in context.auth_context().get("x509_pem_cert", ()) for name in names_in(pem))
            self._access.check_connection(names, address(context))

    def check_again(self, context: Context) -> None:
        """Checks a call that goes on: keys are withdrawn and tokens expire. Raises what the other checks do."""
        if not self._access.is_open:
            self.check_metadata(context.invocation_metadata() or ())
            self.check_connection(context)
