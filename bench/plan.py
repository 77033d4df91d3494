"""How near `xlaserve plan` comes: the latencies that it expects of a server beside those that `loadtest` measures.

`loadtest` sends requests at random times at shares of the measured capacity, and saves when; the simulation replays
that. From another load before, and then from each for the next, the server learns what batches take: no load is
foreseen from itself. What is said in hindsight is: it is off by what the simulation does not know, and the other by
what has changed since as well. What `loadtest` finds that a server which does nothing takes is added to what is
expected, as `--outside-ms` would.

The timed model leaves the processor to server and load tester. MobileNetV2 shares two cores with both, on one lane of
one thread.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import closed_loop, pixels_request
from xlaserve.commands.measured import Measured, measured
from xlaserve.commands.remote import list_models, ready_model
from xlaserve.planning.load import Load, read_trace
from xlaserve.planning.simulation import simulate
from xlaserve_loadtest.schedule.early_stopping import least_requests

SIDE: Final = 224
SHARES: Final = (0.3, 0.6, 0.8)
LEARNING: Final = 0.5
"""The share of the capacity that comes before them, from which the server learns what batches of all buckets take."""
PERCENTS: Final = (50, 99)
DEADLINE_S: Final = 10.0
BLOCK_FACTOR: Final = 5
"""Blocks are so many times longer than usual: a 99th percentile needs requests."""
WARM_UP: Final = 0.2
"""The share of a block's time for which the load comes before it counts."""
ONE_THREAD: Final = {"lanes": 1, "threads_per_lane": 1}
"""On a machine with two cores, the event loop and the load tester have the other one."""
MOST_BLOCKS: Final = 3
LEAST_REQUESTS: Final = 2 * least_requests(max(PERCENTS))
"""Of each block: twice as many as `loadtest` asks for to state the highest percentile."""


class _Measured(NamedTuple):
    """What `loadtest` saw of one load."""

    load: Load
    latencies_s: Mapping[int, float]
    """By percent."""
    own_s: float
    """What of each latency is not the server's."""


def plan(blocks: int, block_s: float) -> list[Figure]:
    """Expected over measured p50 and p99 at three loads, for two models."""
    buckets, blocks, seconds = (1, 2, 4, 8), min(blocks, MOST_BLOCKS), BLOCK_FACTOR * block_s
    timed = {"models": [{"name": "model", "source": "builtin:noop", "buckets": buckets}], "lanes": 1}
    mobile = {"models": [processes.application("MobileNetV2", modes=("xla",), buckets=buckets)], **ONE_THREAD}
    return [
        *_of("timed model", timed, blocks, seconds, "bench.timed_model"),
        *_of("MobileNetV2", mobile, blocks, seconds, "xlaserve"),
    ]


def _of(name: str, config: Mapping[str, object], blocks: int, seconds: float, module: str) -> list[Figure]:
    with processes.xlaserve(config, module=module) as server:
        capacity = closed_loop(server.address, pixels_request("model", SIDE), 32, seconds=seconds / 4).per_s
        print(f"  {name}: {capacity:.1f} images/s at saturation", flush=True)
        figures = []
        _loadtest(server.address, LEARNING * capacity, seconds, len(SHARES) * blocks)
        for share in SHARES:
            before = _learned(server.address)
            print(f"  {share:.0%}: {_in_words(before)}", flush=True)
            long_enough = max(seconds, LEAST_REQUESTS / (share * capacity))
            seen = [_loadtest(server.address, share * capacity, long_enough, seed) for seed in range(blocks)]
            for when, known in (("expected", before), ("in hindsight", _learned(server.address))):
                expected = [
                    simulate(dataclasses.replace(known.profile, outside_s=it.own_s), 1, it.load, deadline_s=DEADLINE_S)
                    for it in seen
                ]
                for percent in PERCENTS:
                    label = f"p{percent} {when} / measured at {share:.0%} of capacity, {name}"
                    theirs = [it.latencies_s[percent] for it in seen]
                    figures.append(ratio(label, [it.percentile_s(percent) for it in expected], theirs, None))
    return figures


def _loadtest(address: str, rate: float, seconds: float, seed: int) -> _Measured:
    """Has `loadtest` send `rate` requests/s to the server in one block, as its users would."""
    with tempfile.TemporaryDirectory() as folder:
        arrivals, report = Path(folder, "arrivals.jsonl"), Path(folder, "report.json")
        command = [sys.executable, "-m", "xlaserve_loadtest", "--target", address, "--model", "model"]
        command += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--block", f"{seconds:g}", "--full-duration"]
        command += ["--warmup", f"{WARM_UP * seconds:g}", "--deadline", f"{DEADLINE_S:g}", "--seed", str(seed)]
        command += ["--no-control", "--equality-images", "0", "--out", folder]
        command += ["--save-arrivals", str(arrivals), "--json", str(report), "--fail-if", "errors>1%"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (run,) = json.loads(report.read_text())["runs"]
        (point,) = run["points"]
        values_ms = {it["percentile"]: it["value_ms"] for it in point["percentiles"]}
        latencies_s = {percent: values_ms[percent] / 1000 for percent in PERCENTS}
        return _Measured(read_trace(arrivals), latencies_s, point["generator"]["own_ms"] / 1000)


def _in_words(known: Measured) -> str:
    profile = known.profile
    costs = ", ".join(f"{batch}: {cost.alone_s * 1000:.1f} ms" for batch, cost in profile.costs.items())
    return (
        f"at most {profile.capacity:.1f} images/s, {profile.front_s * 1000:.2f} ms of the event loop for a request, "
        f"costs of {known.batches} batches, uncertain by {known.error:.0%}: {costs}"
    )


def _learned(address: str) -> Measured:
    """Returns what the server has learned by now."""
    answer = list_models(address)
    model = ready_model(answer.models, "", address)
    return measured(answer, model, model.default_mode)
