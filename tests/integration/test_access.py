"""TLS, and callers with and without rights, over real connections to both ports."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.integration.conftest import BOUNDS, NoopClient, Server, StartServer

from xlaserve_client import VisionClient, errors
from xlaserve_client.aio import AsyncVisionClient
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

MINE, THEIRS, NONE = "noop", "other", "nonesuch"
CHANGE_S = 10.0
"""Files are looked at every 2 s."""
REFUSED = re.compile("authentication required")


def model(name: str) -> dict[str, Any]:
    return {"name": name, "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2]}


PIXELS = 224 * 224 * 3
KEYS = {name: f"xla_key-of-{name}" for name in ("shop", "ops", "root", "gone")}
ROLES: dict[str, dict[str, Any]] = {
    "shop": {"roles": ["infer"], "models": [MINE]},
    "ops": {"roles": ["observe"]},
    "root": {"roles": ["infer", "observe", "admin"]},
    "gone": {"roles": ["infer"]},
}


class Place:
    """A folder with the certificates and the access file of a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority, self.clients = trustme.CA(), trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.clients.cert_pem.write_to_path(folder / "clients.pem")
        self.issue()
        self.allow(*KEYS)

    def issue(self) -> None:
        """Makes the server a new certificate."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1")
        for name, data in (
            ("key.pem", issued.private_key_pem.bytes()),
            ("cert.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
        ):
            (self.folder / "partial").write_bytes(data)
            (self.folder / "partial").replace(self.folder / name)

    def allow(self, *names: str) -> None:
        """Writes the access file for callers with these keys, and for one with a certificate."""
        callers: list[dict[str, Any]] = [
            {"name": name, "key_sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **ROLES[name]}
            for name in names
        ]
        callers.append({"name": "certified", "certificate": "ops.example.com", "roles": ["infer"], "models": [MINE]})
        (self.folder / "partial").write_text(json.dumps({"callers": callers}))
        (self.folder / "partial").replace(self.folder / "access.yaml")

    def own(
        self,
        *names: str,
        common_name: str | None = None,
        authority: trustme.CA | None = None,
        until: datetime | None = None,
    ) -> tuple[Path, Path]:
        """Returns the files of a client's key and certificate, which expires then."""
        issued = (authority or self.clients).issue_cert(
            *names, common_name=common_name, not_before=until and datetime(2000, 1, 1), not_after=until
        )
        key, certificate = self.folder / "own-key.pem", self.folder / "own.pem"
        issued.private_key_pem.write_to_path(key)
        certificate.write_bytes(issued.cert_chain_pems[0].bytes())
        return key, certificate

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "models": [model(MINE), model(THEIRS)],
            "tls_certificate": str(self.folder / "cert.pem"),
            "tls_key": str(self.folder / "key.pem"),
            "access": str(self.folder / "access.yaml"),
            "log_level": "debug",
            "admin": True,
            "shared_memory": True,
            **more,
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def locked(place: Place, start_module_server: StartServer) -> Server:
    return start_module_server(place.config())


@pytest.fixture(scope="module")
def silent(locked: Server) -> list[socket.socket]:
    """Connections that begin a handshake at most: the first tests begin them, since they take 10 s to end."""
    silent = []
    for address in (locked.grpc, locked.http):
        host, port = address.rsplit(":", 1)
        for begun in (b"", b"\x16\x03\x01"):
            raw = socket.create_connection((host, int(port)), timeout=30)
            raw.sendall(begun)
            silent.append(raw)
    return silent


@pytest.fixture(scope="module")
def mutual(place: Place, start_module_server: StartServer) -> Server:
    return start_module_server(place.config(tls_client_ca=str(place.folder / "clients.pem")))


