"""HTTP over real sockets: the same answers as over gRPC, every status, and how connections begin and end."""

from __future__ import annotations

import base64
import gzip
import json
import re
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import trustme
from tests.integration.conftest import BOUNDS, Brake, Connect, MakeRequest, NoopClient, Server, StartServer

from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
INFER = "/v2/models/digits/infer"
LENGTH = "inference-header-content-length"
TIMEOUT_S = 60.0
SCORES = 10


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def read(response: HTTPResponse) -> Reply:
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    host, port = server.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    try:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, fields)
        return read(connection.getresponse())
    finally:
        connection.close()


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        yield connection


def replies(connection: socket.socket, count: int) -> list[Reply]:
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            response = HTTPResponse(_Stream(stream))  # type: ignore[arg-type]
            response.begin()
            found.append(read(response))
    return found


class _Stream:
    """Gives several answers the same buffer."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def makefile(self, mode: str) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        pass


def binary_request(name: str, datatype: str, shape: list[int], raw: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + raw, {"inference_header_content_length": str(len(head))}


def scores_of(reply: Reply) -> Any:
    assert reply.status == 200, reply
    if length := reply.headers.get(LENGTH):
        head, raw = json.loads(reply.body[: int(length)]), reply.body[int(length) :]
        (output,) = head["outputs"]
        assert output["parameters"]["binary_data_size"] == len(raw)
        return np.frombuffer(raw, np.float32).reshape(output["shape"])
    (output,) = reply.json()["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def noop_body(level: int) -> tuple[bytes, dict[str, str]]:
    more = {"parameters": {"binary_data_output": True}}
    return binary_request("pixels", "UINT8", [1, 224, 224, 3], bytes([level]) * (224 * 224 * 3), **more)


def raw_request(level: int, **headers: str) -> bytes:
    body, fields = noop_body(level)
    fields = {"Host": "localhost", "Content-Length": str(len(body)), **fields, **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST /v2/models/noop/infer HTTP/1.1\r\n{lines}\r\n".encode() + body


def test_answers_are_those_of_grpc_however_an_image_is_sent(
    server: Server, oip: GRPCInferenceServiceStub, valid: MakeRequest, scans: dict[str, bytes]
) -> None:
    request = valid("image")
    request.parameters["mode"].string_param = "graph"
    expected = np.frombuffer(oip.ModelInfer(request, timeout=60).raw_output_contents[0], np.float32)
    png = scans["3"]
    text = base64.b64encode(png).decode()
    raw = struct.pack("<I", len(png)) + png
    mode = {"mode": "graph"}
    listed = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    found = [scores_of(ask(server, "POST", INFER, {"inputs": [listed], "parameters": mode}))]
    for output in (True, False):
        parameters = {**mode, "binary_data_output": output}
        body, headers = binary_request("image", "BYTES", [1], raw, parameters=parameters)
        found.append(scores_of(ask(server, "POST", INFER, body, **headers)))
        found.append(scores_of(ask(server, "POST", INFER, gzip.compress(body), content_encoding="gzip", **headers)))
        found.append(
            scores_of(ask(server, "POST", f"{INFER[:-6]}/versions/1/infer", iter([body[:99], body[99:]]), **headers))
        )
    for scores in found:
        np.testing.assert_allclose(scores.reshape(-1), expected, atol=1e-6)
    form = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + png + b"\r\n--B--\r\n"
    classify = "/v1/models/digits:classify?mode=graph&top_k=10"
    for reply in (
        ask(server, "POST", classify, form, content_type="multipart/form-data; boundary=B"),
        ask(server, "POST", classify, png, content_type="image/png"),
        ask(server, "POST", classify, {"image": text}, content_type="application/json"),
        ask(server, "POST", classify, {"images": [{"b64": text}]}, content_type="application/json"),
    ):
        (row,) = reply.json()["classifications"]
        scores = {category["index"]: category["score"] for category in row["categories"]}
        np.testing.assert_allclose([scores[index] for index in range(SCORES)], expected, atol=1e-6)
        assert reply.json()["model"] == "digits"


def test_an_answer_is_drawn_into_the_image_for_who_accepts_that_alone(server: Server, scans: dict[str, bytes]) -> None:
    path = "/v1/models/digits:classify"
    drawn = ask(server, "POST", path, scans["3"], accept="image/png")
    assert (drawn.status, drawn.headers["content-type"]) == (200, "image/png")
    assert drawn.body.startswith(b"\x89PNG")
    assert ask(server, "POST", path, scans["3"], accept="*/*").json()["classifications"]
    text = base64.b64encode(scans["3"]).decode()
    two = ask(server, "POST", path, {"images": [text, text]}, accept="image/png", content_type="application/json")
    assert (two.status, two.headers["content-type"]) == (400, "application/json")


def test_a_misspelt_option_is_ignored_and_named_in_a_warning(server: Server, scans: dict[str, bytes]) -> None:
    for path in ("/v1/models/digits:classify?topk=3", "/v1/models/digits:classify?toppings=3"):
        reply = ask(server, "POST", path, scans["3"])
        assert len(reply.json()["classifications"][0]["categories"]) == 5
        assert ("'topk'" in reply.headers.get("xlaserve-warning", "")) is ("topk" in path)


def test_every_endpoint_answers(server: Server) -> None:
    for path in (
        *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/digits", "/docs"),
        *("/v2/models/digits/ready", "/v2/models/digits/config", "/v2/models/digits/stats", "/openapi.json"),
        *("/v2/models/digits/versions/1", "/v2/models/digits/versions/1/ready", "/v2/models/digits/versions/1/stats"),
    ):
        got, head = ask(server, "GET", path), ask(server, "HEAD", path)
        assert (got.status, head.status) == (200, 200), path
        assert head.body == b""
        assert head.headers["content-type"] == got.headers["content-type"]
    assert {one["name"] for one in ask(server, "POST", "/v2/repository/index").json()} == {"digits", "noop", "broken"}
    assert {one["name"] for one in ask(server, "POST", "/v2/repository/index", {"ready": True}).json()} == {
        "digits",
        "noop",
    }


def test_models_are_loaded_and_unloaded_but_not_by_web_pages(server: Server) -> None:
    path = "/v2/repository/models/noop/"
    refused = ask(server, "POST", f"{path}unload", origin="http://example.org")
    assert (refused.status, ask(server, "GET", "/v2/models/noop/ready").status) == (400, 200)
    body = {"parameters": {"unload_dependents": False}}
    try:
        assert ask(server, "POST", f"{path}unload", body).status == 200
        assert ask(server, "GET", "/v2/models/noop/ready").status == 503
        assert ask(server, "POST", "/v2/models/noop/infer", noop_body(1)[0]).status == 503
    finally:
        assert ask(server, "POST", f"{path}load").status == 200
    assert ask(server, "GET", "/v2/models/noop/ready").status == 200


def test_an_image_is_not_answered_by_another_version_than_its_options_name(
    server: Server, scans: dict[str, bytes]
) -> None:
    path, image = "/v1/models/digits:classify", base64.b64encode(scans["3"]).decode()
    assert ask(server, "POST", f"{path}?version=1", scans["3"]).status == 200
    for reply in (
        ask(server, "POST", f"{path}?version=9", scans["3"]),
        ask(server, "POST", path, json.dumps({"image": image, "version": "canary"}).encode()),
        ask(server, "POST", path, json.dumps({"image": image, "version": 9}).encode()),
    ):
        assert reply.status == 400
        assert reply.json()["error"].startswith("version: expected ")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", INFER, b"{", 400),
        ("POST", INFER, b"", 400),
        ("POST", "/v1/models/digits:classify", b"no image", 400),
        ("POST", "/v1/models/digits:classify", b"", 400),
        ("POST", "/v1/models/digits:detect", b"x", 400),
        ("GET", "/nope", None, 404),
        ("GET", "/v2/models/%00%ff%2e%2e", None, 404),
        ("GET", "/v2/health/live%0a", None, 404),
        ("GET", "/v2/models/digits%2Fconfig", None, 404),
        ("GET", "/v2/models/" + "a" * 10_000, None, 404),
        ("GET", "/../../etc/passwd", None, 404),
        ("POST", "/v2/models/nope/infer", b"{}", 404),
        ("POST", "/v1/models/digits:clasify", b"", 404),
        ("GET", "/v1/models/digits/versions/1:clasify", None, 404),
        ("POST", "/v2/models/digits/versions/9/infer", b"{}", 404),
        ("GET", INFER, None, 405),
        ("DELETE", "/v2", None, 405),
        ("OPTIONS", "/v2", None, 405),
        ("POST", "/v2/models/broken/infer", b"{}", 503),
        ("GET", "/v2/models/broken", None, 503),
        ("POST", INFER, b'{"inputs": [], "parameters": {"sequence_id": 1}}', 501),
    ],
)
def test_what_is_refused_has_its_status_and_says_why(
    server: Server, method: str, path: str, body: bytes | None, status: int
) -> None:
    reply = ask(server, method, path, body)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert 0 < len(error) < 900
    assert "/nonexistent" not in error
    assert ("allow" in reply.headers) == (status == 405)


def test_a_misspelt_method_is_answered_with_those_that_there_are(server: Server) -> None:
    error = ask(server, "POST", "/v1/models/digits:clasify", b"").json()["error"]
    known = "predict, classify, detect, segment, embed, transcribe, locate, transform, regress"
    assert error == f"path: expected one of {known} after the colon, got 'clasify'"


def test_an_unknown_path_is_answered_with_those_that_there_are(server: Server) -> None:
    reply = ask(server, "GET", "/v1/models")
    known = (
        "/, /docs, /metrics, /v1/models/{model}, /v1/status, /v2, /v2/health/live, /v2/health/ready, "
        "/v2/models/stats, /v2/models/{model}, /v2/repository/index"
    )
    assert (reply.status, reply.json()["error"]) == (404, f"path: expected one that /docs lists, such as {known}")


def test_a_body_may_have_a_size_and_a_deadline(server: Server) -> None:
    for headers in ({}, {"expect": "100-continue"}):
        with connected(server) as connection:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            connection.sendall(
                f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777217\r\n{lines}\r\n".encode()
            )
            assert replies(connection, 1)[0].status == 413
    with connected(server) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        answered = threading.Thread(target=_send_chunks, args=(connection,))
        answered.start()
        assert replies(connection, 1)[0].status == 413
        connection.shutdown(socket.SHUT_RDWR)
        answered.join()
    bomb = gzip.compress(bytes(100_000_000))
    assert ask(server, "POST", INFER, bomb, content_encoding="gzip").status == 413
    late = {"inputs": [{"name": "pixels", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [0] * 3072}]}
    assert ask(server, "POST", INFER, {**late, "parameters": {"timeout": 1}}).status == 504


def _send_chunks(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(b"100000\r\n" + bytes(2**20) + b"\r\n")
    except OSError:
        pass


def test_metrics_count_requests_by_http(server: Server, scans: dict[str, bytes]) -> None:
    def count(method: str) -> float:
        return server.metric("xlaserve_requests_total", method=method)

    before = {method: count(method) for method in ("infer", "classify", "unknown")}
    ask(server, "POST", "/v1/models/digits:classify", scans["3"])
    ask(server, "POST", INFER, b"{")
    ask(server, "GET", "/nope")
    after = {method: count(method) for method in before}
    assert {method: after[method] - before[method] for method in ("infer", "classify")} == {"infer": 1, "classify": 1}


def test_one_connection_serves_many_and_pipelined_requests(server: Server) -> None:
    with connected(server) as connection:
        for level in range(3):
            connection.sendall(raw_request(level))
            assert scores_of(replies(connection, 1)[0])[0, 0] == level
        connection.sendall(b"".join(map(raw_request, range(8))))
        assert [scores_of(reply)[0, 0] for reply in replies(connection, 8)] == [*range(8)]
        connection.sendall(raw_request(9, Expect="100-continue"))
        connection_text = connection.recv(25, socket.MSG_WAITALL)
        assert connection_text in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ndate: ")
        connection.sendall(raw_request(3, Connection="close"))
        while connection.recv(65536):
            pass


@pytest.fixture
def braked(start_server: StartServer, brake: Brake) -> Server:
    return start_server({"models": [NOOP], "max_queue_images": 6}, env=brake.env)


def wait_for_images(server: Server, images: int) -> None:
    server.wait_for(lambda: server.metric("xlaserve_in_flight_images") == images, f"never {images} in flight")


@pytest.mark.parametrize("resets", [True, False])
def test_a_client_that_goes_cancels_its_request(braked: Server, brake: Brake, resets: bool) -> None:
    brake.pull()
    with connected(braked) as first, connected(braked) as gone, connected(braked) as other:
        first.sendall(raw_request(1))
        wait_for_images(braked, 1)
        gone.sendall(raw_request(2))
        other.sendall(raw_request(3))
        wait_for_images(braked, 3)
        if resets:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        wait_for_images(braked, 2)
        brake.release()
        assert [scores_of(replies(each, 1)[0])[0, 0] for each in (first, other)] == [1, 3]
    assert braked.metric("xlaserve_requests_total", method="infer", status="CANCELLED") == 1


def test_a_full_queue_says_when_to_come_back(braked: Server, brake: Brake) -> None:
    brake.pull()
    with connected(braked) as connection, connected(braked) as late:
        connection.sendall(b"".join(raw_request(1) for _ in range(1)))
        others = [socket.create_connection(connection.getpeername(), timeout=TIMEOUT_S) for _ in range(5)]
        for each in others:
            each.sendall(raw_request(2))
        wait_for_images(braked, 6)
        late.sendall(raw_request(3))
        (reply,) = replies(late, 1)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        brake.release()
        for each in (connection, *others):
            assert replies(each, 1)[0].status == 200
            each.close()


def test_a_server_that_stops_answers_what_it_accepted_and_refuses_the_rest(braked: Server, brake: Brake) -> None:
    brake.pull()
    with connected(braked) as accepted, connected(braked) as late, connected(braked) as idle:
        accepted.sendall(raw_request(1))
        wait_for_images(braked, 1)
        braked.process.send_signal(signal.SIGTERM)
        braked.wait_for(lambda: "draining" in braked.stderr, "it did not drain")
        assert ask(braked, "GET", "/v2/health/ready").status == 503
        late.sendall(raw_request(2))
        (refused,) = replies(late, 1)
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert late.recv(1) == b""
        with connected(braked) as new:
            new.sendall(raw_request(3))
            assert replies(new, 1)[0].status == 503
        brake.release()
        assert scores_of(replies(accepted, 1)[0])[0, 0] == 1
        assert idle.recv(1) == b""
    assert braked.wait() == 0
    assert "ERROR" not in braked.stderr


def test_no_request_is_lost_while_clients_keep_asking_and_the_server_stops(start_server: StartServer) -> None:
    server = start_server({"models": [NOOP]})
    ended: list[str] = []

    def keep_asking() -> None:
        with connected(server) as connection:
            while True:
                connection.sendall(raw_request(7))
                (reply,) = replies(connection, 1)
                if reply.status == 503:
                    ended.append("refused")
                    return
                if scores_of(reply)[0, 0] != 7:
                    ended.append("wrong")
                    return

    def guarded() -> None:
        try:
            keep_asking()
        except Exception as error:
            ended.append(repr(error))

    threads = [threading.Thread(target=guarded) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert server.stop() == 0
    for thread in threads:
        thread.join()
    assert ended == ["refused"] * len(threads)
    assert "ERROR" not in server.stderr


def from_address(server: Server, address: str) -> socket.socket:
    """Connects from one of loopback's addresses."""
    host, port = server.http.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S, source_address=(address, 0))


