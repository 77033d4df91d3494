"""Processor time a request with every request in the access log, and with every request traced."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import IO, Any, Final

import grpc

from bench import processes
from bench.figures import Figure, at_most
from bench.generator import closed_loop, pixels_request
from bench.trials import interleaved

SIDE: Final = 224
CONCURRENCY: Final = (1, 8)
"""Requests in flight."""
MOST: Final = {"access_log: all": 1.05, "tracing": 1.15}
"""The most processor time a request, over that of a server without either."""
STARTS: Final = 3
EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def observation(blocks: int, block_s: float) -> list[Figure]:
    """Processor time of the server a request to builtin:noop, over that of a server that observes nothing but counts.

    The log goes into a pipe, and spans to a collector that drops them.
    """
    config = {"models": [{"name": "noop", "source": "builtin:noop", "buckets": (1, 2, 4, 8, 16, 32)}]}
    payload = pixels_request("noop", SIDE)
    runs: dict[tuple[int, str], list[float]] = defaultdict(list)
    with _collector() as endpoint, _drain() as pipe:
        settings: dict[str, Mapping[str, object]] = {
            "neither": {},
            "access_log: all": {"access_log": "all", "log_level": "info"},
            "tracing": {"tracing": True, "trace_endpoint": endpoint},
        }
        for start in range(min(STARTS, blocks)):
            with ExitStack() as stack:
                servers = {
                    name: stack.enter_context(processes.xlaserve({**config, **more}, stderr=pipe))
                    for name, more in settings.items()
                }
                for concurrency in CONCURRENCY:
                    loads = {
                        name: partial(_cpu_s, server, payload, concurrency, block_s) for name, server in servers.items()
                    }
                    for name, found in interleaved(loads, len(range(start, blocks, STARTS))).items():
                        runs[concurrency, name] += found
    figures = []
    for concurrency in CONCURRENCY:
        plain = runs[concurrency, "neither"]
        print(f"  {median(plain) * 1e6:.0f} us of processor time a request at {concurrency}", flush=True)
        for name, most in MOST.items():
            ratios = [one / other for one, other in zip(runs[concurrency, name], plain, strict=True)]
            figures.append(at_most(f"processor time a request at {concurrency}, {name}", ratios, most))
    return figures


def _cpu_s(server: processes.Server, payload: bytes, concurrency: int, block_s: float) -> float:
    before_s = server.cpu_s()
    load = closed_loop(server.address, payload, concurrency, seconds=block_s)
    return (server.cpu_s() - before_s) / load.requests


@contextmanager
def _drain() -> Iterator[IO[bytes]]:
    """Gives the writing end of a pipe that a process of its own reads and drops, as a log shipper would read it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin is not None
        yield reader.stdin


@contextmanager
def _collector() -> Iterator[str]:
    """Gives the endpoint of a collector in a process of its own, which drops what it is sent."""
    with processes.asked(_collect) as ask:
        yield ask()


def _collect(pipe: Connection) -> None:
    class Drop(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda spans, context: b"") if details.method == EXPORT else None

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Drop()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    while True:
        pipe.recv()
        pipe.send(f"http://127.0.0.1:{port}")