def credentials(place: Place, own: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    files = [path.read_bytes() for path in own or ()]
    return grpc.ssl_channel_credentials(place.ca.read_bytes(), *files)


def secured(place: Place, server: Server, own: tuple[Path, Path] | None = None) -> grpc.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(server.grpc, credentials(place, own), options)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (*bearer(name).items(),)


def tls(place: Place, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(place.ca))
    if own:
        context.load_cert_chain(own[1], own[0])
    return context


def http(
    place: Place,
    server: Server,
    path: str,
    headers: dict[str, str] | None = None,
    *,
    own: tuple[Path, Path] | None = None,
    body: bytes | None = None,
    verb: str | None = None,
) -> tuple[int, str]:
    host, port = server.http.rsplit(":", 1)
    connection = HTTPSConnection(host, int(port), timeout=30, context=tls(place, own))
    try:
        connection.request(verb or ("GET" if body is None else "POST"), path, body, headers or {})
        answer: HTTPResponse = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def infer_json(model: str) -> tuple[str, bytes]:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, 224, 224, 3], "data": [7] * (224 * 224 * 3)}
    return f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode()


def request_for(model: str) -> pb.ModelInferRequest:
    request = NoopClient.request(7)
    request.model_name = model
    return request


def status_of(call: Callable[..., object], *arguments: object, **options: object) -> tuple[str, str]:
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code().name, error.details() or ""
    return "OK", ""


# With a key.


@pytest.mark.usefixtures("silent")
def test_clients_with_a_key_are_answered_over_tls(place: Place, locked: Server, scans: dict[str, bytes]) -> None:
    with VisionClient(locked.grpc, credentials=credentials(place), token=KEYS["shop"]) as client:
        assert client.classify(scans["3"], model=MINE).classifications
        assert [one.name for one in client.models()] == [MINE]

    async def ask() -> None:
        async with AsyncVisionClient(locked.grpc, credentials=credentials(place), token=KEYS["shop"]) as client:
            assert (await client.classify(scans["3"], model=MINE)).classifications
            with pytest.raises(errors.PermissionDenied):
                await client.classify(scans["3"], model=THEIRS)

    asyncio.run(ask())
    path, body = infer_json(MINE)
    assert http(place, locked, path, bearer("shop"), body=body)[0] == 200
    assert http(place, locked, path, {"x-api-key": KEYS["shop"]}, body=body)[0] == 200


def test_without_a_key_or_with_a_wrong_one_all_clients_are_refused(place: Place, locked: Server) -> None:
    for token in (None, "xla_wrong"):
        with (
            VisionClient(locked.grpc, credentials=credentials(place), token=token) as client,
            pytest.raises(errors.Unauthenticated, match=REFUSED),
        ):
            client.models()
    path, body = infer_json(MINE)
    for headers in ({}, {"authorization": "Bearer xla_wrong"}, {"authorization": "Basic eDp5"}, {"x-api-key": "x"}):
        status, text = http(place, locked, path, headers, body=body)
        assert (status, bool(REFUSED.search(text))) == (401, True)