@pytest.mark.parametrize("has_tls", [False, True])
def test_one_address_can_not_have_all_connections(start_server: StartServer, tmp_path: Path, has_tls: bool) -> None:
    config: dict[str, Any] = {"models": [NOOP], "max_connections": 8, "max_connections_per_address": 3}
    authority = trustme.CA()
    if has_tls:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(tmp_path / "key.pem")
        issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        config |= {"tls_key": str(tmp_path / "key.pem"), "tls_certificate": str(tmp_path / "cert.pem")}
    server = start_server(config)

    def closed(connection: socket.socket) -> bool:
        connection.settimeout(0.05)
        try:
            return not connection.recv(1)
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    with ExitStack() as stack:
        held = [stack.enter_context(from_address(server, "127.0.0.2")) for _ in range(20)]
        for connection in () if has_tls else held:
            connection.sendall(b"POST /v1/models/noop:embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
        server.wait_for(lambda: sum(map(closed, held)) == 20 - 3 * BOUNDS, "not 3 of 20 were open", timeout_s=TIMEOUT_S)
        other = stack.enter_context(from_address(server, "127.0.0.3"))
        if has_tls:
            context = ssl.create_default_context()
            authority.configure_trust(context)
            other = stack.enter_context(context.wrap_socket(other, server_hostname="127.0.0.1"))
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert replies(other, 1)[0].status == 200


def test_one_address_can_not_have_all_connections_of_grpc(start_server: StartServer, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "max_connections": 64, "max_connections_per_address": 20})
    host, port = server.grpc.rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(50):
            connected = socket.create_connection((host, int(port)), timeout=TIMEOUT_S, source_address=("127.0.0.2", 0))
            stack.enter_context(connected).sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        open_ = 0

        def is_bounded() -> bool:
            nonlocal open_
            of_each = [
                sum(one.raddr.ip.endswith("127.0.0.2") for one in each) for each in server.connections(server.grpc)
            ]
            open_ = sum(of_each)
            return max(of_each) == 20 and open_ <= 20 * BOUNDS

        server.wait_for(is_bounded, "it held more connections than it may", timeout_s=TIMEOUT_S)
        assert connect(server).ask(3) is grpc.StatusCode.OK

    def closed() -> int:
        told = re.findall(r"closed (\d+) connections: max_connections_per_address is 20", server.stderr)
        return sum(map(int, told))

    server.wait_for(lambda: closed() == 50 - open_, "not all that were closed were told of", timeout_s=TIMEOUT_S)


