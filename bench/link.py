"""What a link costs: `python -m bench.link [--seconds S] [--rounds N] [--side PIXELS]`.

Requests of one image to `builtin:noop`'s program, admitted, copied and run as a front does, without a wire: in one
process, and from a front to an engine in a process of its own. Prints, for each number of requests at a time,
requests/s and microseconds of CPU for a request, in the front and in the engine, as medians of interleaved rounds with
the least and the most.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import uvloop

from bench.trials import interleaved
from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.batcher import Batcher
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Run as BatchRun
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.model_engine import ModelEngine
from xlaserve.engine.program import Warmed
from xlaserve.engine.request import EngineRequest
from xlaserve.models.sources.noop import CLASSES, NoopProgram
from xlaserve.processes.link.engine_end.host import Host
from xlaserve.processes.link.engine_end.hosted_models import Hosted
from xlaserve.processes.link.engine_state import ModelSnapshot
from xlaserve.processes.link.front_end.engine_link import connect
from xlaserve.programs.tf.device import cpu_name

BATCHES: Final = (1, 2, 4, 8, 16, 32)
AT_A_TIME: Final = (1, 8, 32, 128)
MAX_IMAGES, MAX_BYTES = 4096, 2**31
US_PER_S: Final = 1e6


class Run(NamedTuple):
    """What one run showed."""

    requests_per_s: float
    front_us: float
    engine_us: float


class _Nobody:
    def batch_ran(self, mode: Mode, bucket: Bucket, images: int, run: BatchRun) -> None:
        pass

    def batch_failed(self, mode: Mode, bucket: Bucket, images: int) -> None:
        pass


def _batcher(side: int) -> Batcher:
    program = NoopProgram()
    buckets = [Bucket(batch, side, side) for batch in BATCHES]
    cost = {bucket: Cost(*[5e-6 + 1e-6 * bucket.batch] * 2) for bucket in buckets}
    return Batcher(
        name="noop",
        programs={
            (Mode.XLA, bucket): Warmed(program.compile(Mode.XLA, bucket).executable, cost[bucket]) for bucket in buckets
        },
        lanes=Lanes(1),
        worker=Worker(1),
        observer=_Nobody(),
        max_images=MAX_IMAGES,
        max_bytes=MAX_BYTES,
    )


async def _load(engine: ModelEngine, side: int, at_a_time: int, seconds: float) -> tuple[int, float, float]:
    """Returns requests, and the seconds and CPU seconds that they took here."""
    message = np.random.default_rng(1).integers(0, 256, (1, side, side, 3), np.uint8)
    answered = 0
    began, cpu_s = time.perf_counter(), time.process_time()
    stops_at = began + seconds

    async def ask() -> None:
        nonlocal answered
        while time.perf_counter() < stops_at:
            with engine.admit(1, message.nbytes) as admitted:
                result = await admitted.run(EngineRequest((message,), Mode.XLA, math.inf))
            assert result.batches[0].outputs[0].shape == (1, CLASSES)
            answered += 1
            await asyncio.sleep(0)  # a front has other things to do: answers of one turn are not its next requests

    await asyncio.gather(*(ask() for _ in range(at_a_time)))
    return answered, time.perf_counter() - began, time.process_time() - cpu_s


async def _here(side: int, at_a_time: int, seconds: float) -> Run:
    batcher = _batcher(side)
    answered, took_s, cpu_s = await _load(batcher, side, at_a_time, seconds)
    await batcher.drain(0)
    batcher.worker.stop()
    return Run(answered / took_s, cpu_s / answered * US_PER_S, 0.0)


async def _serve(side: int, connection: socket.socket, control: Connection) -> None:
    batcher, host = _batcher(side), Host()
    output_bytes = {(side, side): (4 * CLASSES,)}
    snapshot = ModelSnapshot(
        id=1,
        title="noop",
        is_open=True,
        max_images=MAX_IMAGES,
        max_bytes=MAX_BYTES,
        output_bytes=output_bytes,
        largest=batcher.shapes(),
    )
    host.publish([Hosted(snapshot, batcher)])
    await host.accept(connection)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(control.fileno(), asked.set)
    for _ in range(2):
        await asked.wait()
        control.recv()
        asked.clear()
        control.send(time.process_time())
    await asked.wait()
    await host.close()
    await batcher.drain(0)
    batcher.worker.stop()


def _engine(side: int, connection: socket.socket, control: Connection) -> None:
    uvloop.run(_serve(side, connection, control))


async def _front(side: int, at_a_time: int, seconds: float, connection: socket.socket, control: Connection) -> Run:
    link = await connect(connection)
    (engine,) = link.models.values()
    before_s = _cpu_s(control)
    answered, took_s, cpu_s = await _load(engine, side, at_a_time, seconds)
    engine_s = _cpu_s(control) - before_s
    link.close()
    await link.lost()
    return Run(answered / took_s, cpu_s / answered * US_PER_S, engine_s / answered * US_PER_S)


def _cpu_s(control: Connection) -> float:
    control.send("cpu")
    return float(control.recv())


def _across(side: int, at_a_time: int, seconds: float) -> Run:
    context = get_context("spawn")
    here, there = socket.socketpair()
    control, other = context.Pipe()
    with here, there:
        process = context.Process(target=_engine, args=(side, there, other))
        process.start()
        try:
            run: Run = uvloop.run(_front(side, at_a_time, seconds, here, control))
            return run
        finally:
            control.send("end")
            process.join(10)
            process.kill()


def _alone(side: int, at_a_time: int, seconds: float) -> Run:
    run: Run = uvloop.run(_here(side, at_a_time, seconds))
    return run


def _cell(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.link", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=224)
    options = parser.parse_args()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {options.rounds} rounds of {options.seconds:g} s, side {options.side}"
    )
    print("| at a time | | requests/s | front, us | engine, us |\n|--:|---|--:|--:|--:|")
    for at_a_time in AT_A_TIME:
        arms: dict[str, Callable[[], Run]] = {
            "one process": partial(_alone, options.side, at_a_time, options.seconds),
            "across": partial(_across, options.side, at_a_time, options.seconds),
        }
        for name, runs in interleaved(arms, options.rounds).items():
            columns = " | ".join(_cell(list(column)) for column in zip(*runs, strict=True))
            print(f"| {at_a_time} | {name} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