def test_health_answers_everybody_and_names_no_model(place: Place, locked: Server) -> None:
    assert http(place, locked, "/v2/health/live")[0] == http(place, locked, "/v2/health/ready")[0] == 200
    with secured(place, locked) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        answers = {
            name: status_of(health.Check, health_pb2.HealthCheckRequest(service=name)) for name in (MINE, THEIRS, NONE)
        }
        assert {*answers.values()} == {("NOT_FOUND", "no such service")}
        asked = health_pb2.HealthListRequest()  # type: ignore[attr-defined] # the published types lack it
        for caller, seen in ((None, set()), ("shop", {MINE}), ("root", {MINE, THEIRS})):
            listed = health.List(asked, metadata=metadata(caller) if caller else None)
            assert {*listed.statuses} & {MINE, THEIRS} == seen
            assert listed.statuses[""].status == health_pb2.HealthCheckResponse.SERVING
        mine = health_pb2.HealthCheckRequest(service=MINE)
        assert health.Check(mine, metadata=metadata("shop")).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(mine, timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_whether_a_model_exists_is_not_told_to_those_who_may_not_use_it(place: Place, locked: Server) -> None:
    with secured(place, locked) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)

        def told(name: str, caller: str) -> list[tuple[str, str]]:
            of = metadata(caller)
            return [
                status_of(stub.ModelInfer, request_for(name), metadata=of),
                status_of(stub.ModelReady, pb.ModelReadyRequest(name=name), metadata=of),
                status_of(stub.ModelMetadata, pb.ModelMetadataRequest(name=name), metadata=of),
                status_of(stub.ModelConfig, pb.ModelConfigRequest(name=name), metadata=of),
                status_of(stub.ModelStatistics, pb.ModelStatisticsRequest(name=name), metadata=of),
                status_of(
                    lambda: stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), metadata=of)
                ),
            ]

        assert told(THEIRS, "shop") == told(NONE, "shop")
        assert {status for status, _ in told(THEIRS, "shop")} == {"PERMISSION_DENIED"}
        assert {status for status, _ in told(MINE, "shop")[:4]} == {"OK"}

        def seconds(name: str) -> float:
            began = time.perf_counter()
            status_of(stub.ModelReady, pb.ModelReadyRequest(name=name), metadata=metadata("shop"))
            return time.perf_counter() - began

        taken = [(seconds(THEIRS), seconds(NONE)) for _ in range(100)]
        theirs, none = (median(times) for times in zip(*taken, strict=True))
        assert 1 / 3 < theirs / none < 3

        response = next(stub.ModelStreamInfer(iter([request_for(THEIRS)]), metadata=metadata("shop")))
        assert response.error_message == "PERMISSION_DENIED: this caller may not use that model"
    for path, body in (
        ("/v2/models/{}", None),
        ("/v2/models/{}/ready", None),
        ("/v2/models/{}/config", None),
        ("/v2/models/{}/infer", b"{}"),
        ("/v1/models/{}:classify", b"{}"),
        ("/v2/repository/models/{}/load", b""),
    ):
        answers = [http(place, locked, path.format(name), bearer("shop"), body=body) for name in (THEIRS, NONE)]
        assert answers[0] == answers[1]
        assert answers[0][0] == 403


def test_shared_memory_is_its_caller_s_alone(place: Place, locked: Server) -> None:
    file = Path("/dev/shm") / f"xlaserve-test-access-{os.getpid()}"
    file.write_bytes(b"\x09" * PIXELS)
    request = request_for(MINE)
    request.ClearField("raw_input_contents")
    parameters = request.inputs[0].parameters
    parameters["shared_memory_region"].string_param = "own"
    parameters["shared_memory_byte_size"].int64_param = PIXELS
    region = pb.SystemSharedMemoryRegisterRequest(name="own", key=f"/{file.name}", byte_size=PIXELS)
    try:
        with secured(place, locked) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            stub.SystemSharedMemoryRegister(region, metadata=metadata("root"))
            assert status_of(stub.ModelInfer, request, metadata=metadata("root"))[0] == "OK"
            assert status_of(stub.ModelInfer, request, metadata=metadata("shop"))[0] == "NOT_FOUND"
            output = request_for(MINE)
            parameters = output.outputs.add(name="first_pixels").parameters
            parameters["shared_memory_region"].string_param = "own"
            parameters["shared_memory_byte_size"].int64_param = PIXELS
            assert status_of(stub.ModelInfer, output, metadata=metadata("shop"))[0] == "NOT_FOUND"
            assert file.read_bytes() == b"\x09" * PIXELS
    finally:
        file.unlink()


def test_lists_show_the_models_that_one_may_use(place: Place, locked: Server) -> None:
    with secured(place, locked) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        for caller, names in (("shop", [MINE]), ("ops", [MINE, THEIRS])):
            index = stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata(caller))
            assert [one.name for one in index.models] == names
            status, text = http(place, locked, "/v2/repository/index", bearer(caller), body=b"{}")
            assert (status, [one["name"] for one in json.loads(text)]) == (200, names)
        found = stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=metadata("ops"))
        assert [one.name for one in found.model_stats] == [MINE, THEIRS]


