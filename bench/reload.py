"""What a reload costs the neighbours: a paced load on one model while another, real one, is loaded again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import numpy as np

from bench import processes
from bench.figures import Figure, at_most
from bench.generator import DEADLINE_S, METHOD, pixels_request
from xlaserve_proto import open_inference_pb2 as pb

LOAD: Final = "/inference.GRPCInferenceService/RepositoryModelLoad"
MODEL: Final = processes.application("MobileNetV2", buckets=(1, 4, 8))
RATE_PER_S: Final = 100
MAX_SLOWER: Final = 1.5
MAX_STALL_MS: Final = 20.0
MIN_S: Final = 10.0
"""How long the neighbour is watched alone, before each reload."""


def reload(rounds: int) -> list[Figure]:
    """The neighbour's p99 while a MobileNetV2 is loaded again, over its p99 alone, and its longest stall.

    Any computation takes processors from the neighbour: a third arm has a loop in a process of its own, which runs
    only while a processor is idle. That is the least that any work costs.
    """
    config = {"models": [MODEL, {"name": "neighbour", "source": "builtin:digits", "buckets": (1, 2, 4, 8)}]}
    slower, slower_than_loop, stalls = [], [], []
    with processes.xlaserve(config) as server, grpc.insecure_channel(server.address) as channel:
        load: Callable[..., bytes] = channel.unary_unary(LOAD)
        request = pb.RepositoryModelLoadRequest(model_name="model").SerializeToString()
        for _ in range(rounds):
            with processes.asked(_neighbour, server.address) as latencies_ms:
                time.sleep(MIN_S)
                quiet_ms = np.array(latencies_ms())
                began = time.perf_counter()
                load(request, timeout=DEADLINE_S)
                took_s = time.perf_counter() - began
                time.sleep(1.0)  # what served is freed
                during_ms = np.array(latencies_ms())
                with _idle_loop():
                    latencies_ms()
                    time.sleep(MIN_S)
                    loop_ms = np.array(latencies_ms())
            quiet, during, loop = (np.percentile(each, 99) for each in (quiet_ms, during_ms, loop_ms))
            print(
                f"  reloaded in {took_s:.1f} s: p99 {quiet:.1f} ms alone, {during:.1f} meanwhile, {loop:.1f} beside an"
                f" idle loop; longest {quiet_ms.max():.1f}, {during_ms.max():.1f} and {loop_ms.max():.1f} ms",
                flush=True,
            )
            slower.append(float(during / quiet))
            slower_than_loop.append(float(during / loop))
            stalls.append(float(during_ms.max() - np.median(quiet_ms)))
    return [
        at_most("reload: neighbour's p99 / alone", slower, MAX_SLOWER),
        at_most("reload: neighbour's p99 / beside a loop that runs when idle", slower_than_loop, None),
        at_most("reload: longest stall of the neighbour, ms", stalls, MAX_STALL_MS),
    ]


@contextmanager
def _idle_loop() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            yield
        finally:
            process.kill()


def _neighbour(address: str, pipe: Connection) -> None:
    """Sends RATE_PER_S requests a second, and answers with the milliseconds of each, from when it was due."""
    payload = pixels_request("neighbour", 32)
    latencies_ms: list[float] = []
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., Any] = channel.unary_unary(METHOD).future
        call(payload, timeout=DEADLINE_S, wait_for_ready=True).result()
        due = time.perf_counter()

        def answered(due: float, future: Any) -> None:
            future.result()
            latencies_ms.append((time.perf_counter() - due) * 1000)

        while True:
            due += 1 / RATE_PER_S
            time.sleep(max(0.0, due - time.perf_counter()))
            call(payload, timeout=DEADLINE_S).add_done_callback(partial(answered, due))
            if pipe.poll():
                pipe.recv()
                sent, latencies_ms[:] = latencies_ms[:], []
                pipe.send(sent)
