"""What names a request in its answer and in the log, over real sockets."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import grpc
import pytest
from tests.integration.conftest import NOOP, NoopClient, Server, StartServer

from xlaserve_client import VisionClient
from xlaserve_client.errors import ModelNotFound
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

Metadata = tuple[tuple[str, str], ...]

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
MADE = re.compile("[0-9a-f]{32}")
HTTP_INFER = "/v2/models/noop/infer"


@pytest.fixture(scope="module")
def logging_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that logs every request as JSON."""
    start = StartServer(tmp_path_factory)
    yield start({"models": [NOOP], "access_log": "all", "log_format": "json"})
    assert [server.stop() for server in start.started] == [0]


@pytest.fixture(scope="module")
def stub(logging_server: Server) -> Iterator[oip_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(logging_server.grpc) as channel:
        yield oip_grpc.GRPCInferenceServiceStub(channel)


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """Returns the only line about a request."""
    lines: list[dict[str, Any]] = []

    def found() -> bool:
        lines[:] = [
            line
            for line in map(json.loads, filter(lambda text: text.startswith("{"), server.stderr.splitlines()))
            if line.get("request_id") == request_id
        ]
        return bool(lines)

    server.wait_for(found, "no line", 10)
    (line,) = lines
    return line


def trailing(call: Any) -> dict[str, str]:
    return {key: value for key, value in call.trailing_metadata() if not key.startswith("grpc-")}


def test_an_answer_and_its_line_have_the_clients_id_and_trace(
    logging_server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    request = NoopClient.request(1, 2)
    request.id = "mine"
    metadata = (("x-request-id", "shop-17"), ("traceparent", PARENT))
    response, call = stub.ModelInfer.with_call(request, metadata=metadata)
    assert response.id == "mine"
    assert trailing(call) == {"x-request-id": "shop-17", "traceparent": PARENT}
    line = line_of(logging_server, "shop-17")
    assert (line["method"], line["model"], line["version"], line["status"]) == ("ModelInfer", "noop", "1", "OK")
    assert line["images"] == 2
    assert (line["caller"], line["level"], line["trace_id"]) == ("anybody", "info", PARENT.split("-")[1])
    assert line["total_s"] >= line["execute_s"] > 0


def test_an_answer_without_a_usable_id_has_one_that_was_made(
    logging_server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    wrong: Metadata = (("x-request-id", "two words"), ("traceparent", PARENT.upper()))
    for metadata in (None, wrong):
        _, call = stub.ModelInfer.with_call(NoopClient.request(1), metadata=metadata)
        (made,) = trailing(call).values()
        assert MADE.fullmatch(made)
        assert line_of(logging_server, made)["status"] == "OK"


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (pb.ModelInferRequest(model_name="cat status=OK"), "NOT_FOUND", "no model"),
        (pb.ModelInferRequest(model_name="noop", model_version="9"), "NOT_FOUND", "version"),
        (pb.ModelInferRequest(model_name="noop"), "INVALID_ARGUMENT", "inputs"),
    ],
)
def test_an_error_names_the_request_and_leaves_one_line(
    logging_server: Server,
    stub: oip_grpc.GRPCInferenceServiceStub,
    request_: pb.ModelInferRequest,
    status: str,
    reason: str,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request_)
    made = trailing(caught.value)["x-request-id"]
    line = line_of(logging_server, made)
    assert (line["status"], line["model"], line["method"]) == (status, request_.model_name, "ModelInfer")
    assert line.get("version") == (None if status == "NOT_FOUND" else "1")
    assert reason in line["reason"]
    assert line["level"] == "info"


def test_other_methods_that_fail_leave_a_line_too(
    logging_server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelMetadata(pb.ModelMetadataRequest(name="cat"))
    line = line_of(logging_server, trailing(caught.value)["x-request-id"])
    assert (line["method"], line["status"]) == ("ModelMetadata", "NOT_FOUND")


def test_a_message_of_a_stream_is_logged_with_its_id_and_the_streams(
    logging_server: Server, stub: oip_grpc.GRPCInferenceServiceStub
) -> None:
    good, bad = NoopClient.request(1), pb.ModelInferRequest(model_name="cat")
    good.id, bad.id = "good", "bad\n"
    call = stub.ModelStreamInfer(iter([good, bad]), metadata=(("x-request-id", "stream-1"),))
    assert [bool(response.error_message) for response in call] == [False, True]
    assert trailing(call) == {"x-request-id": "stream-1"}

    def lines() -> list[dict[str, Any]]:
        text = [line for line in logging_server.stderr.splitlines() if "stream-1" in line]
        return sorted(map(json.loads, text), key=lambda line: str(line["message_id"]))

    logging_server.wait_for(lambda: len(lines()) == 2, "no lines", 10)
    assert [(line["message_id"], line["status"]) for line in lines()] == [("bad\n", "NOT_FOUND"), ("good", "OK")]


@pytest.mark.parametrize(
    ("path", "status", "name"),
    [("/v2/health/live", 200, ""), (HTTP_INFER, 400, "INVALID_ARGUMENT"), ("/nowhere", 404, "NOT_FOUND")],
)
def test_http_answers_name_the_request(logging_server: Server, path: str, status: int, name: str) -> None:
    host, port = logging_server.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=10)
    try:
        verb = "POST" if path == HTTP_INFER else "GET"
        connection.request(verb, path, "{}", {"X-Request-Id": f"web{status}", "Traceparent": PARENT})
        response = connection.getresponse()
        response.read()
    finally:
        connection.close()
    assert response.status == status
    assert (response.headers["x-request-id"], response.headers["traceparent"]) == (f"web{status}", PARENT)
    if name:
        assert line_of(logging_server, f"web{status}")["status"] == name


def test_what_is_no_request_has_an_id_and_a_line(logging_server: Server) -> None:
    host, port = logging_server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x00 rubbish\r\n\r\n")
        answer = connection.makefile("rb").read().decode()
    found = re.search("x-request-id: ([0-9a-f]{32})\r\n", answer)
    assert found is not None
    assert line_of(logging_server, found[1])["status"] == "INVALID_ARGUMENT"


def test_our_client_sends_its_metadata_along(logging_server: Server) -> None:
    metadata = [("x-request-id", "of-the-client"), ("traceparent", PARENT)]
    with VisionClient(logging_server.grpc, metadata=metadata) as client, pytest.raises(ModelNotFound):
        client.classify(b"", model="cat")
    line = line_of(logging_server, "of-the-client")
    assert (line["method"], line["trace_id"]) == ("Classify", PARENT.split("-")[1])


def test_a_flood_of_refusals_fills_no_log(logging_server: Server, stub: oip_grpc.GRPCInferenceServiceStub) -> None:
    before = logging_server.stderr.count("flood")
    calls = [stub.ModelMetadata.future(pb.ModelMetadataRequest(name="flood")) for _ in range(1000)]
    for call in calls:
        assert NoopClient.outcome(call) is grpc.StatusCode.NOT_FOUND
    logging_server.wait_for(lambda: "left out the lines of" in logging_server.stderr, "nothing was left out", 30)
    assert logging_server.stderr.count("flood") - before < 300
