"""A gRPC server that answers any request with an empty message: it measures the generator's own ceiling.

Run as a process with the path of the file that says where it listens. It serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

_SERVICE: Final = "inference.GRPCInferenceService"


async def _answer(request: bytes, context: Any) -> bytes:
    return b""


async def serve(ready: Path) -> None:
    """Serves on a free port of loopback, which it writes to `ready` as `{"grpc": HOST:PORT}`."""
    handler: Any = grpc.unary_unary_rpc_method_handler(_answer)
    handlers = dict.fromkeys(("ModelInfer", "ServerMetadata"), handler)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    await serve_until_sigterm(server, ready)


async def serve_until_sigterm(server: grpc.aio.Server, ready: Path) -> None:
    """Starts `server` on a free port of loopback, and stops it at SIGTERM."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announce(ready, port)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(grace=None)


def announce(ready: Path, port: int) -> None:
    """Says where the server listens."""
    partial = ready.with_suffix(".partial")
    partial.write_text(json.dumps({"grpc": f"127.0.0.1:{port}", "pid": os.getpid()}))
    partial.replace(ready)


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[-1])))
