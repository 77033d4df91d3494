"""Every method has a role, and callers are checked before their messages are parsed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from tests.server.admission.conftest import KEY, Write, certificate, entry

from xlaserve.admission.authenticator import Authenticator, unauthenticated
from xlaserve.admission.caller import (
    ADMIN,
    ANYBODY,
    ANYONE,
    CURRENT,
    INFER,
    OBSERVE,
    STRANGER,
    Caller,
    Limit,
    Origin,
    Role,
)
from xlaserve.admission.calls import Admissions
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import PermissionDenied, Unauthenticated
from xlaserve.wire.grpc import handlers, reflection_service
from xlaserve.wire.grpc.method_guard import ROLES, MethodGuard
from xlaserve.wire.http import routes
from xlaserve.wire.http.operation import Operation
from xlaserve_proto import admin_pb2, open_inference_pb2, tensorflow_serving_pb2, vision_pb2

SERVICES: list[ServiceDescriptor] = [
    *(
        service
        for file in (open_inference_pb2, vision_pb2, admin_pb2, health_pb2, tensorflow_serving_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ),
    *reflection_service.REFLECTIONS,
]
METHODS = {f"{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
OPEN = {
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/List",
    "grpc.health.v1.Health/Watch",
    "inference.GRPCInferenceService/ServerLive",
    "inference.GRPCInferenceService/ServerReady",
}
FOR_ADMINS = {
    "inference.GRPCInferenceService/RepositoryModelLoad",
    "inference.GRPCInferenceService/RepositoryModelUnload",
    "inference.GRPCInferenceService/TraceSetting",
    "inference.GRPCInferenceService/LogSettings",
    "inference.GRPCInferenceService/SystemSharedMemoryStatus",
    "inference.GRPCInferenceService/SystemSharedMemoryRegister",
    "inference.GRPCInferenceService/SystemSharedMemoryUnregister",
    "xlaserve.v1.Admin/Profile",
    "tensorflow.serving.ModelService/HandleReloadConfigRequest",
}


class Anything:
    def __getattr__(self, name: str) -> Any:
        return name


def operations() -> list[Operation]:
    anything = cast(Any, Anything())
    return routes.operations(anything, anything, anything, anything, anything)


def test_every_grpc_method_has_a_role_or_is_open_or_for_admins() -> None:
    listed = {f"{service}/{method}": roles for service, methods in ROLES.items() for method, roles in methods.items()}
    assert {*listed} - METHODS == set(), "listed, but there is none"
    assert {method for method, roles in listed.items() if roles == ANYONE} == OPEN
    assert METHODS - {*listed} == FOR_ADMINS


def test_every_http_operation_has_a_role_but_health_and_the_page() -> None:
    found = operations()
    assert {path for one in found if one.roles == ANYONE for path in one.paths} == {
        "/v2/health/live",
        "/v2/health/ready",
        "/",
        "/page/{file}",
    }
    assert {path for one in found if one.roles == OBSERVE for path in one.paths} >= {
        "/v1/status",
        "/v1/status/models/{model}/versions/{version}",
    }
    assert {path for one in found if one.roles == ADMIN for path in one.paths} == {
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
    }
    assert {one.name for one in found if Role.INFER in one.roles and Role.OBSERVE not in one.roles} == {
        "infer",
        "predict",
        "regress",
        "classify",
        "detect",
        "segment",
        "embed",
        "locate",
        "transcribe",
        "transform",
    }


def test_the_roles_of_http_are_those_of_grpc() -> None:
    same = {
        "infer": "ModelInfer",
        "live": "ServerLive",
        "ready": "ServerReady",
        "server_metadata": "ServerMetadata",
        "model_statistics": "ModelStatistics",
        "model_ready": "ModelReady",
        "model_metadata": "ModelMetadata",
        "model_config": "ModelConfig",
        "index": "RepositoryIndex",
        "load": "RepositoryModelLoad",
        "unload": "RepositoryModelUnload",
    }
    of_grpc = ROLES["inference.GRPCInferenceService"]
    for one in operations():
        if one.name in same:
            assert one.roles == of_grpc.get(same[one.name], ADMIN), one.name


class Certified:
    """A call with a certificate of these names, or none, and these metadata."""

    def __init__(self, *names: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.names, self.metadata = names, metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        # gRPC ends names at a zero byte, which the certificate itself does not.
        names = [name.partition("\0")[0].encode() for name in self.names]
        return {"x509_common_name": names[:1], "x509_pem_cert": [certificate(*self.names)]} if names else {}

    def peer(self) -> str:
        return "ipv4:192.0.2.7:4711"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


def certified(*names: str, **more: Any) -> Any:
    return Certified(*names, **more)


BEARER = (("authorization", f"Bearer {KEY}"),)


@pytest.fixture(autouse=True)
def _in_a_call_of_its_own() -> Any:
    token = CURRENT.set(ANYBODY)
    yield
    CURRENT.reset(token)


def test_without_an_access_file_nothing_is_checked() -> None:
    guard = MethodGuard(Authenticator(None), ADMIN)
    guard.check_metadata([])
    guard.check_connection(certified())
    guard.check_again(certified())
    assert CURRENT.get() is ANYBODY


def test_a_key_is_enough_and_its_roles_count(write: Write) -> None:
    authenticator = Authenticator(write(entry("shop"), {"name": "ops", "certificate": "ops", "roles": ["admin"]}))
    MethodGuard(authenticator, INFER).check_metadata([*BEARER, ("trace-bin", cast(Any, b"\0"))])
    assert CURRENT.get().name == "shop"
    MethodGuard(authenticator, INFER).check_connection(certified("ops"))
    assert CURRENT.get().name == "shop"
    CURRENT.set(ANYBODY)
    with pytest.raises(PermissionDenied):
        MethodGuard(authenticator, ADMIN).check_metadata(BEARER)
    assert CURRENT.get().name == "shop", "the log names who was refused"
    with pytest.raises(Unauthenticated):
        MethodGuard(authenticator, INFER).check_metadata([("authorization", "Bearer wrong")])
    assert CURRENT.get() is STRANGER


def test_a_certificate_counts_where_there_is_no_key(write: Write) -> None:
    authenticator = Authenticator(write(entry("shop"), {"name": "ops", "certificate": "ops", "roles": ["admin"]}))
    guard = MethodGuard(authenticator, ADMIN)
    guard.check_metadata([])
    assert not CURRENT.get().roles
    guard.check_connection(certified("ops"))
    assert CURRENT.get().name == "ops"

    for names in ((), ("other",), ("ops\0.evil",), ("other", "ops\0.evil"), ("ops\n",)):
        guard.check_metadata([])
        with pytest.raises(Unauthenticated, match=re.escape(str(unauthenticated()))):
            guard.check_connection(certified(*names))
    infers = MethodGuard(authenticator, INFER)
    infers.check_metadata([])
    with pytest.raises(PermissionDenied):
        infers.check_connection(certified("ops"))


def test_anybody_is_counted_by_address_and_a_wrong_key_is_still_refused(write: Write) -> None:
    anybody = {"roles": ["infer"], "models": ["noop"], "limits": [{"max_images": 4}], "priority": 3}
    authenticator = Authenticator(
        write(entry("shop"), {"name": "ops", "certificate": "ops", "roles": ["admin"]}, anybody=anybody)
    )
    infers = MethodGuard(authenticator, INFER)
    infers.check_metadata([])
    infers.check_connection(certified("unknown"))
    caller = CURRENT.get()
    assert caller == Caller(
        "address 192.0.2.7", frozenset([Role.INFER]), ("noop",), (Limit(max_images=4),), 3, origin=Origin.ADDRESS
    )
    with pytest.raises(Unauthenticated):
        infers.check_metadata([("authorization", "Bearer wrong")])
    infers.check_metadata(BEARER)
    assert CURRENT.get().name == "shop"
    administers = MethodGuard(authenticator, ADMIN)
    administers.check_metadata([])
    administers.check_connection(certified("ops"))
    assert CURRENT.get().name == "ops"
    administers.check_metadata([])
    with pytest.raises(PermissionDenied):
        administers.check_connection(certified())


def test_nobody_waits_for_a_certificate_where_none_would_do(write: Write) -> None:
    with pytest.raises(Unauthenticated):
        MethodGuard(Authenticator(write(entry("shop"))), INFER).check_metadata([])


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
def test_what_is_open_is_open_to_strangers_and_they_see_no_model(write: Write, metadata: Any) -> None:
    for callers in ([entry("shop")], [entry("shop"), {"name": "ops", "certificate": "ops"}]):
        guard = MethodGuard(Authenticator(write(*callers)), ANYONE)
        guard.check_metadata(metadata)
        guard.check_connection(certified())
        assert CURRENT.get() is STRANGER


def test_what_is_open_knows_those_who_say_who_they_are(write: Write) -> None:
    guard = MethodGuard(Authenticator(write(entry("shop", roles=[]))), ANYONE)
    guard.check_metadata(BEARER)
    assert CURRENT.get().name == "shop"


def test_a_call_that_goes_on_ends_with_its_key(write: Write) -> None:
    authenticator = Authenticator(write(entry("shop")))
    guard = MethodGuard(authenticator, INFER)
    guard.check_metadata(BEARER)
    guard.check_again(certified(metadata=BEARER))
    write(entry("other", "xla_other"))
    assert authenticator.watch is not None
    authenticator.watch.look()
    with pytest.raises(Unauthenticated):
        guard.check_again(certified(metadata=BEARER))


class Server:
    def __init__(self) -> None:
        self.generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic += handlers


class Refused(Exception):
    pass


class Call(Certified):
    """A call whose client may not send anything before it is refused."""

    async def read(self) -> bytes:
        raise AssertionError("the message was asked for")

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, status: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise Refused(status, details)


def refuse_all(data: bytes) -> Any:
    raise AssertionError("the message was parsed")


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
@pytest.mark.parametrize("certificate", [False, True], ids=["keys", "certificates"])
@pytest.mark.parametrize("crowded", [False, True], ids=["received", "asked for"])
async def test_strangers_are_refused_before_their_message_is_read(
    write: Write, service: ServiceDescriptor, certificate: bool, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [{"name": "ops", "certificate": "ops"}] if certificate else []
    authenticator, server = Authenticator(write(entry("shop"), *callers)), Server()
    message_memory = MessageMemory(1 << 20, 1 << 20, 1 << 30)
    monkeypatch.setattr(MessageMemory, "is_crowded", crowded)
    settings: Any = SimpleNamespace(max_concurrent_calls=9, max_calls_per_address=None, max_transfer_s=9.0)
    parsers = {method.input_type.name: refuse_all for method in service.methods}
    servicer = SimpleNamespace()
    for method in service.methods:
        setattr(servicer, method.name, None)
    handlers.add(
        servicer,
        service,
        cast(Any, server),
        message_memory,
        Admissions.of(settings),
        authenticator=authenticator,
        parsers=parsers,
    )
    (found,) = server.generic
    for method in service.methods:
        path = f"/{service.full_name}/{method.name}"
        if path[1:] in OPEN:
            continue
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            handler = found.service(SimpleNamespace(method=path, invocation_metadata=metadata))
            with pytest.raises(Refused) as refused:
                await _answer(handler, Call())
            assert refused.value.args == (grpc.StatusCode.UNAUTHENTICATED, str(unauthenticated())), path
            CURRENT.set(ANYBODY)


async def _answer(handler: Any, call: Any) -> None:
    answered = next(
        one
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        if (one := getattr(handler, name, None)) is not None
    )(b"" if not handler.request_streaming else None, call)
    if hasattr(answered, "__aiter__"):
        async for _ in answered:
            raise AssertionError("something was answered")
    else:
        await answered