def test_what_is_refused_changes_nothing_that_is_counted_of_a_model(place: Place, locked: Server) -> None:
    def failed() -> float:
        return sum(locked.metric("xlaserve_requests_total", model=THEIRS, status=s) for s in ("PERMISSION_DENIED",))

    path, body = infer_json(THEIRS)
    refused = locked.metric("xlaserve_requests_total", model="", status="PERMISSION_DENIED")
    assert http(place, locked, path, bearer("shop"), body=body)[0] == 403
    assert failed() == 0
    assert locked.metric("xlaserve_requests_total", model="", status="PERMISSION_DENIED") > refused


def test_reflection_asks_who_calls(place: Place, locked: Server) -> None:
    with secured(place, locked) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        def listed(of: tuple[tuple[str, str], ...]) -> object:
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            return next(stub.ServerReflectionInfo(iter([asked]), metadata=of, timeout=30))

        assert status_of(listed, ())[0] == "UNAUTHENTICATED"
        assert status_of(listed, metadata("shop"))[0] == "OK"


def test_metrics_on_the_port_of_http_are_for_observers(place: Place, locked: Server) -> None:
    told = [http(place, locked, "/metrics", headers) for headers in ({}, bearer("shop"), bearer("ops"))]
    assert [status for status, _ in told] == [401, 403, 200]
    assert "xlaserve_ready 1.0" in told[2][1]


def test_callers_are_not_mixed_up_among_calls_at_the_same_time(place: Place, locked: Server) -> None:
    with secured(place, locked) as channel, ThreadPoolExecutor(16) as pool:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        expected = {("shop", MINE): "OK", ("shop", THEIRS): "PERMISSION_DENIED", ("root", THEIRS): "OK"}
        expected |= {("ops", MINE): "PERMISSION_DENIED"}

        def told(caller: str, name: str) -> tuple[tuple[str, str], str]:
            call = status_of(stub.ModelInfer, request_for(name), metadata=metadata(caller))
            return (caller, name), call[0]

        calls = [*expected] * 25
        assert [*pool.map(lambda pair: told(*pair), calls)] == [(pair, expected[pair]) for pair in calls]


def test_what_administrators_do_and_are_refused_is_in_the_log(place: Place, locked: Server) -> None:
    with secured(place, locked) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=THEIRS), metadata=metadata("root"))
        forged = pb.RepositoryModelUnloadRequest(model_name="x by root: OK\n12:00:00 INFO  audit: unload y")
        assert status_of(stub.RepositoryModelUnload, forged, metadata=metadata("root"))[0] == "NOT_FOUND"
        status_of(stub.RepositoryModelUnload, forged, metadata=metadata("shop"))
        status_of(stub.SystemSharedMemoryRegister, pb.SystemSharedMemoryRegisterRequest(), metadata=metadata("root"))
    assert http(place, locked, f"/v2/repository/models/{NONE}/load", bearer("root"), body=b"")[0] == 404
    assert http(place, locked, f"/v2/repository/models/{THEIRS}/load", bearer("ops"), body=b"")[0] == 403
    assert http(place, locked, f"/v2/repository/models/{THEIRS}/load", body=b"")[0] == 401
    line = r"^[\d:]{8} (?:INFO|WARN)  ?(?:\[front \d\] )?audit: (.*) \[request [0-9a-f]{32}\]$"
    lines = re.findall(line, locked.stderr, re.MULTILINE)
    assert {"RepositoryModelUnload by shop: PERMISSION_DENIED", "load by ops: PERMISSION_DENIED"} <= {*lines}
    assert "load by stranger: UNAUTHENTICATED" in lines
    assert any(line.startswith("register") and line.endswith("by root: INVALID_ARGUMENT") for line in lines)
    assert f"load {THEIRS} by root: OK" in lines
    assert f"load {NONE} by root: NOT_FOUND" in lines
    assert sum("unload" in line for line in lines) == 1


