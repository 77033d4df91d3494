from __future__ import annotations

import asyncio
import gzip
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.client import HTTPConnection
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import Metric

from xlaserve.admission.hosts import Hosts
from xlaserve.errors import ConfigError
from xlaserve.telemetry import http
from xlaserve.telemetry.http import HttpEndpoint, on_loop
from xlaserve.telemetry.metrics import Metrics, gauge_family


def refreshed() -> Future[None]:
    """Returns a future that is done: there is nothing to read again."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


class Server:
    """What the endpoint looks at."""

    ready = True

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def endpoint(self, host: str = "127.0.0.1", port: int = 0) -> HttpEndpoint:
        return HttpEndpoint(host, port, self.registry, is_ready=lambda: self.ready, refresh=refreshed)


def test_requests_for_other_hosts_are_refused(server: Server) -> None:
    hosts = Hosts(frozenset({"prometheus.lan"}))
    endpoint = HttpEndpoint("127.0.0.1", 0, server.registry, is_ready=lambda: True, refresh=refreshed, hosts=hosts)
    endpoint.start()
    try:
        for host, expected in (("localhost:1", 200), ("prometheus.lan", 200), ("evil.example", 403)):
            connection = HTTPConnection(endpoint.address, timeout=10)
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == expected
            connection.close()
    finally:
        endpoint.stop()


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


def connect(endpoint: HttpEndpoint) -> socket.socket:
    host, port = endpoint.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_metrics_are_those_of_the_registry(server: Server, endpoint: HttpEndpoint) -> None:
    Gauge("xlaserve_lanes", "Lanes.", registry=server.registry).set(3)
    status, text = ask(endpoint, "/metrics")
    assert status == 200
    assert text.splitlines() == ["# HELP xlaserve_lanes Lanes.", "# TYPE xlaserve_lanes gauge", "xlaserve_lanes 3.0"]
    with urlopen(f"http://{endpoint.address}/metrics", timeout=10) as response:
        assert response.headers.get_content_type() == "text/plain"


def test_the_server_is_alive_while_it_answers(endpoint: HttpEndpoint) -> None:
    assert ask(endpoint, "/healthz") == (200, "ok\n")


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
    monkeypatch.setattr(http, "CLIENT_TIMEOUT_S", 0.05)
    with connect(endpoint) as client:
        client.sendall(b"GET ")
        assert client.recv(1) == b""


def test_a_client_that_sends_byte_by_byte_is_let_go(endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CLIENT_TIMEOUT_S", 0.1)
    with connect(endpoint) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        give_up_at = time.monotonic() + 10
        client.settimeout(0.01)
        while time.monotonic() < give_up_at:
            try:
                client.sendall(b"x")
                assert client.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
    pytest.fail("it was waited for as long as it sent something now and then")


def test_a_flood_of_half_open_connections_takes_no_threads_and_no_answers(endpoint: HttpEndpoint) -> None:
    threads = threading.active_count()
    flood = [connect(endpoint) for _ in range(3 * http.MAX_CONNECTIONS)]
    try:
        for client in flood[::2]:
            client.sendall(b"GET /metr")
        assert ask(endpoint, "/healthz") == (200, "ok\n")
        assert ask(endpoint, "/metrics")[0] == 200
        assert threading.active_count() <= threads
        with pytest.raises(ConnectionError):  # the oldest made room long before its time was up
            flood[0].sendall(b"GET /")
            if flood[0].recv(1) == b"":
                raise ConnectionError
    finally:
        for client in flood:
            client.close()


def test_a_head_without_end_is_refused(endpoint: HttpEndpoint) -> None:
    with connect(endpoint) as client, pytest.raises(ConnectionError):
        while True:
            client.sendall(b"GET /healthz HTTP/1.1\r\nX: " + bytes(http.MAX_HEAD_BYTES))


def test_a_body_that_nobody_asked_for_does_not_cost_the_answer(endpoint: HttpEndpoint) -> None:
    with connect(endpoint) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000))
        client.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: client.recv(4096), b"")).endswith(b"\r\n\r\nok\n")


def test_metrics_come_compressed_where_a_client_takes_that(server: Server, endpoint: HttpEndpoint) -> None:
    Gauge("xlaserve_lanes", "Lanes.", registry=server.registry).set(3)
    request = Request(f"http://{endpoint.address}/metrics?name[]=xlaserve_lanes", headers={"Accept-Encoding": "gzip"})
    with urlopen(request, timeout=10) as response:
        assert b"xlaserve_lanes 3.0" in gzip.decompress(response.read())


class Loop:
    """An event loop on a thread of its own, with a number that only it may read."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.metrics = Metrics()
        self.metrics.add_gauges(self._gauges)
        self.readers: set[threading.Thread] = set()
        self.value = 1

    def _gauges(self) -> list[Metric]:
        self.readers.add(threading.current_thread())
        family = gauge_family("xlaserve_value", "A number.", ())
        family.add_metric((), self.value)
        return [family]

    def shown(self) -> float | None:
        endpoint = HttpEndpoint(
            "127.0.0.1",
            0,
            self.metrics.registry,
            is_ready=lambda: True,
            refresh=lambda: on_loop(self.loop, self.metrics.read_gauges),
        )
        endpoint.start()
        try:
            found = re.search(r"^xlaserve_value (\S+)$", ask(endpoint, "/metrics")[1], re.MULTILINE)
            return found and float(found[1])
        finally:
            endpoint.stop()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.thread.start()
    yield loop
    loop.loop.call_soon_threadsafe(loop.loop.stop)
    loop.thread.join()
    loop.loop.close()


