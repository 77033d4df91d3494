"""What a request costs over HTTP next to gRPC: requests/s of builtin:noop, and the server's processor time for each."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final

import numpy as np
import uvloop

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import RAMP, Load, closed_loop, pixels_request
from bench.trials import interleaved

SIDE: Final = 224
AT_ONCE: Final = (1, 32)
_HEAD: Final = re.compile(rb"HTTP/1.1 200 .*\r\ncontent-length: (\d+)\r\n", re.DOTALL)


def rest(blocks: int, block_s: float) -> list[Figure]:
    """Requests/s and processor time of the REST API's binary requests over those of gRPC's ModelInfer."""
    config = {"models": [{"name": "noop", "source": "builtin:noop", "buckets": (1, 2, 4, 8, 16, 32)}]}
    grpc_request, http_request = pixels_request("noop", SIDE), binary_request("noop", SIDE)
    figures = []
    with processes.xlaserve(config) as server:
        for at_once in AT_ONCE:
            arms: dict[str, Callable[[], Load]] = {
                "gRPC": partial(closed_loop, server.address, grpc_request, at_once, seconds=block_s),
                "HTTP": partial(http_loop, server.http, http_request, at_once, block_s),
            }
            timed = {name: partial(_timed, server, load) for name, load in arms.items()}
            found = interleaved(timed, blocks)
            rates, cpu_us = ({name: [one[column] for one in found[name]] for name in arms} for column in (0, 1))
            for name in arms:
                said = f"{median(rates[name]):.0f} requests/s, {median(cpu_us[name]):.0f} us of the server each"
                print(f"  {name}, {at_once} at once: {said}", flush=True)
            figures.append(ratio(f"requests/s at {at_once}, HTTP / gRPC", rates["HTTP"], rates["gRPC"], None))
            figures.append(ratio(f"processor time at {at_once}, HTTP / gRPC", cpu_us["HTTP"], cpu_us["gRPC"], None))
    return figures


def _timed(server: processes.Server, run: Callable[[], Load]) -> tuple[float, float]:
    before_s = server.cpu_s()
    load = run()
    return load.per_s, (server.cpu_s() - before_s) / load.requests * 1e6


def binary_request(model: str, side: int) -> bytes:
    """Returns a request with an image of noise in binary, whose answer is wanted in binary."""
    shape = [1, side, side, 3]
    raw = np.random.default_rng(seed=0).integers(0, 256, shape, dtype=np.uint8).tobytes()
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": shape, "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(text)}",
        f"Content-Length: {len(text) + len(raw)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + text + raw


def http_loop(address: str, request: bytes, at_once: int, seconds: float) -> Load:
    """Keeps `at_once` requests in flight, a connection for each, and counts as `closed_loop` does. Any error raises."""
    load: Load = uvloop.run(_http_loop(address, request, at_once, seconds))
    return load


async def _http_loop(address: str, request: bytes, at_once: int, seconds: float) -> Load:
    host, port = address.rsplit(":", 1)
    answered = counted = 0
    since = time.perf_counter() + RAMP * seconds
    until = since + seconds

    async def client() -> None:
        nonlocal answered, counted
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while time.perf_counter() < until:
                writer.write(request)
                found = _HEAD.match(await reader.readuntil(b"\r\n\r\n"))
                if found is None:
                    raise RuntimeError("an answer is not 200 with its length")
                await reader.readexactly(int(found[1]))
                answered += 1
                counted += since <= time.perf_counter() < until
        finally:
            writer.close()

    await asyncio.gather(*(client() for _ in range(at_once)))
    return Load(answered, counted, seconds)
