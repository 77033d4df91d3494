"""The processor time that each process of a server takes for a request to `builtin:noop`, measured on this machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from xlaserve.fleet.process import ServerProcess
from xlaserve.processes.capacity import US_PER_S
from xlaserve_proto import open_inference_pb2 as pb

METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
SIDE: Final = 224
"""Of the image, 150 KB of pixels."""
AT_ONCE: Final = 32
WARM_UP_S: Final = 1.0
DEADLINE_S: Final = 60.0
DRAIN_S: Final = 10.0
SERVER: Final[Mapping[str, Any]] = {
    "models": [{"name": "noop", "source": "builtin:noop", "buckets": [1, 2, 4, 8, 16, 32]}],
    "host": "127.0.0.1",
    "grpc_port": 0,
    "http_port": 0,
    "metrics_port": 0,
    "access_log": "off",
    "log_level": "warning",
}
OWN: Final = "server"
ENGINE: Final = "engine"
TITLE: Final = "xlaserve "
OPTIONS: Final = (("grpc.enable_http_proxy", 0),)


def processor_s(pid: int) -> dict[str, float]:
    """Returns the processor seconds that each process of a server has used, by its role.

    `pid` is the server's; those of "server" are its own, the supervisor's, or those of the one that serves alone.
    """
    server = psutil.Process(pid)
    found = {OWN: _used_s(server)}
    for child in server.children():
        title = " ".join(child.cmdline()).strip()
        role = title.removeprefix(TITLE) if title.startswith(TITLE) else OWN
        found[role] = found.get(role, 0.0) + _used_s(child)
    return found


async def for_a_request(fronts: int, seconds: float) -> dict[str, float]:
    """Starts a server with so many fronts, sends it images for `seconds`, and returns microseconds for each, by role.

    Raises ServerFailed where it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="xlaserve-") as folder:
        server = ServerProcess({**SERVER, "fronts": fronts}, {}, Path(folder, "server"), DRAIN_S)
        try:
            await server.start()
            assert server.pid is not None
            async with grpc.aio.insecure_channel(server.found.grpc, OPTIONS) as channel:
                call: Callable[..., Awaitable[bytes]] = channel.unary_unary(METHOD)
                await _send(call, WARM_UP_S)
                before_s = processor_s(server.pid)
                requests = await _send(call, seconds)
                after_s = processor_s(server.pid)
        finally:
            await server.stop()
    return {role: (after_s[role] - used_s) / requests * US_PER_S for role, used_s in before_s.items()}


async def _send(call: Callable[..., Awaitable[bytes]], seconds: float) -> int:
    """Keeps AT_ONCE requests under way for `seconds`, and returns how many were answered."""
    request = pb.ModelInferRequest(model_name="noop")
    request.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    request.raw_input_contents.append(bytes(SIDE * SIDE * 3))
    payload = request.SerializeToString()
    until, answered = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal answered
        while time.monotonic() < until:
            await call(payload, timeout=DEADLINE_S)
            answered += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return answered


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
