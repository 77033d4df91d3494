"""What the load generator can send, compared with a bare grpcio loop that only sends and awaits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import uvloop

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import closed_loop, pixels_request
from bench.trials import interleaved
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.run import crew
from xlaserve_loadtest.run.worker import Setup
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule.arrivals import ClosedLoop
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.plan import BlockPlan
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.open_inference_rest import BINARY
from xlaserve_loadtest.targets.protocols import protocol_of
from xlaserve_loadtest.targets.target import ModelInfo
from xlaserve_loadtest.targets.tensorflow_serving import SIGNATURE

SIDE = 224
"""Side of an image: 150 KB of pixels."""
CONCURRENCY = 16
MIN_SHARE = 0.9
MODEL = ModelInfo("noop", (SIDE, SIDE), (Tensor("scores", "FP32", (-1, 1000)),), {}, "bare")
NULL = ModelInfo(
    "noop",
    (SIDE, SIDE),
    (),
    {SIGNATURE: "serving_default"},
    "null",
    inputs=(Tensor("pixels", "UINT8", (-1, SIDE, SIDE, 3)),),
    extensions=(BINARY,),
)
OTHERS = ("http", "tfs", "tfs+http")
"""Protocols that are compared with Open Inference over gRPC."""


class Load(NamedTuple):
    """What one block sent."""

    per_s: float
    cpu_ms: float
    """Processor time of the sender for each request."""


def generator(blocks: int, block_s: float) -> list[Figure]:
    """Requests/s and processor time a request of one worker and of two over those of the bare loop, and the ceiling."""
    payload = pixels_request("noop", SIDE)
    with processes.bare("uvloop") as server, processes.null() as null:
        arms: dict[str, Callable[[], Load]] = {
            "bare": lambda: _bare(server.address, payload, block_s),
            "one worker": partial(_own_at, server.address, MODEL, payload, block_s),
            "two workers": lambda: uvloop.run(_own(server.address, MODEL, payload, block_s, 2)),
            "null target": partial(_own_at, null.address, NULL, payload, block_s),
        }
        for protocol in OTHERS:
            address = f"{protocol}://{null.http if protocol.endswith('http') else null.address}"
            arms[f"null target, {protocol}"] = partial(_own_at, address, NULL, payload, block_s)
        loads = interleaved(arms, blocks)
    for name, found in loads.items():
        per_s, cpu_ms = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"  generator, {name}: {per_s:,.0f} requests/s, {cpu_ms:.3f} ms of processor time each", flush=True)
    return [
        *_figures("one worker / bare loop", loads["one worker"], loads["bare"], MIN_SHARE),
        *_figures("two workers / one", loads["two workers"], loads["one worker"], None),
        *_figures("one worker, null target / no-op server", loads["null target"], loads["one worker"], None),
        *(
            figure
            for protocol in OTHERS
            for figure in _figures(
                f"null target, {protocol} / gRPC", loads[f"null target, {protocol}"], loads["null target"], None
            )
        ),
    ]


def _figures(name: str, ours: Sequence[Load], theirs: Sequence[Load], least: float | None) -> list[Figure]:
    return [
        ratio(f"generator requests/s, {name}", (load.per_s for load in ours), (load.per_s for load in theirs), least),
        ratio(
            f"generator processor time, {name}", (load.cpu_ms for load in ours), (load.cpu_ms for load in theirs), None
        ),
    ]


def _bare(address: str, payload: bytes, seconds: float) -> Load:
    before_s = time.process_time()
    load = closed_loop(address, payload, CONCURRENCY, seconds=seconds)
    return Load(load.per_s, (time.process_time() - before_s) * 1000 / load.requests)


def _own_at(address: str, model: ModelInfo, payload: bytes, seconds: float) -> Load:
    load: Load = uvloop.run(_own(address, model, payload, seconds, 1))
    return load


async def _own(address: str, model: ModelInfo, payload: bytes, seconds: float, number: int) -> Load:
    block = BlockPlan("bare", ClosedLoop(CONCURRENCY), 0.1, seconds)
    setup = Setup(
        {"bare": [model]}, {"bare": [protocol_of(address).encode(Request(payload, 1, ""), model)]}, deadline_s=60
    )
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(WorkerProcess()) for _ in range(number)]
        await asyncio.gather(*(worker.calls.setup(setup) for worker in workers))
        shares = crew.tasks(block, (address,), number, seed=0, max_in_flight=1)
        outcome = await crew.run_block(block, [worker.calls.generator for worker in workers], shares)
    if (outcome.rows["status"] != Status.OK).any():
        raise RuntimeError(f"the bare servicer failed: {outcome.failures}")
    return Load(len(outcome.answered) / outcome.window_s(), outcome.cpu_s * 1000 / outcome.sends)
