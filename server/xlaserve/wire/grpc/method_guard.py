"""Who makes a call: recognised by its metadata before its message is received, or else by a certificate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc

from xlaserve.admission.authenticator import Authenticator, unauthenticated
from xlaserve.admission.caller import ANYONE, CURRENT, INFER, OBSERVE, READ, STRANGER, Caller, Role
from xlaserve.admission.certificates import names_in
from xlaserve.errors import PermissionDenied, Unauthenticated
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
    "xlaserve.v1.Vision": {"Classify": INFER, "Detect": INFER, "Segment": INFER, "Embed": INFER, "ListModels": READ},
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

_UNKNOWN: Final = Caller("unknown", frozenset())


class MethodGuard:
    """Checks the calls of one method."""

    __slots__ = ("_action", "_authenticator", "_is_open", "_roles")

    def __init__(self, authenticator: Authenticator, roles: Sequence[Role], action: str = "") -> None:
        self._action = action
        self._authenticator = authenticator
        self._roles = roles
        self._is_open = not authenticator.is_locked

    def check_details(self, details: grpc.HandlerCallDetails) -> None:
        """Does what `check_metadata` does with what grpcio tells of a call."""
        if not self._is_open:
            self.check_metadata(details.invocation_metadata or ())

    def check_metadata(self, metadata: Iterable[tuple[str, Any]]) -> None:
        """Notes who calls. Raises Unauthenticated or PermissionDenied."""
        if self._is_open:
            return
        headers = {key: value for key, value in metadata if isinstance(value, str)}
        CURRENT.set(STRANGER)
        try:
            caller = self._authenticator.by_headers(headers)
            if caller is None and not self._authenticator.asks_connections:
                raise unauthenticated()
        except Unauthenticated as error:
            self._turn_away(error)
        else:
            self._let_in(caller)

    def check_connection(self, context: Context) -> None:
        """Notes who calls where the metadata did not tell. Raises Unauthenticated or PermissionDenied."""
        if CURRENT.get() is not _UNKNOWN:
            return
        names = (name for pem in context.auth_context().get("x509_pem_cert", ()) for name in names_in(pem))
        CURRENT.set(STRANGER)
        try:
            caller = self._authenticator.by_connection(names, address(context))
        except Unauthenticated as error:
            self._turn_away(error)
        else:
            self._let_in(caller)

    def check_again(self, context: Context) -> None:
        """Checks a call that goes on: keys are withdrawn and tokens expire. Raises what the other checks do."""
        if self._is_open:
            return
        self.check_metadata(context.invocation_metadata() or ())
        self.check_connection(context)

    def _let_in(self, caller: Caller | None) -> None:
        """Notes who calls; None where the connection has to tell. Raises PermissionDenied."""
        CURRENT.set(_UNKNOWN if caller is None else caller)
        if caller is not None and self._roles:
            try:
                caller.check_role(*self._roles)
            except PermissionDenied as error:
                self._authenticator.refusals.note(self._action, self._roles, error)
                raise

    def _turn_away(self, error: Unauthenticated) -> None:
        """Raises `error` unless the method is for anyone."""
        if self._roles:
            self._authenticator.refusals.note(self._action, self._roles, error)
            raise error
