"""Health and reflection over a real socket."""

from __future__ import annotations

import socket
import struct
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.integration.conftest import Brake, StartServer

from xlaserve_proto import open_inference_pb2 as oip_pb2
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICES = {
    "inference.GRPCInferenceService",
    "xlaserve.v1.Vision",
    "tensorflow.serving.PredictionService",
    "tensorflow.serving.ModelService",
    "grpc.health.v1.Health",
}
PREDICTION = "tensorflow.serving.PredictionService"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
NOOP = {"models": [{"name": "noop", "source": "builtin:noop", "buckets": [1]}]}
TIMEOUT_S = 60


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.fixture(scope="module")
def health(channel: grpc.Channel) -> Any:  # its published types lack the methods
    return health_pb2_grpc.HealthStub(channel)


# Health.


@pytest.mark.parametrize(
    ("service", "status"),
    [
        ("", SERVING),
        ("inference.GRPCInferenceService", SERVING),
        ("xlaserve.v1.Vision", SERVING),
        ("tensorflow.serving.PredictionService", SERVING),
        ("digits", SERVING),
        ("noop", SERVING),
        ("broken", NOT_SERVING),
    ],
)
def test_the_server_its_services_and_its_models_have_a_health(health: Any, service: str, status: int) -> None:
    assert health.Check(asked(service)).status == status


def test_an_unknown_service_is_not_found(health: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(asked("nope"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_sees_a_model_unloaded_and_loaded(health: Any, oip: oip_grpc.GRPCInferenceServiceStub) -> None:
    noop, server = (health.Watch(asked(service), timeout=TIMEOUT_S) for service in ("noop", ""))
    assert (next(noop).status, next(server).status) == (SERVING, SERVING)
    oip.RepositoryModelUnload(oip_pb2.RepositoryModelUnloadRequest(model_name="noop"))
    assert next(noop).status == NOT_SERVING
    assert health.Check(asked("")).status == SERVING
    oip.RepositoryModelLoad(oip_pb2.RepositoryModelLoadRequest(model_name="noop"))
    assert next(noop).status == SERVING
    noop.cancel()
    server.cancel()


def test_an_unknown_service_can_be_watched(health: Any) -> None:
    watched = health.Watch(asked("nope"), timeout=TIMEOUT_S)
    assert next(watched).status == SERVICE_UNKNOWN
    watched.cancel()


def test_watchers_see_the_warm_up_and_the_shutdown(start_server: StartServer, brake: Brake) -> None:
    brake.pull()
    server = start_server(NOOP, env=brake.env, wait=False)
    with grpc.insecure_channel(server.grpc) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watched = {name: health.Watch(asked(name), timeout=TIMEOUT_S) for name in ("", "noop", "xlaserve.v1.Vision")}
        for watcher in watched.values():
            assert next(watcher).status == NOT_SERVING
        assert not oip_grpc.GRPCInferenceServiceStub(channel).ServerReady(oip_pb2.ServerReadyRequest()).ready
        assert not server.is_ready
        brake.release()
        for watcher in watched.values():
            assert next(watcher).status == SERVING
        server.process.terminate()
        for watcher in watched.values():
            assert next(watcher).status == NOT_SERVING
            with pytest.raises(grpc.RpcError):
                next(watcher)
    assert server.wait() == 0


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_bytes_that_are_no_message_are_refused_without_a_traceback(start_server: StartServer, method: str) -> None:
    server = start_server(NOOP)
    with grpc.insecure_channel(server.grpc) as channel:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
        call = ask(b"\xff\xff\xff", timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in server.stderr


def watch_without_reading(address: str) -> socket.socket:
    """Watches the server's health over HTTP/2 with a window of no bytes, so that nothing can be written to it."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    fields = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    settings, acknowledged = frame(4, 0, 0, struct.pack(">HI", 4, 0)), frame(4, 1, 0, b"")
    request = frame(1, 4, 1, fields) + frame(0, 1, 1, b"\x00" + struct.pack(">I", 0))
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + acknowledged + request)
    assert connection.recv(1)
    return connection


def test_a_watcher_that_never_reads_delays_neither_others_nor_shutdown(start_server: StartServer) -> None:
    server = start_server(NOOP)
    with watch_without_reading(server.grpc), grpc.insecure_channel(server.grpc) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        oip = oip_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(3):
            oip.RepositoryModelUnload(oip_pb2.RepositoryModelUnloadRequest(model_name="noop"), timeout=TIMEOUT_S)
            assert health.Check(asked(""), timeout=TIMEOUT_S).status == NOT_SERVING
            oip.RepositoryModelLoad(oip_pb2.RepositoryModelLoadRequest(model_name="noop"), timeout=TIMEOUT_S)
            assert health.Check(asked(""), timeout=TIMEOUT_S).status == SERVING
        server.process.terminate()
        assert server.wait() == 0


# Reflection.


def test_reflection_lists_and_describes_the_services(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {*SERVICES, REFLECTION, REFLECTION_V1}
    pool = DescriptorPool(database)
    inference = pool.FindServiceByName("inference.GRPCInferenceService")
    assert {method.name for method in inference.methods} >= {"ModelInfer", "ModelStreamInfer", "RepositoryIndex"}
    (predict,) = (one for one in pool.FindServiceByName(PREDICTION).methods if one.name == "Predict")
    assert set(predict.input_type.fields_by_name) == {"model_spec", "inputs", "output_filter"}
    request = pool.FindMessageTypeByName("xlaserve.v1.ClassifyRequest")
    assert list(request.fields_by_name) == ["model", "images", "top_k", "mode", "version", "pixels", "priority"]


def test_reflection_v1_answers_as_v1alpha_does(channel: grpc.Channel) -> None:
    def answers(service: str) -> list[bytes]:
        ask: Any = channel.stream_stream(f"/{service}/ServerReflectionInfo")
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=REFLECTION_V1),
            reflection_pb2.ServerReflectionRequest(file_by_filename="nope.proto"),
        ]
        return list(ask(iter([question.SerializeToString() for question in questions]), timeout=TIMEOUT_S))

    assert answers(REFLECTION_V1) == answers(REFLECTION)
    described = reflection_pb2.ServerReflectionResponse.FromString(answers(REFLECTION_V1)[2])
    assert b"grpc.reflection.v1" in described.file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"\x0a\xff", "the protobuf message"),
        (
            reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 60_000_000).SerializeToString(),
            "at most 16384",
        ),
    ],
)
def test_what_is_no_question_to_reflection_is_refused(start_server: StartServer, message: bytes, expected: str) -> None:
    server = start_server(NOOP)
    with grpc.insecure_channel(server.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        ask: Any = channel.stream_stream(f"/{REFLECTION}/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            next(ask(iter([message]), timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert expected in str(caught.value.details())
        server.wait_for(lambda: server.metric("xlaserve_in_flight_message_bytes") == 0, "messages stayed held")
    assert "ERROR" not in server.stderr
    assert "Traceback" not in server.stderr


def test_reflection_hides_when_asked_to(start_server: StartServer) -> None:
    # With every warning an error: none comes from how the libraries are used.
    server = start_server({**NOOP, "reflection": False}, env={"PYTHONWARNINGS": "error"})
    with grpc.insecure_channel(server.grpc) as channel:
        oip = oip_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(3):
            assert oip.ServerLive(oip_pb2.ServerLiveRequest()).live
        assert "ERROR" not in server.stderr
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.stop() == 0
    assert "Warning" not in server.stderr
