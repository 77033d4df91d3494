"""The generator's ceiling: a run's requests, sent to a server that answers at once with nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from xlaserve_loadtest.addresses import CLEAR
from xlaserve_loadtest.analysis.samples import latencies_ns
from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.crew import Outcome
from xlaserve_loadtest.run.others import Others
from xlaserve_loadtest.run.recorder import Ceiling
from xlaserve_loadtest.run.remote import RemoteWorker
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.tensors import ANY, Tensor
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets.embedded import EmbeddedServer
from xlaserve_loadtest.targets.target import ModelInfo

CEILING_S: Final = 0.5
CEILING_SLOTS: Final = 16
ALONE_S: Final = 0.2
NULL_SIZE: Final = (224, 224)

_NULL_COMMAND: Final = (sys.executable, "-m", "xlaserve_loadtest.targets.null_server")


def null_server(settings: Settings) -> EmbeddedServer:
    """Returns a server that does nothing, on this machine."""
    return EmbeddedServer("", start_timeout_s=settings.start_timeout_s, command=_NULL_COMMAND)


def null_info(settings: Settings) -> ModelInfo:
    """Describes its model."""
    size = settings.sizes[0] if settings.sizes else NULL_SIZE
    return ModelInfo(NULL, size, (), {}, "null server", inputs=(Tensor("pixels", "UINT8", (ANY, *size, 3)),))


def arm_of(protocol: str) -> str:
    """Returns the name under which workers have the requests of a protocol."""
    return f"generator's ceiling {protocol}"


async def measure(protocol: str, server: EmbeddedServer, workers: Sequence[WorkerProcess | RemoteWorker]) -> Ceiling:
    """Sends the requests of a protocol to a null server."""
    others = Others()
    clear = protocol.replace("https", "http")  # it has no TLS
    authority = server.rest_address if clear in CLEAR else server.address
    address = f"{clear}://{authority}" if clear else str(authority)
    busy = await _load(protocol, address, CEILING_SLOTS * len(workers), CEILING_S, workers)
    alone = await _load(protocol, address, 1, ALONE_S, workers)
    own_ms = float(np.median(latencies_ns(alone.answered))) / 1e6 if alone.answered.size else None
    return Ceiling(len(busy.answered) / CEILING_S, own_ms, others.share())


async def _load(
    protocol: str, address: str, slots: int, seconds: float, workers: Sequence[WorkerProcess | RemoteWorker]
) -> Outcome:
    block = BlockPlan(arm_of(protocol), ClosedLoop(slots), seconds / 5, seconds)
    shares = crew.tasks(block, (address,), len(workers), seed=0, max_in_flight=1)
    outcome = await crew.run_block(block, [worker.generator for worker in workers], shares)
    if outcome.interrupted:
        raise asyncio.CancelledError
    return outcome
