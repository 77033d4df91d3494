"""Time to ready: `make bench-start`, or `python -m bench.start [--model NAME] [--rounds N] [--side PIXELS] [--quick]`.

Each round starts a server three times, from the start of its process to its ready file: without a compile cache, with
an empty one, and with the one that the second has filled. All start cold but for the operating system's file cache. The
answers of the last two have to be identical, to the bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.figures import Figure, at_most, finish
from bench.generator import answer, pixels_request
from bench.processes import application, xlaserve
from xlaserve.programs.tf.device import cpu_name
from xlaserve_client import VisionClient

BUCKETS = (1, 2, 4, 8, 16)
MAX_SECOND_START = 0.35
"""Largest share of the first start's time that the second may take."""


class Start(NamedTuple):
    """One start of a server."""

    ready_s: float
    cpu_s: float
    loaded: int
    """Programs that came from the cache."""
    answers: tuple[bytes, ...]
    """Answers for as many images as each bucket has."""


def start(model: str, side: int | None, cache: Path | None) -> Start:
    """Starts a server, asks it, and stops it."""
    size = {} if side is None else {"input_size": (side, side)}
    config = {
        "models": [application(model, buckets=BUCKETS, **size)],
        "compile_cache": None if cache is None else str(cache),
    }
    began = time.perf_counter()
    with xlaserve(config, poll_s=0.005) as server:
        ready_s, cpu_s = time.perf_counter() - began, server.cpu_s()
        with VisionClient(server.address) as client:
            (described,) = client.models()
        side = described.buckets[0].height
        answers = tuple(answer(server.address, pixels_request("model", side, images=images)) for images in BUCKETS)
    return Start(ready_s, cpu_s, sum(program.from_cache for program in described.programs), answers)


def measure(model: str, side: int | None, rounds: int) -> tuple[list[Figure], list[str]]:
    """Returns the figures, and what went wrong."""
    starts: dict[str, list[Start]] = {"without": [], "first": [], "second": []}
    defects = []
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            for arm, cache in (("without", None), ("first", Path(folder)), ("second", Path(folder))):
                one = start(model, side, cache)
                starts[arm].append(one)
                print(f"  round {number}, {arm:<7}: ready in {one.ready_s:.2f} s, {one.cpu_s:.2f} CPU s", flush=True)
        first, second = starts["first"][-1], starts["second"][-1]
        if (first.loaded, second.loaded) != (0, len(BUCKETS)):
            defects.append(f"round {number}: {first.loaded} and {second.loaded} programs came from the cache")
        if first.answers != second.answers:
            defects.append(f"round {number}: the answers differ")
    name = f"time to ready, {model}, {len(BUCKETS)} buckets"
    return [
        _ratio(f"{name}: second / first start", starts["second"], starts["first"], MAX_SECOND_START),
        _ratio(f"{name}: second / without cache", starts["second"], starts["without"], None),
        _ratio(f"{name}: first / without cache", starts["first"], starts["without"], None),
    ], defects


def _ratio(name: str, ours: Sequence[Start], theirs: Sequence[Start], most: float | None) -> Figure:
    return at_most(name, [one.ready_s / other.ready_s for one, other in zip(ours, theirs, strict=True)], most)


def main() -> None:
    """Runs the command; exits 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, help="height and width of the images; the model's own by default")
    parser.add_argument("--json", type=Path, default=Path("build/bench-start.json"))
    parser.add_argument("--quick", action="store_true", help="smaller: shows that it runs, not what it says")
    options = parser.parse_args()
    rounds, side = (1, options.side or 64) if options.quick else (options.rounds, options.side)
    print(f"{cpu_name()}, {os.cpu_count()} cores, {rounds} rounds", flush=True)
    figures, defects = measure(options.model, side, rounds)
    for defect in defects:
        print(defect)
    machine = {"processor": cpu_name(), "cores": os.cpu_count()}
    finish(options.json, figures, is_sound=not defects, machine=machine, defects=defects)


if __name__ == "__main__":
    main()
