"""`xlaserve fronts`: says how many requests fronts and one engine carry, and how many fronts are of use."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from rich.table import Table

from xlaserve import console
from xlaserve.app.event_loop import run_loop
from xlaserve.commands import arguments, processor_time
from xlaserve.commands.command import Command, Invocation
from xlaserve.oracle.capacity import Capacity, Costs, Limit, advised, capacity, most_useful
from xlaserve.runtimes.tf.device import usable_cores

CORES: Final = (4, 8, 16, 32)
SECONDS: Final = 5.0
LIMITS: Final = {
    Limit.FRONTS: "the fronts",
    Limit.ENGINE: "the engine",
    Limit.PROCESS: "the one process",
    Limit.CORES: "the cores",
}


def run(invocation: Invocation) -> int:
    """Prints what this machine carries with each number of fronts, and what others do with as many as are of use."""
    own = invocation.own
    cores = own.cores or usable_cores()
    costs = _costs(own)
    here = [capacity(costs, fronts, cores) for fronts in range(most_useful(costs, cores).fronts + 1)]
    machines = {number: most_useful(costs, number) for number in CORES}
    best = advised(costs, cores)
    if own.json:
        console.print_json(_as_json(costs, cores, here, machines, best))
    else:
        _print(costs, cores, here, machines, best)
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


def _print(costs: Costs, cores: int, here: list[Capacity], machines: dict[int, Capacity], best: Capacity) -> None:
    out = console.stdout(120)
    lanes = f", the model {costs.lanes_us:.0f} us on the same cores" if costs.lanes_us else ""
    out.print(
        f"Processor time for a request: front {costs.front_us:.0f} us, engine {costs.engine_us:.0f} us, "
        f"one process {costs.process_us:.0f} us{lanes}. Clients run elsewhere."
    )
    out.print(f"\n[bold]This machine, {cores} cores[/bold]")
    out.print(_table("fronts", [(one.fronts, one) for one in here]))
    out.print("\n[bold]With as many fronts as are of use[/bold]")
    out.print(_table("cores", list(machines.items()), has_fronts=True))
    why = "several processes carry hardly more; use them if a death must not be an outage"
    out.print(f"\nfronts: {best.fronts}   # {'more carry no more' if best.fronts else why}")


def _table(title: str, rows: list[tuple[int, Capacity]], *, has_fronts: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (title, *["fronts"] * has_fronts, "requests/s"):
        table.add_column(column, justify="right")
    table.add_column("limit")
    for number, one in rows:
        fronts = [str(one.fronts)] * has_fronts
        table.add_row(str(number), *fronts, f"{one.requests_per_s:,.0f}", LIMITS[one.limit])
    return table


def _as_json(
    costs: Costs, cores: int, here: list[Capacity], machines: dict[int, Capacity], best: Capacity
) -> dict[str, Any]:
    return {
        **costs._asdict(),
        "cores": cores,
        "capacities": [one._asdict() for one in here],
        "by_cores": [{"cores": number, **one._asdict()} for number, one in machines.items()],
        "fronts": best.fronts,
    }


COMMAND = Command("fronts", "say how many fronts are of use, and what they carry", run, add_options, ())
