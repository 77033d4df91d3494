"""`loadtest generate` on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import NamedTuple

import uvloop

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.run.generate import Agent
from xlaserve_loadtest.run.ray_cluster import Cluster
from xlaserve_loadtest.targets.target import TargetError


class Generators(NamedTuple):
    """Addresses and the key of generators, for coordinators."""

    addresses: tuple[str, ...]
    """HOST:PORT of each."""
    key: bytes
    actors: Sequence[object]
    """They end when nothing refers to them."""


@asynccontextmanager
async def generators(address: str, number: int | None) -> AsyncIterator[Generators]:
    """Starts generators on the nodes of the cluster at `address`: `number` in turn, or one on each; ends them.

    Entering raises TargetError.
    """
    loop = asyncio.get_running_loop()
    cluster = Cluster(address)
    # Ray blocks, and would handle signals if it were started on the main thread.
    with ThreadPoolExecutor(1, thread_name_prefix="ray") as ray:
        await loop.run_in_executor(ray, cluster.__enter__)
        try:
            found = await loop.run_in_executor(ray, _start, cluster, number)
            yield found
        finally:
            # The actors end with it.
            await loop.run_in_executor(ray, cluster.__exit__)


def _start(cluster: Cluster, number: int | None) -> Generators:
    nodes = cluster.nodes()
    chosen = list(islice(cycle(nodes), number or len(nodes)))
    key = secrets.token_hex(32).encode()
    actors = [cluster.on(node, RayGenerator)(node.host, key) for node in chosen]
    found = cluster.answers([actor.address.remote() for actor in actors])
    for node, own in zip(chosen, found, strict=True):
        if isinstance(own, Exception):
            raise TargetError(f"--ray {cluster.address}: node {node}: no generator: {own}")
    return Generators(tuple(found), key, actors)


class RayGenerator:
    """An actor that listens as `loadtest generate` does, on `host` at a free port. Ends with its process."""

    def __init__(self, host: str, key: bytes) -> None:
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        threading.Thread(target=self._serve, args=(key,), daemon=True).start()

    def address(self) -> str:
        """Returns HOST:PORT."""
        host, port = self._listener.getsockname()[:2]
        return Address("", host, port).authority

    def _serve(self, key: bytes) -> None:
        # An event loop of its own: those of asyncio need the main thread, or its policy, to hear of ended processes.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Agent(key, _say).serve(self._listener))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
