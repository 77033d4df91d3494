"""Runs the benchmarks, prints them and writes them as JSON. `python -m bench [--only NAME] [--json FILE] [--quick]`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from bench import processes
from bench.bucket_sets import bucket_sets
from bench.decode import decoding
from bench.figures import Figure, at_most, finish, ratio
from bench.generator import closed_loop, pixels_request
from bench.generator_ceiling import generator
from bench.observation import observation
from bench.options import numbers
from bench.overload import overload
from bench.plan import plan
from bench.reload import reload
from bench.rest import rest
from bench.stalls import stalls
from bench.trials import interleaved
from xlaserve.programs.tf.device import cpu_name

SIDE = 224
MODELS = {"ResNet50": 0.95, "MobileNetV2": 0.75}
"""Applications and the least share of their in-process throughput that is to be served, on cores that also run the
client. With a server and a client that only move the bytes, 0.88 is left for MobileNetV2."""
LEAST_IN_OPENVINO = 0.75
"""The same in OpenVINO and bfloat16."""
BUCKETS = (1, 4, 8)
OVERHEAD = {1: 0.8, 8: 0.85, 32: 0.85}
"""Requests in flight, and the least share of the bare servicer's requests/s."""
STARTS = 3
"""How often servers are started: one process may be slower than another of the same program for as long as it runs."""
MAX_GROWTH = 0.02
MEMORY_REQUESTS = 50_000
ALONE = {"overload", "plan"}
"""What runs only where it is asked for: it takes several minutes."""


def efficiency(
    blocks: int, block_s: float, buckets: Sequence[int] = BUCKETS, images_per_request: int = 1
) -> list[Figure]:
    """Images/s through gRPC at saturation over images/s of the same functions in process.

    Where OpenVINO is installed, in that too, in bfloat16.
    """
    figures = []
    fastest = {"openvino": LEAST_IN_OPENVINO} if importlib.util.find_spec("openvino") else {}
    for name, least in MODELS.items():
        modes: dict[str, float | None] = {"xla": least, "graph": None, **fastest}
        model = processes.application(name, modes=tuple(modes), buckets=buckets, openvino_precision="bfloat16")
        config = {"models": [model]}
        with processes.xlaserve(config) as server, processes.worker("bench.in_process", config) as (lanes, run):
            # Each lane has its largest batch running and another waiting.
            concurrency = max(1, 2 * max(buckets) * lanes // images_per_request)
            for mode, wanted in modes.items():
                payload = pixels_request("model", SIDE, mode, images_per_request)
                send = partial(closed_loop, server.address, payload, concurrency, seconds=block_s)
                loads = interleaved({"served": send, "alone": partial(run, mode, block_s)}, blocks)
                served = [load.per_s * images_per_request for load in loads["served"]]
                figures.append(ratio(f"efficiency {name} {mode}", served, loads["alone"], wanted))
                medians = f"{median(served):.1f} images/s served, {median(loads['alone']):.1f} in process"
                print(f"  {name} {mode}: {medians}", flush=True)
    return figures


def overhead(blocks: int, block_s: float) -> list[Figure]:
    """Requests/s of builtin:noop over those of the bare servicer, and processor time a request."""
    config = {"models": [{"name": "noop", "source": "builtin:noop", "buckets": (1, 2, 4, 8, 16, 32)}]}
    payload = pixels_request("noop", SIDE)
    runs: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for start in range(min(STARTS, blocks)):
        with (
            processes.xlaserve(config) as ours,
            processes.bare("uvloop") as uvloop,
            processes.bare("asyncio") as asyncio,
            processes.bare("threads") as threads,
        ):
            arms = {"noop": ours, "uvloop": uvloop, "asyncio": asyncio, "threads": threads}
            for concurrency in OVERHEAD:
                loads = {name: partial(_load, server, payload, concurrency, block_s) for name, server in arms.items()}
                for name, found in interleaved(loads, len(range(start, blocks, STARTS))).items():
                    runs[concurrency, name] += found
    figures = []
    for concurrency, least in OVERHEAD.items():
        rates, cpu_ms = ({name: [run[column] for run in runs[concurrency, name]] for name in arms} for column in (0, 1))
        for name in ("uvloop", "asyncio", "threads"):
            wanted = least if name == "uvloop" else None
            what = f"overhead requests/s at {concurrency}, noop / bare {name}"
            figures.append(ratio(what, rates["noop"], rates[name], wanted))
        what = f"overhead processor time at {concurrency}, noop / bare uvloop"
        figures.append(ratio(what, cpu_ms["noop"], cpu_ms["uvloop"], None))
    return figures


def _load(server: processes.Server, payload: bytes, concurrency: int, block_s: float) -> tuple[float, float]:
    """Returns requests/s, and milliseconds of processor time that the server took for each."""
    before_s = server.cpu_s()
    load = closed_loop(server.address, payload, concurrency, seconds=block_s)
    return load.per_s, (server.cpu_s() - before_s) / load.requests * 1000


def memory(requests: int) -> list[Figure]:
    """Resident size after many requests over that after warm-up."""
    config = {
        "models": [
            {"name": "digits", "source": "builtin:digits", "buckets": (1, 2, 4, 8, 16, 32)},
            {"name": "noop", "source": "builtin:noop", "buckets": (1, 2, 4, 8)},
        ]
    }
    figures = []
    with processes.xlaserve(config) as server:
        after_warm_up = server.resident_bytes()
        closed_loop(server.address, pixels_request("digits", 32), 16, requests=requests // 2)
        closed_loop(server.address, pixels_request("noop", SIDE), 16, requests=requests // 2)
        growth = server.resident_bytes() / after_warm_up
        figures.append(at_most(f"memory after {requests} requests / after warm-up", [growth], 1 + MAX_GROWTH))
    return figures


def main() -> None:
    """Runs the command; exits 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        choices=(
            "buckets",
            "decode",
            "efficiency",
            "generator",
            "memory",
            "observation",
            "overhead",
            "overload",
            "plan",
            "reload",
            "rest",
            "stalls",
        ),
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--buckets", type=numbers, default=BUCKETS)
    parser.add_argument("--images-per-request", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="shorter: shows that it runs, not what it says")
    options = parser.parse_args()
    blocks, block_s = (2, 1.0) if options.quick else (7, 5.0)
    requests = 2_000 if options.quick else MEMORY_REQUESTS
    benches: dict[str, Callable[[], list[Figure]]] = {
        "overhead": lambda: overhead(blocks, block_s),
        "observation": lambda: observation(blocks, block_s),
        "rest": lambda: rest(blocks, block_s),
        "decode": lambda: decoding(blocks, min(block_s, 2.0)),
        "generator": lambda: generator(blocks, block_s),
        "memory": lambda: memory(requests),
        "stalls": lambda: stalls(3 if options.quick else 7),
        "reload": lambda: reload(1 if options.quick else 5),
        "buckets": lambda: bucket_sets(blocks, requests // 50),
        "efficiency": lambda: efficiency(blocks, block_s, options.buckets, options.images_per_request),
        "overload": lambda: overload(blocks, block_s),
        "plan": lambda: plan(blocks, block_s),
    }
    print(f"{cpu_name()}, {os.cpu_count()} cores, {blocks} pairs of blocks of {block_s:g} s", flush=True)
    chosen = [options.only] if options.only else [name for name in benches if name not in ALONE]
    figures = (figure for name in chosen for figure in benches[name]())
    machine = {"processor": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}
    finish(options.json, figures, machine=machine)


if __name__ == "__main__":
    main()