def test_commands_of_the_server_and_the_client_and_loadtest_say_who_calls(
    place: Place, locked: Server, scans: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "three.png").write_bytes(scans["3"])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("XLASERVE_")}
    as_shop = {**inherited, "XLASERVE_TOKEN": KEYS["shop"], "XLASERVE_CA": str(place.ca)}

    def run(*words: str, env: dict[str, str] = as_shop) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    target = ("--tls-ca", str(place.ca), "--target", locked.grpc)
    commands = {
        "client": ("xlaserve_client", "classify", *target, MINE, "three.png"),
        "server": ("xlaserve", "ledger", "--target", locked.grpc),
    }
    for name, command in commands.items():
        status, said = run(*command)
        assert status == 0, (name, said)
        for wrong in ("xla_wrong", ""):
            status, said = run(*command, env={**as_shop, "XLASERVE_TOKEN": wrong})
            assert status == 1
            assert REFUSED.search(said), said
        status, said = run(*command, env={**as_shop, "XLASERVE_TOKEN": "secret\nkey"})
        assert (status, "secret" in said, "Traceback" in said) == (1, False, False), said
    header = f"authorization=Bearer {KEYS['shop']}"
    options = ("--model", MINE, "--duration", "1")
    status, said = run("xlaserve_loadtest", *target, "--header", header, *options)
    assert status == 0, said
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert KEYS["shop"] not in written + said


