"""What tests put in the place of a fleet's name service, and how they call both clients alike."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from xlaserve_client import AsyncVisionClient, VisionClient

PATIENCE_S = 20.0


class NameService:
    """Answers as the name service of a fleet does, over HTTP on loopback."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.generation = 0
        self._news = threading.Condition()
        self._servers: list[dict[str, str]] = []
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def target(self) -> str:
        return f"fleet://127.0.0.1:{self._port}"

    def publish(self, *ready: str, draining: tuple[str, ...] = ()) -> None:
        """Lists servers by their addresses, as a new generation."""
        with self._news:
            named = [(address, "ready") for address in ready] + [(address, "draining") for address in draining]
            self._servers = [
                {"address": address, "http": "127.0.0.1:1", "state": state, "id": f"server at {address}"}
                for address, state in named
            ]
            self.generation += 1
            self._news.notify_all()

    def start(self) -> None:
        """Listens, at the port of before where there was one."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = service._answer(self.path, self.server)
                if body is not None:
                    self.send_response(200)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Stops listening; what waits gets no answer."""
        server, self._server = self._server, None
        if server is not None:
            with self._news:
                self._news.notify_all()
            server.shutdown()
            server.server_close()

    def _answer(self, path: str, server: object) -> bytes | None:
        """Returns the answer of `server`; none once that was stopped."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        assert parts.path == "/v1/servers"
        with self._news:
            if self._server is not server:
                return None
            self.asked.append(path)
            self._news.notify_all()
            if "after" in query:
                after = int(query["after"])
                self._news.wait_for(
                    lambda: self.generation != after or self._server is not server, timeout=float(query["wait_s"])
                )
            if self._server is not server:
                return None
            return json.dumps({"servers": self._servers, "generation": self.generation, "more": 1}).encode()

    def wait_until_asked(self, path: str) -> None:
        """Waits until `path` was asked for: a client that asks for what comes after a generation has heard of it."""
        with self._news:
            assert self._news.wait_for(lambda: path in self.asked, timeout=PATIENCE_S), self.asked

    def wait_until_heard(self) -> None:
        """Waits until a client has heard of the generation that is listed now."""
        self.wait_until_asked(f"/v1/servers?after={self.generation}&wait_s=20")


@contextmanager
def name_service() -> Iterator[NameService]:
    service = NameService()
    service.start()
    try:
        yield service
    finally:
        service.stop()


class Blocking:
    """An AsyncVisionClient in a thread with a loop of its own, with blocking methods."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.client = AsyncVisionClient(*arguments, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self.client, name)
        return lambda *arguments, **options: self.run(method(*arguments, **options))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.run(self.client.close())
            left = self.run(self._others())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(PATIENCE_S)
            self.loop.close()
        assert not left, left

    @staticmethod
    async def _others() -> set[asyncio.Task[Any]]:
        """The tasks that have not ended, but for those of gRPC."""
        await asyncio.sleep(0)
        return {
            task
            for task in asyncio.all_tasks()
            if task is not asyncio.current_task() and "xlaserve" in repr(task.get_coro())
        }


MakeClient = Callable[..., Any]
"""Makes a client, as a context manager: VisionClient, or Blocking around AsyncVisionClient."""
CLIENTS: dict[str, MakeClient] = {"sync": VisionClient, "asyncio": Blocking}


def ask(client: Any, number: int = 1) -> int:
    """Sends an image, and returns what it was classified as, which is the number."""
    top: int = client.classify(bytes([number]), model="digits").classifications[0].top.index
    return top


def eventually(is_so: Callable[[], object]) -> None:
    """Waits for what another thread brings about."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