def test_one_address_can_not_have_all_calls(start_server: StartServer, brake: Brake, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "max_calls_per_address": 2}, env=brake.env)
    client = connect(server)
    brake.pull()
    with from_address(server, "127.0.0.2") as other, connected(server) as mine:
        held = client.send(1)
        mine.sendall(raw_request(2))
        wait_for_images(server, 2)
        with pytest.raises(grpc.RpcError) as refused:
            client.stub.ModelInfer(client.request(3), timeout=TIMEOUT_S)
        assert "max_calls_per_address: expected at most 2 calls" in str(refused.value)
        assert ask(server, "POST", "/v2/models/noop/infer", noop_body(4)[0]).status == 429
        other.sendall(raw_request(5))
        wait_for_images(server, 3)
        assert ask(server, "GET", "/v2/health/live").status == 200
        brake.release()
        assert client.outcome(held, 1) is grpc.StatusCode.OK
        assert [scores_of(replies(each, 1)[0])[0, 0] for each in (mine, other)] == [2, 5]
    assert client.ask(6) is grpc.StatusCode.OK


def test_connections_are_bounded_and_idle_ones_give_way(start_server: StartServer, connect: Connect) -> None:
    server = start_server({"models": [NOOP], "max_connections": 8})
    client: NoopClient = connect(server)
    host, port = server.http.rsplit(":", 1)
    held = [socket.create_connection((host, int(port)), timeout=TIMEOUT_S) for _ in range(50)]
    try:
        assert ask(server, "GET", "/v2/health/live").status == 200
        client.ask(3)

        def is_bounded() -> bool:
            of_each = [*map(len, server.connections(server.http))]
            return 0 < max(of_each) <= 8 and sum(of_each) <= 8 * BOUNDS

        server.wait_for(is_bounded, "it held more connections than it may")
    finally:
        for each in held:
            each.close()