def test_no_secret_is_in_the_log_or_in_what_is_shown(place: Place, locked: Server) -> None:
    for path in ("/docs", "/openapi.json", "/metrics", "/v2"):
        text = http(place, locked, path, bearer("root"))[1]
        assert not any(key in text for key in KEYS.values())
    shown = subprocess.run(
        [sys.executable, "-m", "xlaserve", "config", "--show", "--config", str(locked.config_file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for name, key in KEYS.items():
        for secret in (key, hashlib.sha256(key.encode()).hexdigest()):
            assert secret not in locked.stderr + shown, name
    assert "PRIVATE KEY" not in locked.stderr + shown
    assert "Traceback" not in locked.stderr


# Certificates.


def test_clients_of_a_server_that_asks_for_certificates_need_one(place: Place, mutual: Server) -> None:
    own, strange = place.own("ops.example.com"), trustme.CA()
    with secured(place, mutual, own) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(request_for(MINE)).model_name == MINE
        assert status_of(stub.ModelInfer, request_for(THEIRS))[0] == "PERMISSION_DENIED"
        assert status_of(stub.ModelInfer, request_for(THEIRS), metadata=metadata("root"))[0] == "OK"
        assert next(stub.ModelStreamInfer(iter([request_for(MINE)]))).infer_response.model_name == MINE
    path, body = infer_json(MINE)
    assert http(place, mutual, path, own=own, body=body)[0] == 200
    assert http(place, mutual, infer_json(THEIRS)[0], own=own, body=body)[0] == 403

    for common_name in (None, "ops.example.com\0.evil", "ops.example.com\n", "ops.example.com"):
        own = place.own("unknown.example.com", common_name=common_name)
        expected = ("OK", 200) if common_name == "ops.example.com" else ("UNAUTHENTICATED", 401)
        with secured(place, mutual, own) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            assert status_of(stub.ModelInfer, request_for(MINE))[0] == expected[0]
            assert status_of(next, stub.ModelStreamInfer(iter([request_for(MINE)])))[0] == expected[0]
        assert http(place, mutual, path, own=own, body=body)[0] == expected[1]

    for other in (None, place.own("ops.example.com", authority=strange)):
        with secured(place, mutual, other) as channel:
            stub = oip_grpc.GRPCInferenceServiceStub(channel)
            told = status_of(stub.ServerLive, pb.ServerLiveRequest(), metadata=metadata("root"))
            assert told[0] == "UNAVAILABLE"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            http(place, mutual, "/v2/health/live", bearer("root"), own=other)


def test_a_client_whose_certificate_has_expired_is_refused(place: Place, mutual: Server) -> None:
    expired = place.own("ops.example.com", until=datetime(2001, 1, 1))
    with secured(place, mutual, expired) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert status_of(stub.ServerLive, pb.ServerLiveRequest())[0] == "UNAVAILABLE"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        http(place, mutual, "/v2/health/live", own=expired)


def handshake(
    place: Place, address: str, own: tuple[Path, Path], version: ssl.TLSVersion
) -> Callable[[ssl.SSLSession | None], tuple[bool, ssl.SSLSession | None]]:
    """Returns what connects with a session; it tells whether that was resumed, and the next one."""
    host, port = address.rsplit(":", 1)
    context = tls(place, own)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.maximum_version = version

    def shake(session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
        with (
            socket.create_connection((host, int(port)), timeout=30) as raw,
            context.wrap_socket(raw, server_hostname="localhost", session=session) as connection,
        ):
            is_http2 = connection.selected_alpn_protocol() == "h2"
            settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
            connection.sendall(settings if is_http2 else b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100)  # tickets of TLS 1.3 come with the first answer
            return connection.session_reused is True, connection.session

    return shake


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("port", ["grpc", "http"])
def test_no_session_is_resumed_where_clients_show_certificates(
    place: Place, mutual: Server, port: str, version: ssl.TLSVersion
) -> None:
    shake = handshake(place, getattr(mutual, port), place.own("ops.example.com"), version)
    _, session = shake(None)
    assert shake(session)[0] is False


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("port", ["grpc", "http"])
def test_tls_is_not_negotiated_again(place: Place, locked: Server, port: str) -> None:
    command = ("openssl", "s_client", "-tls1_2", "-alpn", "h2,http/1.1", "-connect", getattr(locked, port))
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert client.stdin is not None
    assert client.stdout is not None
    said = b""
    while b"Extended master secret" not in said:  # the handshake is done
        part = client.stdout.readline()
        assert part, said
        said += part
    client.stdin.write(b"R\n")
    client.stdin.flush()
    rest, _ = client.communicate(timeout=30)  # ends by itself: the server refuses, or hangs up
    assert b"RENEGOTIATING" in rest
    assert client.returncode != 0
    assert _is_alive(place, locked)


def test_clients_refuse_a_server_of_another_authority(place: Place, locked: Server, tmp_path: Path) -> None:
    other = Place(tmp_path)
    with secured(other, locked) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert status_of(stub.ServerLive, pb.ServerLiveRequest())[0] == "UNAVAILABLE"
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        http(other, locked, "/v2/health/live")


def test_those_who_speak_no_tls_are_not_answered(place: Place, locked: Server) -> None:
    with grpc.insecure_channel(locked.grpc, [("grpc.enable_retries", 0)]) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert status_of(stub.ServerLive, pb.ServerLiveRequest())[0] == "UNAVAILABLE"
    host, port = locked.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=30)
    with pytest.raises((ConnectionError, OSError)):
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
    connection.close()


def test_tls_is_not_spoken_to_a_server_that_has_none(place: Place, server: Server) -> None:
    with secured(place, server) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert status_of(stub.ServerLive, pb.ServerLiveRequest())[0] == "UNAVAILABLE"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        http(place, server, "/v2/health/live")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused_on_both_ports(place: Place, locked: Server) -> None:
    for address in (locked.grpc, locked.http):
        host, port = address.rsplit(":", 1)
        for version, is_taken in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = tls(place)
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.set_alpn_protocols(["h2", "http/1.1"])
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = version
            with socket.create_connection((host, int(port)), timeout=30) as raw:
                if is_taken:
                    context.wrap_socket(raw, server_hostname="localhost").close()
                else:
                    with pytest.raises((ssl.SSLError, ConnectionError)):
                        context.wrap_socket(raw, server_hostname="localhost")


def test_a_handshake_that_never_ends_is_ended_on_both_ports(silent: list[socket.socket]) -> None:
    for raw in silent:
        with raw:
            try:
                while raw.recv(1000):
                    pass
            except ConnectionResetError:
                pass


def test_handshakes_are_bounded_in_number_too(place: Place, start_server: StartServer) -> None:
    server = start_server(place.config(max_connections=5))
    host, port = server.http.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(20)]
    try:
        assert _is_alive(place, server), "those that came first keep others out"
        server.wait_for(
            lambda: sum(map(_has_ended, silent)) >= 20 - 5 * BOUNDS,
            "these do not give way, but end after their 10 s",
            timeout_s=5,
        )
    finally:
        for raw in silent:
            raw.close()


def _has_ended(raw: socket.socket) -> bool:
    try:
        return raw.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _is_alive(place: Place, server: Server) -> bool:
    try:
        return http(place, server, "/v2/health/live")[0] == 200
    except OSError:
        return False


def test_a_certificate_is_rotated_under_open_connections(place: Place, start_server: StartServer) -> None:
    server = start_server(place.config())

    def serials() -> set[bytes]:
        found = set()
        for address in (server.grpc, server.http):
            host, port = address.rsplit(":", 1)
            context = tls(place)
            context.set_alpn_protocols(["h2", "http/1.1"])
            with (
                socket.create_connection((host, int(port)), timeout=30) as raw,
                context.wrap_socket(raw, server_hostname="localhost") as connection,
            ):
                found.add(connection.getpeercert(binary_form=True) or b"")
        return found

    host, port = server.http.rsplit(":", 1)
    connection = HTTPSConnection(host, int(port), timeout=30, context=tls(place))
    with secured(place, server) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        stub.ServerLive(pb.ServerLiveRequest())
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read()
        before = serials()
        assert len(before) == 1
        place.issue()
        server.wait_for(lambda: len(serials()) == 1 and serials() != before, "it kept its certificate", CHANGE_S)
        stub.ServerLive(pb.ServerLiveRequest())
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()
    assert "tls: read again" in server.stderr


# Changes.


def test_connections_end_when_other_authorities_of_clients_are_believed(
    tmp_path: Path, start_server: StartServer
) -> None:
    place = Place(tmp_path)
    believed = place.folder / "clients.pem"
    server = start_server(place.config(tls_client_ca=str(believed)))
    own = place.own("ops.example.com")
    host, port = server.http.rsplit(":", 1)
    connection = HTTPSConnection(host, int(port), timeout=30, context=tls(place, own))
    with secured(place, server, own) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        assert status_of(stub.ModelInfer, request_for(MINE))[0] == "OK"
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read()
        trustme.CA().cert_pem.write_to_path(believed)
        server.wait_for(lambda: "connections are closed" in server.stderr, "it did not notice", CHANGE_S)
        server.wait_for(
            lambda: status_of(stub.ModelInfer, request_for(MINE))[0] == "UNAVAILABLE", "gRPC's client stayed", CHANGE_S
        )
    connection.sock.settimeout(CHANGE_S)
    assert connection.sock.recv(1) == b"", "HTTP's client stayed"
    connection.close()


def test_localhost_is_all_of_its_addresses_with_tls_too(place: Place, start_server: StartServer) -> None:
    server = start_server(place.config(host="localhost"))
    port = int(server.http.rsplit(":", 1)[1])
    for _, _, _, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        with socket.create_connection((str(address[0]), port), timeout=30) as raw:
            tls(place).wrap_socket(raw, server_hostname="localhost").close()


def test_a_key_that_is_withdrawn_is_refused_soon_within_open_streams_too(
    place: Place, start_server: StartServer
) -> None:
    server = start_server(place.config())
    with secured(place, server) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)

        def ask() -> str:
            return status_of(stub.ModelInfer, request_for(MINE), metadata=metadata("gone"))[0]

        withdrawn: list[bool] = []

        def requests() -> Iterator[pb.ModelInferRequest]:
            yield request_for(MINE)
            server.wait_for(lambda: withdrawn, "it was not withdrawn")
            yield request_for(MINE)

        stream = stub.ModelStreamInfer(requests(), metadata=metadata("gone"), timeout=60)
        assert not next(stream).error_message
        assert ask() == "OK"
        try:
            place.allow("shop", "ops", "root")
            server.wait_for(lambda: ask() == "UNAUTHENTICATED", "the key was not withdrawn", CHANGE_S)
            withdrawn.append(True)
            assert status_of(lambda: next(stream))[0] == "UNAUTHENTICATED"
            path, body = infer_json(MINE)
            assert http(place, server, path, bearer("gone"), body=body)[0] == 401
            access = place.folder / "access.yaml"
            access.write_text("callers: [")
            server.wait_for(lambda: "as before: access: " in server.stderr, "it did not look", CHANGE_S)
            assert http(place, server, path, bearer("shop"), body=body)[0] == 200
        finally:
            place.allow(*KEYS)
        server.wait_for(lambda: ask() == "OK", "the key was not given back", CHANGE_S)


# At the start.


def start_and_fail(folder: Path, config: dict[str, Any]) -> str:
    """Returns the one line that a server says which does not start."""
    file = folder / "config.yaml"
    file.write_text(json.dumps({"grpc_port": 0, "http_port": 0, "metrics_port": 0, **config}))
    done = subprocess.run(
        [sys.executable, "-m", "xlaserve", "serve", "--config", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tls_key": "cert.pem"}, "tls_key: expected the private key of tls_certificate"),
        ({"access": "cert.pem"}, "access: "),
    ],
    ids=str,
)
def test_files_that_can_not_be_used_end_the_start(
    place: Place, tmp_path: Path, changed: dict[str, str], expected: str
) -> None:
    config = place.config(**{key: str(place.folder / value) for key, value in changed.items()})
    line = start_and_fail(tmp_path, config)
    assert line.startswith("xlaserve: ")
    assert expected in line


def line_of(server: Server, text: str) -> str:
    """Returns the only line of a server's log that has `text`."""
    (line,) = (line for line in server.stderr.splitlines() if text in line)
    return line


def test_warnings_say_who_can_call_and_what_travels_in_the_clear(
    place: Place, server: Server, start_server: StartServer
) -> None:
    assert "INFO" in line_of(server, "only this machine can call")
    locked = start_server({"models": [model(MINE)], "host": "0.0.0.0", "access": str(place.folder / "access.yaml")})
    assert "WARN" in line_of(locked, "keys and tokens travel in the clear")
    assert "WARN" in line_of(locked, "`tls_client_ca` is not set")


def test_a_server_reachable_by_others_refuses_loads_without_rights(start_server: StartServer) -> None:
    server = start_server({"models": [model(MINE)], "host": "0.0.0.0", "metrics_port": 0, "admin": True})
    assert "WARN" in line_of(server, "anybody who reaches 0.0.0.0 may call")
    with grpc.insecure_channel(server.grpc.replace("0.0.0.0", "127.0.0.1")) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        load = pb.RepositoryModelLoadRequest(model_name=MINE)
        assert status_of(stub.RepositoryModelLoad, load)[0] == "UNIMPLEMENTED"
        profile: Any = channel.unary_unary("/xlaserve.v1.Admin/Profile")
        assert status_of(profile, b"")[0] == "UNIMPLEMENTED"
