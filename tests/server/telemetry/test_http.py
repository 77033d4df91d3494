from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge

from xlaserve.errors import ConfigError
from xlaserve.telemetry.http import HttpEndpoint


class Server:
    """What the endpoint looks at."""

    live = True
    ready = True

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def endpoint(self, host: str = "127.0.0.1", port: int = 0) -> HttpEndpoint:
        return HttpEndpoint(host, port, self.registry, lambda: self.live, lambda: self.ready)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def endpoint(server: Server) -> Iterator[HttpEndpoint]:
    endpoint = server.endpoint()
    endpoint.start()
    yield endpoint
    endpoint.stop()


def ask(endpoint: HttpEndpoint, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection(endpoint.address, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_are_those_of_the_registry(server: Server, endpoint: HttpEndpoint) -> None:
    Gauge("xlaserve_lanes", "Lanes.", registry=server.registry).set(3)
    status, text = ask(endpoint, "/metrics")
    assert status == 200
    assert text.splitlines() == ["# HELP xlaserve_lanes Lanes.", "# TYPE xlaserve_lanes gauge", "xlaserve_lanes 3.0"]
    with urlopen(f"http://{endpoint.address}/metrics", timeout=10) as response:
        assert response.headers.get_content_type() == "text/plain"


def test_health_follows_the_server(server: Server, endpoint: HttpEndpoint) -> None:
    assert ask(endpoint, "/healthz") == (200, "ok\n")
    server.live = False
    assert ask(endpoint, "/healthz") == (503, "not live\n")


def test_readiness_follows_the_server(server: Server, endpoint: HttpEndpoint) -> None:
    assert ask(endpoint, "/readyz?verbose") == (200, "ready\n")
    server.ready = False
    assert ask(endpoint, "/readyz") == (503, "not ready\n")
    assert ask(endpoint, "/healthz") == (200, "ok\n")


def test_the_index_names_the_paths(endpoint: HttpEndpoint) -> None:
    status, text = ask(endpoint, "/")
    assert status == 200
    assert all(path in text for path in ("/metrics", "/healthz", "/readyz"))


def test_other_paths_and_methods_are_refused(endpoint: HttpEndpoint) -> None:
    assert ask(endpoint, "/favicon.ico")[0] == 404
    assert ask(endpoint, "/metrics/../etc")[0] == 404
    assert ask(endpoint, "/metrics", "POST")[0] == 405
    assert ask(endpoint, "/healthz", "DELETE")[0] == 405


def test_clients_that_hang_keep_nobody_waiting(endpoint: HttpEndpoint) -> None:
    host, port = endpoint.address.split(":")
    hanging = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for client in hanging:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert ask(endpoint, "/healthz") == (200, "ok\n")
    finally:
        for client in hanging:
            client.close()


def test_a_client_that_hangs_is_let_go(endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.telemetry.http._Handler.timeout", 0.05)
    host, port = endpoint.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"GET ")
        assert client.recv(1) == b""


def test_nothing_is_written_to_stderr(endpoint: HttpEndpoint, capfd: pytest.CaptureFixture[str]) -> None:
    ask(endpoint, "/healthz")
    ask(endpoint, "/nowhere")
    host, port = endpoint.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        while client.recv(4096):
            pass
    endpoint.stop()
    assert capfd.readouterr() == ("", "")


def test_a_taken_port_is_named(endpoint: HttpEndpoint, server: Server) -> None:
    port = int(endpoint.address.split(":")[1])
    second = server.endpoint(port=port)
    with pytest.raises(ConfigError, match=f"http_port: expected a free port on host 127.0.0.1, got {port}: Address"):
        second.start()
    second.stop()


def test_an_address_that_is_not_ours_is_named(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"http_port: expected a free port on host 192\.0\.2\.1, got 0: "):
        server.endpoint("192.0.2.1").start()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_it_listens_on_ipv6(server: Server) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    endpoint = server.endpoint("::1")
    endpoint.start()
    try:
        assert endpoint.address.startswith("[::1]:")
        assert ask(endpoint, "/healthz")[0] == 200
    finally:
        endpoint.stop()


def test_stopping_is_prompt_frees_the_port_and_may_be_repeated(endpoint: HttpEndpoint, server: Server) -> None:
    port = int(endpoint.address.split(":")[1])
    with socket.create_connection(("127.0.0.1", port)):  # a client that hangs does not hold it up
        started = time.monotonic()
        endpoint.stop()
        assert time.monotonic() - started < 3
    endpoint.stop()
    with pytest.raises(RuntimeError, match="not started"):
        _ = endpoint.address
    again = server.endpoint(port=port)
    again.start()
    try:
        assert ask(again, "/healthz")[0] == 200
    finally:
        again.stop()
