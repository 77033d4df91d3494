"""What is seen over HTTP: /metrics for Prometheus, /healthz and /readyz for whoever restarts the server and routes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from socket import AF_INET6
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from xlaserve.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_log = logging.getLogger(__name__)

_CLIENT_TIMEOUT_S: Final = 5.0
_STOP_POLL_S: Final = 0.1

_INDEX: Final = """xlaserve
/metrics  for Prometheus
/healthz  200 while the server is alive
/readyz   200 once every model is warm
"""


class HttpEndpoint:
    """Serves /metrics, /healthz and /readyz from threads of its own, so that it answers whatever the event loop does.

    `is_live` and `is_ready` are called on those threads.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
    ) -> None:
        self._host = host
        self._port = port
        self._metrics = make_wsgi_app(registry)
        self._is_live = is_live
        self._is_ready = is_ready
        self._server: _Server | None = None

    def start(self) -> None:
        """Listens, and answers from now on. Raises ConfigError if it can't listen there."""
        try:
            self._server = _Server(self._host, self._port)
        except OSError as error:
            raise ConfigError(
                f"http_port: expected a free port on host {self._host}, got {self._port}: {error.strerror}"
            ) from None
        self._server.set_app(self._answer)
        Thread(target=self._server.serve_forever, args=(_STOP_POLL_S,), name="http", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT, with the port that was taken. Only while it is started."""
        if self._server is None:
            raise RuntimeError("the HTTP endpoint is not started")
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in self._host else f"{host!s}:{port}"

    def stop(self) -> None:
        """Closes the port; answers on their way are not waited for. Does nothing if it is not started."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/", "/metrics", "/healthz", "/readyz"):
            status, text = "404 Not Found", "not found; see /\n"
        elif environ["REQUEST_METHOD"] != "GET":
            status, text = "405 Method Not Allowed", "only GET\n"
        elif path == "/metrics":
            return self._metrics(environ, start_response)  # type: ignore[no-any-return]
        elif path == "/":
            status, text = "200 OK", _INDEX
        elif path == "/healthz":
            status, text = ("200 OK", "ok\n") if self._is_live() else ("503 Service Unavailable", "not live\n")
        else:
            status, text = ("200 OK", "ready\n") if self._is_ready() else ("503 Service Unavailable", "not ready\n")
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
        if status.startswith("405"):
            headers.append(("Allow", "GET"))
        start_response(status, headers)
        return [text.encode()]


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S  # of each read and write

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: probes and scrapes would fill the log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # The standard library's looks the host's name up, which can take seconds where DNS does not answer.
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("HTTP client %s: %r", client_address, sys.exception())
