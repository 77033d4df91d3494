"""How near `xlaserve plan` comes: the latencies that it expects of a server beside those of the server.

Requests come at random times at shares of the measured capacity, which a flood shows first. From another load, and then
from each for the next, the server learns what batches take: no load is foreseen from itself. What is said in hindsight
is: it is off by what the simulation does not know, and the other by what has changed since as well.

The timed model leaves the processor to server and generator; MobileNetV2 shares it with both, on one lane of a machine
with two cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import grpc
import numpy as np

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import RAMP, Answered, at_random, closed_loop, pixels_request, replay
from xlaserve.commands.measured import Measured, measured
from xlaserve.commands.remote import list_models, ready_model
from xlaserve.oracle.load import Load
from xlaserve.oracle.simulation import WARM_UP, simulate

SIDE: Final = 224
SHARES: Final = (0.3, 0.6, 0.8)
LEARNING: Final = 0.5
"""The share of the capacity that comes before them, from which the server learns what batches of all buckets take."""
PERCENTS: Final = (50, 99)
DEADLINE_S: Final = 10.0
BLOCK_FACTOR: Final = 4
"""Blocks are so many times longer than usual: a 99th percentile needs requests."""
MOST_BLOCKS: Final = 3


def plan(blocks: int, block_s: float) -> list[Figure]:
    """Expected over measured p50 and p99 at three loads, for two models."""
    buckets, blocks = (1, 2, 4, 8), min(blocks, MOST_BLOCKS)
    timed = {"models": [{"name": "model", "source": "builtin:noop", "buckets": buckets}], "lanes": 1}
    mobile = {"models": [processes.application("MobileNetV2", modes=("xla",), buckets=buckets)], "lanes": 1}
    return [
        *_of("timed model", timed, blocks, block_s, "bench.timed_model"),
        *_of("MobileNetV2", mobile, blocks, block_s, "xlaserve"),
    ]


def _of(name: str, config: Mapping[str, object], blocks: int, block_s: float, module: str) -> list[Figure]:
    payload = pixels_request("model", SIDE)
    seconds = (1 + RAMP) * block_s * BLOCK_FACTOR
    with processes.xlaserve(config, module=module) as server:
        capacity = closed_loop(server.address, payload, 32, seconds=block_s).per_s
        print(f"  {name}: {capacity:.1f} images/s at saturation", flush=True)
        figures = []
        replay(server.address, [payload], at_random(LEARNING * capacity, seconds, len(SHARES) * blocks), DEADLINE_S)
        for share in SHARES:
            loads = [at_random(share * capacity, seconds, seed) for seed in range(blocks)]
            known = _learned(server.address)
            profile = known.profile
            print(
                f"  {share:.0%}: at most {profile.capacity:.1f} images/s, {profile.front_s * 1000:.2f} ms of the event "
                f"loop for a request, costs of {known.batches} batches, uncertain by {known.error:.0%}: "
                + ", ".join(f"{batch}: {cost.alone_s * 1000:.1f} ms" for batch, cost in profile.costs.items()),
                flush=True,
            )
            seen = [_latencies_s(replay(server.address, [payload], load, DEADLINE_S)) for load in loads]
            for when, costs in (("expected", profile), ("in hindsight", _learned(server.address).profile)):
                expected = [simulate(costs, 1, _load(load), deadline_s=DEADLINE_S) for load in loads]
                for percent in PERCENTS:
                    label = f"p{percent} {when} / measured at {share:.0%} of capacity, {name}"
                    theirs = [float(np.percentile(block, percent, method="inverted_cdf")) for block in seen]
                    figures.append(ratio(label, [it.percentile_s(percent) for it in expected], theirs, None))
    return figures


def _learned(address: str) -> Measured:
    """Returns what the server has learned by now."""
    answer = list_models(address)
    model = ready_model(answer.models, "", address)
    return measured(answer, model, model.default_mode)


def _load(at_s: Sequence[float]) -> Load:
    return Load(np.array(at_s), np.ones(len(at_s), np.int64))


def _latencies_s(answered: Sequence[Answered]) -> list[float]:
    """Returns what the requests took that come after the simulation's own warm-up."""
    ordered = sorted(answered, key=lambda it: it.due_s)[int(WARM_UP * len(answered)) :]
    return [it.seconds if it.status is grpc.StatusCode.OK else math.inf for it in ordered]
