"""A server that answers any request at once with nothing, over gRPC and HTTP: it measures the generator's own ceiling.

Run as a process with the path of the file that says where it listens. It serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio
import httptools
import uvloop

_METHODS: Final = {
    "inference.GRPCInferenceService": ("ModelInfer", "ServerMetadata"),
    "tensorflow.serving.PredictionService": ("Predict",),
}
_BODY: Final = b'{"outputs":[],"predictions":[]}'
"""An empty answer of either REST API."""
_HTTP_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)


async def _answer(request: bytes, context: Any) -> bytes:
    return b""


class _Http(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # which uvloop's do not derive from
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_complete(self) -> None:
        self._transport.write(_HTTP_ANSWER)


async def serve(ready: Path) -> None:
    """Serves on free ports of loopback, which it writes to `ready` as `{"grpc": HOST:PORT, "http": HOST:PORT}`."""
    handler: Any = grpc.unary_unary_rpc_method_handler(_answer)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    for service, methods in _METHODS.items():
        handlers = dict.fromkeys(methods, handler)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    http = await asyncio.get_running_loop().create_server(_Http, "127.0.0.1", 0)
    await serve_until_sigterm(server, ready, http=f"127.0.0.1:{http.sockets[0].getsockname()[1]}")


async def serve_until_sigterm(server: grpc.aio.Server, ready: Path, **others: str) -> None:
    """Starts `server` on a free port of loopback, and stops it at SIGTERM. `others` are addresses to announce."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce(ready, port, **others)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(grace=None)


def announce(ready: Path, port: int, **others: str) -> None:
    """Says where the server listens."""
    partial = ready.with_suffix(".partial")
    partial.write_text(json.dumps({"grpc": f"127.0.0.1:{port}", "pid": os.getpid(), **others}))
    partial.replace(ready)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[-1])))
