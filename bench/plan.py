"""How near `xlaserve plan` comes: the latencies that it expects of a server beside those of the server.

Requests come at random times at shares of the measured capacity. The timed model leaves the processor to server and
generator; MobileNetV2 shares it with both, on one lane of a machine with two cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import grpc
import numpy as np

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import RAMP, closed_loop, open_loop, pixels_request
from xlaserve.commands.plan import FRONT_MS, SPREAD, measured
from xlaserve.commands.remote import list_models, ready_model
from xlaserve.oracle.device import Profile
from xlaserve.oracle.load import poisson
from xlaserve.oracle.simulation import simulate

SIDE: Final = 224
SHARES: Final = (0.3, 0.6, 0.8)
PERCENTS: Final = (50, 99)
DEADLINE_S: Final = 10.0
BLOCK_FACTOR: Final = 4
"""Blocks are so many times longer than usual: a 99th percentile needs requests."""


def plan(blocks: int, block_s: float) -> list[Figure]:
    """Expected over measured p50 and p99 at three loads, for two models."""
    buckets = (1, 2, 4, 8)
    timed = {"models": [{"name": "model", "source": "builtin:noop", "buckets": buckets}], "lanes": 1}
    mobile = {"models": [processes.application("MobileNetV2", modes=("xla",), buckets=buckets)], "lanes": 1}
    return [
        *_of("timed model", timed, blocks, block_s, "bench.timed_model", spread=0.0),
        *_of("MobileNetV2", mobile, blocks, block_s, "xlaserve", spread=SPREAD),
    ]


def _of(
    name: str, config: Mapping[str, object], blocks: int, block_s: float, module: str, *, spread: float
) -> list[Figure]:
    payload = pixels_request("model", SIDE)
    seconds = block_s * BLOCK_FACTOR
    with processes.xlaserve(config, module=module) as server:
        capacity = closed_loop(server.address, payload, 32, seconds=block_s).per_s
        answer = list_models(server.address)
        model = ready_model(answer.models, "", server.address)
        costs = measured(model, model.default_mode)
        profile = Profile(costs, answer.lanes, front_s=FRONT_MS / 1000, spread=spread)
        print(f"  {name}: {capacity:.1f} images/s at saturation, {profile.capacity:.1f} expected", flush=True)
        figures = []
        for share in SHARES:
            measured_s = [_latencies_s(server.address, payload, share * capacity, seconds) for _ in range(blocks)]
            expected = simulate(profile, 1, poisson(share * capacity, seconds * blocks, 1, seed=0))
            for percent in PERCENTS:
                seen = [float(np.percentile(block, percent)) for block in measured_s]
                label = f"p{percent} expected / measured at {share:.0%} of capacity, {name}"
                figures.append(ratio(label, [expected.percentile_s(percent)] * blocks, seen, None))
    return figures


def _latencies_s(address: str, payload: bytes, rate: float, seconds: float) -> list[float]:
    answered = open_loop(address, [payload], rate, (1 + RAMP) * seconds, DEADLINE_S)
    return [
        one.seconds if one.status is grpc.StatusCode.OK else math.inf for one in answered if one.due_s >= RAMP * seconds
    ]
