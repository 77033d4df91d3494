"""The HTTP endpoint: /metrics for Prometheus, /healthz and /readyz for supervisors and load balancers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from threading import Thread
from typing import Final, NamedTuple, Self

from prometheus_client import CollectorRegistry, make_wsgi_app

from xlaserve.admission.hosts import ANY_HOST, Hosts
from xlaserve.config import Settings
from xlaserve.config.authority import authority
from xlaserve.errors import ConfigError

_log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S: Final = 5.0
"""A client sends its whole request within this time, and takes its whole answer within the same again."""
MAX_CONNECTIONS: Final = 128
"""Beyond it, a new connection replaces the one whose request has been incomplete for longest."""
MAX_HEAD_BYTES: Final = 16 * 1024
ACCEPT_RETRY_S: Final = 0.1
REFRESH_TIMEOUT_S: Final = 0.5
"""Seconds that a scrape waits for the event loop. Then it shows the gauges that were read last."""

_INDEX: Final = """xlaserve
/metrics  for Prometheus
/healthz  200 while the server is alive
/readyz   200 once start-up has finished and at least one model serves
"""


class _Answer(NamedTuple):
    status: str
    body: bytes
    headers: list[tuple[str, str]]


class HttpEndpoint:
    """Serves /metrics, /healthz and /readyz from one thread of its own, even while the event loop is busy.

    `is_ready` is called on that thread. So is `refresh`, before /metrics and /readyz are answered: it has their data
    read again on another thread, and its future is done once they are. Requests for other hosts than `hosts` are
    refused. `listening` is a socket that listens already, in place of `host` and `port`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        is_ready: Callable[[], bool],
        refresh: Callable[[], Future[None]],
        hosts: Hosts = ANY_HOST,
        listening: socket.socket | None = None,
    ) -> None:
        self._hosts = hosts
        self._listening = listening
        self._is_leaving = False
        self._host = host
        self._port = port
        self._metrics = make_wsgi_app(registry)
        self._is_ready = is_ready
        self._refresh = refresh
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._stopping = asyncio.Event()
        self._asking: dict[asyncio.Task[None], None] = {}
        """Connections whose request has not come in full, the oldest first."""
        self._answering: dict[asyncio.Task[None], None] = {}

    @classmethod
    def of(
        cls,
        settings: Settings,
        registry: CollectorRegistry,
        *,
        is_ready: Callable[[], bool],
        refresh: Callable[[], Future[None]],
        listening: socket.socket | None = None,
    ) -> Self | None:
        """Returns the endpoint that is configured; None without a port for metrics."""
        if settings.metrics_port is None:
            return None
        hosts = Hosts.of(settings, is_locked=False)
        host, port = settings.host, settings.metrics_port
        return cls(host, port, registry, is_ready=is_ready, refresh=refresh, hosts=hosts, listening=listening)

    def start(self) -> None:
        """Listens, and answers from now on. Raises ConfigError if it can't listen there."""
        self._socket = self._listening or self._listen()
        self._socket.setblocking(False)
        self._loop, self._stopping = asyncio.new_event_loop(), asyncio.Event()
        self._thread = Thread(target=self._run, args=(self._socket, self._loop), name="http", daemon=True)
        self._thread.start()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            # Looked up here, as the error of create_server would not tell an unknown name from others.
            socket.getaddrinfo(self._host, self._port, family)
            return socket.create_server((self._host, self._port), family=family, backlog=MAX_CONNECTIONS)
        except (socket.gaierror, UnicodeError) as error:
            raise unknown_host(self._host, error) from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host: expected an address of this machine, got {self._host}") from None
            raise taken_port("metrics_port", self._host, self._port, error) from None

    @property
    def listener(self) -> socket.socket:
        """The socket that listens. Only while it is started."""
        if self._socket is None:
            raise RuntimeError("the HTTP endpoint is not started")
        return self._socket

    @property
    def address(self) -> str:
        """HOST:PORT, with the port that was taken. Only while it is started."""
        host, port = self.listener.getsockname()[:2]
        return authority(str(host), port)

    def leave(self) -> None:
        """Accepts no more connections: another process, which listens on the same socket, takes them from now on."""
        self._is_leaving = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.remove_reader, self.listener)

    def stop(self) -> None:
        """Closes the port; answers on their way are not waited for. Does nothing if it is not started."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._socket = self._loop = self._thread = None

    def _run(self, listening: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels the connections that are left
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            loop.add_reader(listening, self._accept, listening, loop)
            await self._stopping.wait()
            loop.remove_reader(listening)

    def _accept(self, listening: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        try:
            client, _ = listening.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError as error:  # out of file descriptors: some are free once a connection times out
            _log.debug("HTTP: %r", error)
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_RETRY_S, self._accept_again, listening, loop)
            return
        client.setblocking(False)
        if len(self._asking) + len(self._answering) >= MAX_CONNECTIONS:
            waiting = self._asking or self._answering
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.cancel()
        task = loop.create_task(self._converse(client))
        self._asking[task] = None
        task.add_done_callback(partial(self._close, client))

    def _accept_again(self, listening: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        if not self._stopping.is_set() and not self._is_leaving:
            loop.add_reader(listening, self._accept, listening, loop)

    async def _converse(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                head = b""
                while b"\r\n\r\n" not in head:
                    received = await loop.sock_recv(client, MAX_HEAD_BYTES)
                    head += received
                    if not received or len(head) > MAX_HEAD_BYTES:
                        return
            task = asyncio.current_task()
            assert task is not None
            del self._asking[task]
            self._answering[task] = None
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await loop.sock_sendall(client, _to_bytes(await self._answer(head.decode("latin-1"))))
                client.shutdown(socket.SHUT_WR)
                # Closing a socket with unread bytes resets it, and the answer is lost.
                while await loop.sock_recv(client, MAX_HEAD_BYTES):
                    pass
        except (TimeoutError, OSError) as error:
            _log.debug("HTTP client: %r", error)

    def _close(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        self._asking.pop(task, None)
        self._answering.pop(task, None)
        client.close()
        if not task.cancelled() and (error := task.exception()):
            _log.error("unexpected error", exc_info=error)

    async def _answer(self, head: str) -> _Answer:
        request, *lines = head.split("\r\n")
        try:
            method, target, version = request.split()
        except ValueError:
            version = ""
        if not version.startswith("HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "expected HTTP/1.1\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        for host in (value for name, value in headers if name == "host"):
            if not self._hosts.passes(host):
                return _text(HTTPStatus.FORBIDDEN, f"{self._hosts.refusal(host)}\n")
        path, _, query = target.partition("?")
        if path not in ("/", "/metrics", "/healthz", "/readyz"):
            return _text(HTTPStatus.NOT_FOUND, "not found; see /\n")
        if method != "GET":
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET\n", ("Allow", "GET"))
        if path in ("/metrics", "/readyz"):
            await self._wait_for_refresh()
        return self._scrape(query, headers) if path == "/metrics" else self._page(path)

    def _page(self, path: str) -> _Answer:
        if path == "/":
            return _text(HTTPStatus.OK, _INDEX)
        if path == "/healthz":
            return _text(HTTPStatus.OK, "ok\n")
        return (
            _text(HTTPStatus.OK, "ready\n")
            if self._is_ready()
            else _text(HTTPStatus.SERVICE_UNAVAILABLE, "not ready\n")
        )

    async def _wait_for_refresh(self) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._refresh()), REFRESH_TIMEOUT_S)
        except TimeoutError:
            _log.debug("the event loop did not answer within %g s", REFRESH_TIMEOUT_S)
        except Exception:
            _log.exception("reading the gauges failed")

    def _scrape(self, query: str, headers: list[tuple[str, str]]) -> _Answer:
        """Returns the metrics, in the format and the encoding that the client takes."""
        given = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers}
        status: list[tuple[str, list[tuple[str, str]]]] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": query, **given}
        body = b"".join(self._metrics(environ, lambda *started: status.append(started)))
        return _Answer(status[0][0], body, status[0][1])


def listens_at(listening: socket.socket, host: str, port: int | None) -> bool:
    """Returns whether a socket listens at an address of `host` and at `port`, 0 for any port; None is no port."""
    try:
        found = socket.getaddrinfo(host, None, listening.family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return False
    address, own_port, *_ = listening.getsockname()
    return port in (0, own_port) and address == found[0][4][0]


def taken_port(setting: str, host: str, port: int, error: Exception) -> ConfigError:
    """Returns the error for a port that can't be listened on. Where `error` is not the system's, it is asked again."""
    if not isinstance(error, OSError):
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as found:
            error = found
    # Without what asyncio adds, which is the address again.
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it can't be had"
    return ConfigError(
        f"{setting}: expected a free port of {host}, got {port}: {reason}; end what listens there, or choose another: 0"
        " takes a free one"
    )


def unknown_host(host: str, error: Exception) -> ConfigError:
    """Returns the error for a name without an address; `error` is what `socket.getaddrinfo` raised."""
    reason = error.strerror if isinstance(error, OSError) else "no name is like that"
    return ConfigError(f"host: expected an address or a name of this machine, got {host!r}: {reason}")


def _text(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> _Answer:
    plain = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"), *headers]
    return _Answer(f"{status.value} {status.phrase}", text.encode(), plain)


def _to_bytes(answer: _Answer) -> bytes:
    headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {answer.status}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1") + answer.body


def on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> Future[None]:
    """Calls `work` on `loop`, from another thread. The future has its outcome; it is done at once where `loop` is
    closed."""
    done: Future[None] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        done.set_result(None)
    return done
