"""The same demand run in two sets of buckets, on one lane: what was chosen, and powers of two."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from bench import processes
from bench.figures import Figure, ratio
from bench.trials import interleaved
from xlaserve.config import Settings
from xlaserve.engine.buckets.choice import OVERHEAD_S, Candidate, Limits, choose, expected_cost_s, powers_of_two
from xlaserve.engine.buckets.demand import Demand, even
from xlaserve.engine.buckets.planner import Sequences
from xlaserve.engine.program import Warmed
from xlaserve.programs.tf.device import configure
from xlaserve.telemetry.logs import quiet_tensorflow
from xlaserve_loadtest.targets.in_process import warm

SEED = 5
RECORDED = {1: 3146, 2: 150, 3: 252, 4: 200, 5: 195, 6: 168, 7: 133, 8: 352, 9: 8}
"""Images by demand, as `xlaserve buckets` gave them for a server under 13 clients, each with one request at a time."""
MODELS: dict[str, dict[str, object]] = {
    "builtin:digits": {},
    "keras.applications:MobileNetV2": {"weights": "random", "input_size": (96, 96)},
}
DEMANDS: dict[str, dict[int, int]] = {"recorded": RECORDED, "default": {}}


def bucket_sets(blocks: int, demands: int) -> list[Figure]:
    """Seconds with powers of two over seconds with the chosen set, for the same demands."""
    figures = []
    for source, fields in MODELS.items():
        model = {"name": "model", "source": source, "modes": ["xla"], "buckets": "auto", **fields}
        with processes.worker("bench.bucket_sets", {"models": [model]}) as (about, run):
            for kind, chosen in about.items():
                arms = {name: partial(_next, run, kind, name, demands, count()) for name in ("powers", "chosen")}
                seconds = interleaved(arms, blocks)
                name = f"buckets {chosen['buckets']}, {kind} demand, {source.split(':')[1]}"
                name = f"{name} (expected {chosen['gain']:.3f})"
                figures.append(ratio(name, seconds["powers"], seconds["chosen"], None))
    return figures


def _next(run: Callable[..., float], kind: str, name: str, demands: int, seeds: Iterator[int]) -> float:
    return run(kind, name, demands, next(seeds))


def begin(config: Mapping[str, object]) -> tuple[dict[str, dict[str, Any]], Callable[..., float]]:
    """Measures the candidates of the configuration's model; returns what it chooses for each of DEMANDS, and what runs
    one of the sets and returns seconds."""
    settings = Settings.model_validate(config)
    quiet_tensorflow()
    device = configure(settings, uses_tensorflow=True)
    (of_model,) = settings.models
    limits = of_model.auto_buckets
    _, warmed = warm(of_model, device.lanes)
    (size,) = {bucket[1:] for _, bucket in warmed}
    programs = {bucket.batch: program for (_, bucket), program in warmed.items()}
    cost_s = {batch: program.cost.loaded_s + OVERHEAD_S for batch, program in programs.items()}
    powers = {batch: cost_s[batch] for batch in powers_of_two(limits.max_batch)}
    demands = {kind: Demand(known) if known else even(2 * limits.max_batch) for kind, known in DEMANDS.items()}
    sets: dict[tuple[str, str], dict[int, float]] = {}
    about = {}
    for kind, demand in demands.items():
        best = choose([Candidate(*item) for item in cost_s.items()], demand, Limits(limits.max_buckets))
        chosen = {one.batch: one.cost_s for one in best}
        sets |= {(kind, "chosen"): chosen, (kind, "powers"): powers}
        gain = expected_cost_s(powers, demand) / expected_cost_s(chosen, demand)
        about[kind] = {"buckets": list(chosen), "gain": gain}

    def run(kind: str, name: str, draws: int, seed: int) -> float:
        return run_s(Sequences(sets[kind, name]), programs, _draw(demands[kind], seed, draws), size)

    return about, run


def run_s(sequences: Sequences, programs: dict[int, Warmed], demands: Sequence[int], size: tuple[int, ...]) -> float:
    """Returns the seconds that the executables take to run `demands`, each by its cheapest sequence."""
    images = {batch: np.random.default_rng(SEED).integers(0, 256, (batch, *size, 3), np.uint8) for batch in programs}
    began = time.perf_counter()
    for n in demands:
        for batch in sequences.buckets(n):
            programs[batch].executable(images[batch])
    return time.perf_counter() - began


def _draw(demand: Demand, seed: int, demands: int) -> list[int]:
    """Draws demands as often as they occur, which is for each n the images that met it over n."""
    sizes = sorted(demand)
    return random.Random(seed).choices(sizes, weights=[demand[n] / n for n in sizes], k=demands)