def test_gauges_are_read_anew_by_the_event_loop_alone(loop: Loop) -> None:
    for loop.value in (1, 2):
        assert loop.shown() == loop.value
    assert loop.readers == {loop.thread}


def test_a_stalled_event_loop_shows_what_was_read_last(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop.shown() == 1
    monkeypatch.setattr(http, "REFRESH_TIMEOUT_S", 0.05)
    loop.value = 2
    released = threading.Event()
    loop.loop.call_soon_threadsafe(released.wait)
    try:
        assert loop.shown() == 1
    finally:
        released.set()
    assert loop.shown() == 2


def test_gauges_that_cannot_be_read_leave_the_rest(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.metrics.add_gauges(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    assert loop.shown() == 1
    assert "reading the gauges failed" in caplog.text


def test_a_loop_that_has_ended_is_not_waited_for() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    assert on_loop(ended, lambda: pytest.fail("ran")).done()


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
    with pytest.raises(ConfigError, match=f"metrics_port: expected a free port of 127.0.0.1, got {port}: Address"):
        second.start()
    second.stop()


def test_an_address_that_is_not_ours_is_named(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"host: expected an address of this machine, got 192\.0\.2\.1$"):
        server.endpoint("192.0.2.1").start()


@pytest.mark.parametrize("host", ["not a host", "a..b", "x" * 70, ":", "1.2.3.4.5"])
def test_what_is_no_host_is_named(host: str, server: Server) -> None:
    with pytest.raises(ConfigError, match=f"host: expected an address or a name of this machine, got '{host}': "):
        server.endpoint(host).start()


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


def test_another_process_answers_on_the_same_socket_once_one_leaves(endpoint: HttpEndpoint, server: Server) -> None:
    with connect(endpoint) as client:  # it has been accepted: that is left to nobody
        client.send(b"GET /readyz HTTP/1.1\r\n")
        while not endpoint._asking:
            time.sleep(0.01)
        endpoint.leave()
        other = Server()
        other.ready = False
        after = HttpEndpoint(
            "nowhere",
            1,
            other.registry,
            is_ready=lambda: other.ready,
            refresh=refreshed,
            listening=endpoint.listener.dup(),
        )
        after.start()
        try:
            assert after.address == endpoint.address
            assert [ask(endpoint, "/readyz")[0] for _ in range(5)] == [503] * 5
            client.send(b"\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
        finally:
            after.stop()
