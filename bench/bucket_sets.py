"""The same demand run in two sets of buckets, on one lane: what was chosen, and powers of two."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.figures import Figure, ratio
from xlaserve.config import Settings
from xlaserve.engine.buckets.choice import OVERHEAD_S, Candidate, Limits, choose, expected_cost_s, powers_of_two
from xlaserve.engine.buckets.demand import Demand, even
from xlaserve.engine.buckets.planner import Sequences
from xlaserve.engine.program import Warmed
from xlaserve.runtimes.tf.device import configure
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
        command = (sys.executable, "-m", "bench.bucket_sets", json.dumps({"models": [model]}))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin
            assert process.stdout
            about = json.loads(process.stdout.readline())
            for kind, chosen in about.items():
                seconds: dict[str, list[float]] = {"powers": [], "chosen": []}
                for block in range(blocks):
                    for name in list(seconds)[:: 1 if block % 2 == 0 else -1]:
                        process.stdin.write(f"{kind} {name} {block} {demands}\n")
                        process.stdin.flush()
                        seconds[name].append(float(process.stdout.readline()))
                name = f"buckets {chosen['buckets']}, {kind} demand, {source.split(':')[1]}"
                name = f"{name} (expected {chosen['gain']:.3f})"
                figures.append(ratio(name, seconds["powers"], seconds["chosen"], None))
            process.stdin.close()
    return figures


def main() -> None:
    """Measures the candidates of the configuration's model, says what it chooses for each of DEMANDS, then runs the
    sets as each line of stdin says."""
    settings = Settings.model_validate(json.loads(sys.argv[1]))
    quiet_tensorflow()
    device = configure(settings, uses_tensorflow=True)
    (of_model,) = settings.models
    limits = of_model.auto_buckets
    _, warmed = warm(of_model, device.lanes)
    (size,) = {bucket[1:] for _, bucket in warmed}
    programs = {bucket.batch: program for (_, bucket), program in warmed.items()}
    cost_s = {batch: program.cost.loaded_s + OVERHEAD_S for batch, program in programs.items()}
    powers = {batch: cost_s[batch] for batch in powers_of_two(limits.max_batch)}
    demands: dict[str, Demand] = {}
    sets: dict[tuple[str, str], dict[int, float]] = {}
    about = {}
    for kind, recorded in DEMANDS.items():
        demand = demands[kind] = Demand(recorded) if recorded else even(2 * limits.max_batch)
        best = choose([Candidate(*item) for item in cost_s.items()], demand, Limits(limits.max_buckets))
        chosen = {one.batch: one.cost_s for one in best}
        sets |= {(kind, "chosen"): chosen, (kind, "powers"): powers}
        about[kind] = {
            "buckets": list(chosen),
            "gain": expected_cost_s(powers, demand) / expected_cost_s(chosen, demand),
        }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        kind, name, seed, draws = line.split()
        drawn = _draw(demands[kind], int(seed), int(draws))
        print(run_s(Sequences(sets[kind, name]), programs, drawn, size), flush=True)


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


if __name__ == "__main__":
    main()
