"""One process and several: `python -m bench.fronts [--json FILE] [--quick]`.

Requests of one image, 150 KB of pixels, to servers with no front, one and two, and to the bare servicer, in blocks that
take turns: requests/s over those of one process, and microseconds of processor time for a request, by role. Then
MobileNetV2's images/s over those of the same programs in process.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench import processes
from bench.figures import Figure, at_most, finish, ratio
from bench.generator import Load, closed_loop, pixels_request
from bench.processes import ENGINE, ENGINE_LOOP, OWN
from bench.trials import interleaved
from xlaserve.programs.tf.device import cpu_name

SIDE: Final = 224
FRONTS: Final = (0, 1, 2)
CONCURRENCY: Final = (1, 8, 32)
CONNECTIONS: Final = 8
"""Of each generator, so that hardly ever all meet one front."""
BUCKETS: Final = (1, 4, 8)
BARE: Final = "bare"
IN_PROCESS: Final = "in process"
ALL_FRONTS: Final = "fronts"
US_PER_S: Final = 1e6

BUSY: Final = 32
"""Requests in flight where the targets hold."""
MOST_ENGINE_LOOP_US: Final = 60.0
MOST_FRONT: Final = 1.15
"""A front's processor time over the bare servicer's."""
FEW_CORES: Final = 2
LEAST_SERVED: Final = {0: 0.80, 2: 0.95}
"""Fronts, and the least share of the in-process images/s: of one process on few cores, of two fronts on more."""

Generate = Callable[[str, bytes, int, float], Load]
"""Takes an address, a request, how many are in flight, and seconds."""


class Block(NamedTuple):
    """What a server did in a block."""

    per_s: float
    us: Mapping[str, float]
    """Microseconds of processor time for a request, by role."""


def name(fronts: int) -> str:
    """Returns how a server with so many fronts is called here."""
    return {0: "one process", 1: "1 front"}.get(fronts, f"{fronts} fronts")


def by_role(before_s: Mapping[str, float], after_s: Mapping[str, float], requests: int) -> dict[str, float]:
    """Returns microseconds for a request by role; those of all fronts are one, as a request meets one of them."""
    found: dict[str, float] = {}
    for process, used_s in before_s.items():
        role = ALL_FRONTS if process.startswith("front ") else process
        found[role] = found.get(role, 0.0) + (after_s[process] - used_s) / requests * US_PER_S
    return found


def compared(concurrency: int, blocks: Mapping[str, Sequence[Block]]) -> Iterator[Figure]:
    """Yields the figures of a number of requests in flight, from the blocks of each arm."""
    rates = {arm: [block.per_s for block in found] for arm, found in blocks.items()}
    alone, bare_us = name(0), [block.us[OWN] for block in blocks[BARE]]
    for arm in blocks:
        if arm != alone:
            yield ratio(f"requests/s at {concurrency}, {arm} / {alone}", rates[arm], rates[alone], None)
    for arm, found in blocks.items():
        for role in found[0].us:
            target = MOST_ENGINE_LOOP_US if role == ENGINE_LOOP and concurrency == BUSY else None
            whose = role if ALL_FRONTS in found[0].us else "all"
            if ALL_FRONTS in found[0].us and role == OWN:
                whose = "supervisor"
            used = [block.us[role] for block in found]
            yield at_most(f"us a request at {concurrency}, {arm}: {whose}", used, target)
    for arm, found in blocks.items():
        if ALL_FRONTS in found[0].us:
            over = [block.us[ALL_FRONTS] / us for block, us in zip(found, bare_us, strict=True)]
            target = MOST_FRONT if concurrency == BUSY else None
            yield at_most(f"processor time at {concurrency}, {arm}: a front / bare", over, target)


def least_served(fronts: int, cores: int) -> float | None:
    """Returns the least share of the in-process images/s that a server is to reach on so many cores."""
    return LEAST_SERVED.get(fronts) if (fronts == 0) == (cores <= FEW_CORES) else None


def noop(generate: Generate, blocks: int, block_s: float) -> Iterator[Figure]:
    """Yields what builtin:noop shows of each number of fronts."""
    payload = pixels_request("noop", SIDE)
    model = {"name": "noop", "source": "builtin:noop", "buckets": (1, 2, 4, 8, 16, 32)}
    with ExitStack() as stack:
        servers = {
            name(fronts): stack.enter_context(processes.xlaserve({"models": [model], "fronts": fronts}))
            for fronts in FRONTS
        }
        servers[BARE] = stack.enter_context(processes.bare("uvloop"))
        for concurrency in CONCURRENCY:
            arms = {arm: partial(block, generate, one, payload, concurrency, block_s) for arm, one in servers.items()}
            found = interleaved(arms, blocks)
            for arm, results in found.items():
                print(f"  {arm}, {concurrency} at once: {median(one.per_s for one in results):.0f} requests/s")
            yield from compared(concurrency, found)


def mobilenet(generate: Generate, blocks: int, block_s: float, buckets: Sequence[int]) -> Iterator[Figure]:
    """Yields the images/s of MobileNetV2, an image a request, over those in process."""
    payload = pixels_request("model", SIDE, "xla")
    with ExitStack() as stack:
        config = {
            "models": [processes.application("MobileNetV2", modes=("xla",), buckets=buckets)],
            "device": "cpu",
            "compile_cache": stack.enter_context(tempfile.TemporaryDirectory()),
        }
        servers = {
            name(fronts): stack.enter_context(processes.xlaserve({**config, "fronts": fronts})) for fronts in FRONTS
        }
        lanes, run = stack.enter_context(processes.worker("bench.in_process", config))
        concurrency = 2 * max(buckets) * lanes  # each lane has its largest batch running and another waiting
        arms: dict[str, Callable[[], Block]] = {
            arm: partial(block, generate, one, payload, concurrency, block_s) for arm, one in servers.items()
        }
        arms[IN_PROCESS] = lambda: Block(run("xla", block_s), {})
        found = interleaved(arms, blocks)
    rates = {arm: [block.per_s for block in results] for arm, results in found.items()}
    for arm, values in rates.items():
        print(f"  MobileNetV2, {arm}: {median(values):.1f} images/s")
    for fronts in FRONTS:
        least = least_served(fronts, os.cpu_count() or 1)
        yield ratio(f"MobileNetV2, {name(fronts)} / in process", rates[name(fronts)], rates[IN_PROCESS], least)
    for fronts in FRONTS[1:]:
        for role in (ALL_FRONTS, ENGINE):
            used = [block.us[role] for block in found[name(fronts)]]
            yield at_most(f"us an image, MobileNetV2, {name(fronts)}: {role}", used, None)


def block(generate: Generate, server: processes.Server, payload: bytes, concurrency: int, seconds: float) -> Block:
    """Sends requests for some seconds and returns what the server did."""
    before_s = server.cpu_s_by_role()
    load = generate(server.address, payload, concurrency, seconds)
    return Block(load.per_s, by_role(before_s, server.cpu_s_by_role(), load.requests))


@contextmanager
def generators(number: int) -> Iterator[Generate]:
    """Starts processes that send together what one is told to."""
    with ExitStack() as stack:
        crew = [stack.enter_context(processes.asked(_send)) for _ in range(number)]
        pool = stack.enter_context(ThreadPoolExecutor(number))

        def generate(address: str, payload: bytes, concurrency: int, seconds: float) -> Load:
            shares = [(address, payload, share, seconds) for share in shared(concurrency, number)]
            loads = list(pool.map(lambda ask, share: ask(share), crew, shares))
            return Load(sum(load.requests for load in loads), sum(load.counted for load in loads), seconds)

        yield generate


def shared(concurrency: int, number: int) -> list[int]:
    """Returns the requests in flight of each of at most `number` generators, of which none is idle."""
    parts = [concurrency // number + (at < concurrency % number) for at in range(number)]
    return [part for part in parts if part]


def _send(pipe: Connection) -> None:
    while True:
        share = pipe.recv()
        if share is None:
            pipe.send(None)
            continue
        address, payload, concurrency, seconds = share
        pipe.send(closed_loop(address, payload, concurrency, seconds=seconds, connections=CONNECTIONS))


def main() -> None:
    """Runs the command; exits 1 when a target is missed."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m bench.fronts", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/bench-fronts.json"))
    parser.add_argument("--generators", type=int, default=max(1, cores // 4), help="processes that send; %(default)s")
    parser.add_argument("--quick", action="store_true", help="shorter: shows that it runs, not what it says")
    options = parser.parse_args()
    blocks, block_s, buckets = (2, 0.5, (1, 8)) if options.quick else (5, 3.0, BUCKETS)
    print(f"{cpu_name()}, {cores} cores, {blocks} blocks of {block_s:g} s, {options.generators} generators", flush=True)

    def figures() -> Iterator[Figure]:
        with generators(options.generators) as generate:
            yield from noop(generate, blocks, block_s)
            yield from mobilenet(generate, blocks, block_s, buckets)

    finish(
        options.json, figures(), machine={"processor": cpu_name(), "cores": cores, "python": platform.python_version()}
    )


if __name__ == "__main__":
    main()
