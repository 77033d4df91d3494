"""`xlaserve fronts`: says how many requests fronts and engines carry, and how many fronts are of use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from rich.table import Table

from xlaserve.commands import arguments, processor_time
from xlaserve.commands.command import Command, Invocation
from xlaserve.processes.capacity import Capacity, Costs, Limit, advised, capacity, most_useful
from xlaserve.processes.event_loop import run_loop
from xlaserve.programs.tf.device import usable_cores
from xlaserve.telemetry import console

CORES: Final = (4, 8, 16, 32)
SECONDS: Final = 5.0
LIMITS: Final[Mapping[Limit, str]] = {
    Limit.FRONTS: "the fronts",
    Limit.ENGINE: "the engine",
    Limit.PROCESS: "the one process",
    Limit.CORES: "the cores",
}


class Advice(NamedTuple):
    """The capacity of processes, on this machine and in general."""

    costs: Costs
    cores: int
    engines: int
    here: list[Capacity]
    """This machine with each number of fronts that is of use."""
    machines: dict[int, Capacity]
    """Machines with as many fronts as are of use there, by their cores."""
    best: Capacity


def advise(costs: Costs, cores: int, engines: int) -> Advice:
    """Returns what there is to say of a machine with `cores` whose `engines` share the work."""
    most = most_useful(costs, cores, engines).fronts
    here = [capacity(costs, fronts, cores, engines) for fronts in range(most + 1)]
    machines = {number: most_useful(costs, number, engines) for number in CORES}
    return Advice(costs, cores, engines, here, machines, advised(costs, cores, engines))


def run(invocation: Invocation) -> int:
    """Prints what this machine carries with each number of fronts, and what others do with as many as are of use."""
    own = invocation.own
    advice = advise(_costs(own), own.cores or usable_cores(), own.engines)
    if own.json:
        console.print_json(_as_json(advice))
    else:
        _print(advice)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    for part, which in (("front", "a front"), ("engine", "the engine"), ("process", "a server of one process")):
        parser.add_argument(
            f"--{part}-us",
            type=arguments.positive,
            metavar="US",
            help=f"processor time that {which} takes for a request, in microseconds; by default what it takes here for "
            "builtin:noop",
        )
    parser.add_argument(
        "--lanes-us",
        type=arguments.positive,
        default=0.0,
        metavar="US",
        help="the model's processor time for a request on the same cores; 0 by default, as on a GPU",
    )
    parser.add_argument(
        "--engines",
        type=arguments.count,
        default=1,
        metavar="N",
        help="that share the work, one for each GPU; 1 by default",
    )
    parser.add_argument("--cores", type=arguments.count, metavar="N", help="this machine's by default")
    parser.add_argument(
        "--seconds", type=arguments.duration_s, default=SECONDS, metavar="S", help="how long to measure (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _costs(own: argparse.Namespace) -> Costs:
    """Returns the given costs, and those that are measured in place of the others."""
    found: dict[str, float] = {}

    async def measure() -> int:
        if None in (own.front_us, own.engine_us):
            several = await processor_time.for_a_request(1, own.seconds)
            found.update(front=several["front 1"], engine=several[processor_time.ENGINE])
        if own.process_us is None:
            found["process"] = (await processor_time.for_a_request(0, own.seconds))[processor_time.OWN]
        return 0

    if None in (own.front_us, own.engine_us, own.process_us):
        sys.stderr.write("measuring servers of builtin:noop on this machine\n")
        run_loop(measure())
    return Costs(
        own.front_us or found["front"],
        own.engine_us or found["engine"],
        own.process_us or found["process"],
        own.lanes_us,
    )


def _print(advice: Advice) -> None:
    out, costs, cores, engines = console.stdout(120), advice.costs, advice.cores, advice.engines
    lanes = f", the model {costs.lanes_us:.0f} us on the same cores" if costs.lanes_us else ""
    shared = f" {engines} engines share the work." if engines > 1 else ""
    out.print(
        f"Processor time for a request: front {costs.front_us:.0f} us, engine {costs.engine_us:.0f} us, "
        f"one process {costs.process_us:.0f} us{lanes}.{shared} Clients run elsewhere."
    )
    out.print(f"\n[bold]This machine, {cores} cores[/bold]")
    limits = {**LIMITS, Limit.ENGINE: "the engines"} if engines > 1 else LIMITS
    out.print(_table("fronts", [(one.fronts, one) for one in advice.here], limits))
    out.print("\n[bold]With as many fronts as are of use[/bold]")
    out.print(_table("cores", list(advice.machines.items()), limits, has_fronts=True))
    why = "several processes carry hardly more; use them if a death must not be an outage"
    out.print(f"\nfronts: {advice.best.fronts}   # {'more carry no more' if advice.best.fronts else why}")


def _table(
    title: str, rows: list[tuple[int, Capacity]], limits: Mapping[Limit, str], *, has_fronts: bool = False
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (title, *["fronts"] * has_fronts, "requests/s"):
        table.add_column(column, justify="right")
    table.add_column("limit")
    for number, one in rows:
        fronts = [str(one.fronts)] * has_fronts
        table.add_row(str(number), *fronts, f"{one.requests_per_s:,.0f}", limits[one.limit])
    return table


def _as_json(advice: Advice) -> dict[str, Any]:
    return {
        **advice.costs._asdict(),
        "cores": advice.cores,
        "engines": advice.engines,
        "capacities": [one._asdict() for one in advice.here],
        "by_cores": [{"cores": number, **one._asdict()} for number, one in advice.machines.items()],
        "fronts": advice.best.fronts,
    }


COMMAND = Command("fronts", "say how many fronts are of use, and what they carry", run, add_options, ())
