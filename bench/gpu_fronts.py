"""What fronts bring a GPU: `python -m bench.gpu_fronts [--quick]`, which is `make bench-gpu-fronts`.

Requests of one image each, as pixels and as JPEG, from several generators to servers with no front, one, two and more,
in blocks that take turns: ResNet50 in float32, TF32 and bfloat16, beside the same programs in process, and
`builtin:noop`, which leaves what the processes themselves carry. Writes the table into docs/gpu.md; only from a GPU,
and only from a whole run. What there is of it until then is in build/. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from bench import gpu, processes
from bench.figures import Figure, at_least, at_most, finish, ratio
from bench.fronts import ALL_FRONTS, IN_PROCESS, SIDE, Block, Generate, block, generators, name
from bench.generator import image_request, pixels_request
from bench.options import numbers
from bench.processes import ENGINE, OWN
from bench.trials import interleaved
from xlaserve.models.fast_decoding import encode, photograph
from xlaserve_loadtest.reports import markdown
from xlaserve_loadtest.reports.table import Cell, Number, Table

TARGET: Final = "bench-gpu-fronts"
NOOP: Final = "builtin:noop"
PIXELS: Final = "pixels"
JPEG: Final = "JPEG"
PHOTOGRAPH: Final = (375, 500)
"""Height and width of the JPEG, as data sets have them."""
LANES: Final = gpu.LANES

LEAST_SERVED: Final = 0.9
"""Of the images/s in process, the least that the best number of fronts is to serve of single images of pixels."""
LEAST_REQUESTS_PER_S: Final = 10_000.0
"""Requests/s of builtin:noop that the best number of fronts is to carry."""


class Plan(NamedTuple):
    """What is measured."""

    model: str
    """An application of Keras."""
    side: int
    variants: Sequence[gpu.Variant]
    fronts: Sequence[int]
    buckets: Sequence[int]
    blocks: int
    block_s: float

    @property
    def concurrency(self) -> int:
        """Requests under way: each lane has its largest batch running and another waiting."""
        return 2 * max(self.buckets) * LANES


class Row(NamedTuple):
    """One program that is asked in one way."""

    program: str
    numbers: str
    """What it computes in."""
    asked: str
    """As pixels or as JPEG."""
    in_process: Sequence[float]
    """Images/s of each block; none where the program takes next to nothing."""
    served: Mapping[int, Sequence[Block]]
    """Blocks by fronts."""

    @property
    def best(self) -> int:
        """The number of fronts with the most requests/s."""
        return max(self.served, key=lambda fronts: median(self.rates(fronts)))

    def rates(self, fronts: int) -> list[float]:
        """Returns the requests/s, and so images/s, of each block."""
        return [one.per_s for one in self.served[fronts]]


WHOLE: Final = Plan("ResNet50", 224, gpu.VARIANTS, (0, 1, 2, 4, 8, 12), (1, 2, 4, 8, 16, 32, 64, 128), 5, 5.0)
QUICK: Final = Plan("MobileNet", 32, gpu.VARIANTS[:1], (0, 2), (1, 4), 2, 0.5)


def measure(generate: Generate, plan: Plan, device: str) -> Iterator[Row]:
    """Measures one program after the other, asked in both ways."""
    noop = {"name": "model", "source": NOOP, "buckets": plan.buckets}
    yield from _rows(generate, plan, (NOOP, ""), {"models": [noop]}, SIDE)
    for variant in plan.variants:
        model = processes.application(
            plan.model, modes=("xla",), input_size=(plan.side, plan.side), buckets=plan.buckets, **variant.model
        )
        config = {"device": device, "lanes": LANES, "models": [model], **variant.server}
        yield from _rows(generate, plan, (plan.model, variant.name), config, plan.side)


def figures_of(row: Row) -> Iterator[Figure]:
    """Yields what a row says beside its targets."""
    what = " ".join(part for part in (row.program, row.numbers, row.asked) if part)
    best, rates = row.best, row.rates(row.best)
    is_aim = row.asked == PIXELS
    if row.in_process:
        yield ratio(f"{what}: {name(best)} / in process", rates, row.in_process, LEAST_SERVED if is_aim else None)
    else:
        yield at_least(f"{what}: requests/s, {name(best)}", rates, LEAST_REQUESTS_PER_S if is_aim else None)
    for fronts, blocks in row.served.items():
        roles = (ALL_FRONTS, ENGINE) if fronts else (OWN,)
        for role in roles:
            used = [one.us[role] for one in blocks]
            yield at_most(f"{what}: us a request, {name(fronts)}: {role}", used, None)


def report(rows: Iterable[Row], plan: Plan, machine: str, senders: int) -> str:
    """Returns the table as Markdown."""
    cells: Iterator[Mapping[str, Cell]] = (
        {
            "program": row.program,
            "numbers": row.numbers or None,
            "image": row.asked,
            "in process": round(median(row.in_process)) if row.in_process else None,
            **{name(fronts): _shown(row.rates(fronts)) for fronts in plan.fronts},
        }
        for row in rows
    )
    lines = [
        f"{machine}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}. Random weights, {LANES} lanes.",
        "",
        f"Requests/s, which are images/s: each has one image of {plan.side}x{plan.side} pixels, or one JPEG of",
        f"{PHOTOGRAPH[1]}x{PHOTOGRAPH[0]}. {plan.concurrency} requests in flight from {senders} generators on the same",
        f"machine; the median of {plan.blocks} interleaved blocks of {plan.block_s:g} s (least to most).",
        f"Buckets: {', '.join(map(str, plan.buckets))}. In process: the same programs at their best bucket.",
        "",
        *markdown.lines(Table.of(cells)),
    ]
    return "\n".join(lines) + "\n"


def _shown(rates: Sequence[float]) -> Number:
    return Number(f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")


def _rows(
    generate: Generate, plan: Plan, program: tuple[str, str], config: Mapping[str, Any], side: int
) -> Iterator[Row]:
    payloads = {
        PIXELS: pixels_request("model", side),
        JPEG: image_request("model", encode(photograph(*PHOTOGRAPH))),
    }
    with ExitStack() as stack:
        cached = {**config, "compile_cache": stack.enter_context(tempfile.TemporaryDirectory())}
        opened = {fronts: processes.xlaserve({**cached, "fronts": fronts}) for fronts in plan.fronts}
        servers = _entered(stack, opened)
        alone: dict[str, Callable[[], Block]] = {}
        if program[0] != NOOP:
            _, run = stack.enter_context(processes.worker("bench.in_process", cached))
            alone[IN_PROCESS] = lambda: Block(run("xla", plan.block_s), {})
        for asked, payload in payloads.items():
            arms: dict[str, Callable[[], Block]] = {
                name(fronts): partial(block, generate, one, payload, plan.concurrency, plan.block_s)
                for fronts, one in servers.items()
            }
            found = interleaved({**arms, **alone}, plan.blocks)
            in_process = [one.per_s for one in found.pop(IN_PROCESS, ())]
            yield Row(*program, asked, in_process, {fronts: found[name(fronts)] for fronts in servers})


def _entered(
    stack: ExitStack, opened: Mapping[int, AbstractContextManager[processes.Server]]
) -> dict[int, processes.Server]:
    """Starts the first server, which fills the compile cache, and then the others at once."""
    first, *others = opened
    servers = {first: stack.enter_context(opened[first])}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        started = pool.map(lambda fronts: stack.enter_context(opened[fronts]), others)
        return servers | dict(zip(others, started, strict=True))


def main() -> None:
    """Runs the command; exits 1 when a target is missed."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_fronts", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/bench-gpu-fronts.json"))
    parser.add_argument("--fronts", type=numbers, default=WHOLE.fronts, help="numbers of fronts, such as 0,2,4")
    parser.add_argument("--buckets", type=numbers, default=WHOLE.buckets, help="batches, such as 1,16,64")
    parser.add_argument("--blocks", type=int, default=WHOLE.blocks, help="blocks of each server; %(default)s")
    parser.add_argument("--seconds", type=float, default=WHOLE.block_s, help="of a block; %(default)s")
    parser.add_argument("--generators", type=int, default=max(1, cores // 4), help="processes that send; %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tiny form that runs anywhere: shows that it works")
    options = parser.parse_args()
    machine, is_gpu = gpu.machine_or_exit(TARGET, quick=options.quick)
    asked = WHOLE._replace(
        fronts=options.fronts, buckets=options.buckets, blocks=options.blocks, block_s=options.seconds
    )
    plan = QUICK if options.quick else asked
    print(machine, flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def figures() -> Iterator[Figure]:
        rows: list[Row] = []
        with generators(options.generators) as generate:
            for row in measure(generate, plan, "gpu" if is_gpu else "cpu"):
                rows.append(row)
                yield from figures_of(row)
                made = report(rows, plan, machine, options.generators)
                options.json.with_suffix(".md").write_text(made)
        print(made)
        if is_gpu and not options.quick:
            gpu.PAGE.write_text(gpu.page(gpu.PAGE.read_text(), made, TARGET))

    finish(options.json, figures(), machine=machine)


if __name__ == "__main__":
    main()
