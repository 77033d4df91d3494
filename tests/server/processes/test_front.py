"""A front that leaves, beside another that listens on its ports."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import Settings
from xlaserve.processes.front import Front
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.remote_engines import RemoteEngines
from xlaserve.telemetry.gpus import Gpus
from xlaserve.telemetry.metrics import Metrics
from xlaserve.wire.grpc import reuseport

CONNECTIONS = 30
PATIENCE_S = 30.0


async def test_a_front_leaves_new_connections_to_those_started_after_it() -> None:
    settings, metrics, usage = Settings(fronts=5, grpc_port=0, http_port=0), Metrics(), SharedCounts(fronts=5)
    usage.serving = 1
    front = Front(
        settings,
        RemoteEngines((), Mirror(metrics), metrics),
        metrics,
        stopping=asyncio.Event(),
        on_crash=lambda: None,
        gpus=Gpus(None),
        refresh=metrics.read_gauges,
        usage=usage,
    )
    await front.open()
    with ExitStack() as stack:
        host, _, port = str(front.ports.http.address).rpartition(":")
        address = host, int(port)
        after = stack.enter_context(socket.create_server(address, backlog=128, reuse_port=True))
        leaving = asyncio.create_task(front.leave(asyncio.Event(), PATIENCE_S))
        await asyncio.sleep(0.05)  # within `port_closing.PASSED_ON_S`: it still listens
        for _ in range(CONNECTIONS):
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        given = reuseport.waiting(after)
        await asyncio.wait_for(leaving, PATIENCE_S)
    await front.close()
    assert given == CONNECTIONS
