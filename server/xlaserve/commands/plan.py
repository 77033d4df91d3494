"""`xlaserve plan`: says how many servers a load needs, by simulating them on measured costs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from xlaserve import console
from xlaserve.commands import arguments, remote
from xlaserve.commands.command import ADDRESS, FAILED, Command, Invocation
from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ConfigError, ModelNotReady
from xlaserve.oracle.device import Profile
from xlaserve.oracle.load import Load, poisson, read_trace
from xlaserve.oracle.search import Found, Slo, fewest, parse_slo
from xlaserve.oracle.simulation import BALANCINGS, MOST_SERVERS, Outcome, simulate
from xlaserve_proto import vision_pb2 as pb

REQUESTS: Final = 20_000
LEAST_S: Final = 10.0
MOST_REQUESTS: Final = 100_000
FRONT_MS: Final = 0.4
"""Measured for unary gRPC calls of 150 KB on the CPU that docs/operations.md names."""
SPREAD: Final = 0.1
FEW: Final = 200
"""Batches that say too little of what they take under load. Below them, warm-up's costs are more to be trusted."""


def run(invocation: Invocation) -> int:
    """Prints how many servers are enough, and what becomes of the load with some more and some fewer."""
    own = invocation.own
    slo = parse_slo(own.slo)
    profile = _profile(invocation)
    load = _load(own, profile)
    deadline_s = math.inf if own.deadline_ms is None else own.deadline_ms / 1000

    def simulated(servers: int, seed: int) -> Outcome:
        return simulate(profile, servers, load, balancing=own.balancing, deadline_s=deadline_s, seed=seed)

    found = fewest(profile, load, slo, own.max_servers, simulated)
    if found.servers is not None:
        for servers in (found.servers - 1, found.servers + 1, math.ceil(found.servers * 1.5)):
            if servers >= 1 and servers not in found.tried:
                found.tried[servers] = simulated(servers, 0)
    if own.json:
        console.print_json(_as_json(profile, load, slo, found, own))
    else:
        _print(profile, load, slo, found, own)
    return 0 if found.servers is not None else FAILED


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("--slo", required=True, metavar="LIMIT", help="what has to hold, such as p99<50ms")
    parser.add_argument("--rate", type=arguments.positive, metavar="N", help="requests a second, at random times")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recorded load, as loadtest --save-arrivals writes it; --rate scales it",
    )
    parser.add_argument(
        "--images", type=arguments.count, default=1, metavar="N", help="images in a request; 1 by default"
    )
    parser.add_argument("--model", default="", help="the model; may be left out where the server has one")
    parser.add_argument("--mode", default="", help="the mode; the model's default by default")
    remote.add_server(parser, "the server that measured the costs; by default the one that the settings describe")
    parser.add_argument(
        "--costs",
        metavar="N=MS,...",
        help="milliseconds of a batch by bucket, such as 1=4.2,8=21, instead of a server's",
    )
    parser.add_argument("--balancing", choices=BALANCINGS, default=BALANCINGS[0], help="how clients choose a server")
    parser.add_argument(
        "--deadline-ms", type=arguments.positive, metavar="MS", help="requests' deadline; none by default"
    )
    parser.add_argument(
        "--front-ms",
        type=arguments.positive,
        default=FRONT_MS,
        metavar="MS",
        help=f"the event loop's time for a request, with decoding; {FRONT_MS} by default",
    )
    parser.add_argument(
        "--spread",
        type=arguments.share,
        metavar="SHARE",
        help=f"how far batches stray from their cost; as traffic has shown by default, and {SPREAD} before any",
    )
    parser.add_argument("--max-servers", type=arguments.count, default=1000, metavar="N", help="1000 by default")
    parser.add_argument(
        "--price", type=arguments.positive, metavar="N", help="of a server for an hour, in any currency"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _profile(invocation: Invocation) -> Profile:
    own, settings = invocation.own, invocation.settings
    own_settings = {"front_s": own.front_ms / 1000, "max_images": settings.max_queue_images}
    if own.costs:
        spread = SPREAD if own.spread is None else own.spread
        return Profile(_costs(own.costs), settings.lanes or 1, spread=spread, **own_settings)
    server = own.server or remote.address(settings)
    answer = remote.list_models(server)
    model = remote.ready_model(answer.models, own.model, server)
    mode = own.mode or model.default_mode
    if mode not in model.modes:
        raise ConfigError(f"--mode: expected one of {', '.join(model.modes)}, got {mode!r}")
    costs, spread = measured(model, mode)
    return Profile(costs, answer.lanes or 1, spread=spread if own.spread is None else own.spread, **own_settings)


def measured(model: pb.Model, mode: str) -> tuple[dict[int, Cost], float]:
    """Returns the costs of the resolution with the most buckets, and how far batches stray from them.

    Those of the traffic, where there was enough of it, else those of warm-up.
    """
    sizes: dict[tuple[int, int], dict[int, Cost]] = {}
    for program in model.programs:
        if program.mode == mode:
            costs = sizes.setdefault((program.bucket.height, program.bucket.width), {})
            costs[program.bucket.batch] = Cost(program.run_s, program.run_loaded_s)
    if not sizes:
        raise ModelNotReady(f"model {model.name}: no program of mode {mode} was measured")
    size = max(sizes, key=lambda it: len(sizes[it]))
    turns = [turn for turn in model.turns if turn.mode == mode and (turn.bucket.height, turn.bucket.width) == size]
    batches = sum(turn.batches for turn in turns)
    if batches <= FEW:
        return sizes[size], SPREAD
    spread = math.sqrt(sum(turn.batches * turn.spread**2 for turn in turns) / batches)
    return {turn.bucket.batch: Cost(turn.alone_s, turn.loaded_s) for turn in turns}, spread


def _costs(text: str) -> dict[int, Cost]:
    costs = {}
    try:
        for part in text.split(","):
            batch, _, milliseconds = part.partition("=")
            seconds = float(milliseconds) / 1000
            if int(batch) < 1 or not 0 < seconds < math.inf:
                raise ValueError(part)
            costs[int(batch)] = Cost(seconds, seconds)
    except ValueError:
        raise ConfigError(f"--costs: expected buckets and milliseconds such as 1=4.2,8=21, got {text!r}") from None
    return costs


def _load(own: argparse.Namespace, profile: Profile) -> Load:
    if own.trace is not None:
        load = read_trace(own.trace)
        return load if own.rate is None else Load(load.at_s * (load.rate / own.rate), load.images)
    if own.rate is None:
        raise ConfigError("--rate: expected requests a second, or --trace with a recorded load")
    # Of more servers than are simulated, the load of the others is thrown away.
    share = min(1.0, MOST_SERVERS * profile.capacity / (own.rate * own.images))
    requests = min(MOST_REQUESTS, max(REQUESTS, LEAST_S * own.rate * share)) / share
    return poisson(own.rate, requests / own.rate, own.images, seed=0)


def _print(profile: Profile, load: Load, slo: Slo, found: Found, own: argparse.Namespace) -> None:
    out = console.stdout(120)
    buckets = ", ".join(f"{batch}: {cost.loaded_s * 1000:.3g} ms" for batch, cost in sorted(profile.costs.items()))
    out.print(f"{load.rate:,.0f} requests/s, {load.images.mean():.3g} images each; {slo}; {own.balancing}")
    out.print(f"a server: {profile.lanes} lanes, buckets {buckets}, at most {profile.capacity:,.0f} images/s")
    table = Table(box=None, pad_edge=False, header_style="bold")
    percent = f"p{slo.percent:g} ms"
    for title in ("servers", "lanes busy", "p50 ms", percent, "refused", "images a batch", "padding", "queued work ms"):
        table.add_column(title, justify="right")
    if own.price is not None:
        table.add_column("a million images", justify="right")
    for servers, outcome in sorted(found.tried.items()):
        row = [
            f"{servers}{' *' if servers == found.servers else ''}",
            f"{outcome.busy:.0%}",
            _ms(outcome.percentile_s(50)),
            _ms(outcome.percentile_s(slo.percent)),
            f"{outcome.failed:.1%}",
            f"{outcome.fill:.2f}",
            f"{outcome.padding:.0%}",
            f"{outcome.queued_s * 1000:.3g}",
        ]
        if own.price is not None:
            row.append(f"{_price(servers, load, outcome, own.price):.2f}")
        table.add_row(*row)
    out.print(table)
    if found.servers is None:
        out.print(f"{own.max_servers} servers are not enough")
        return
    target = found.tried[found.servers].queued_s
    out.print(f"{found.servers} servers are enough. Scale on xlaserve_queued_work_seconds above {target:.3g} a server.")


def _as_json(profile: Profile, load: Load, slo: Slo, found: Found, own: argparse.Namespace) -> dict[str, Any]:
    return {
        "servers": found.servers,
        "slo": str(slo),
        "requests_per_s": load.rate,
        "capacity_images_per_s": profile.capacity,
        "simulations": [
            {
                "servers": servers,
                "lanes_busy": outcome.busy,
                "p50_s": _finite(outcome.percentile_s(50)),
                f"p{slo.percent:g}_s": _finite(outcome.percentile_s(slo.percent)),
                "refused": outcome.failed,
                "images_per_batch": outcome.fill,
                "padding": outcome.padding,
                "queued_work_s": outcome.queued_s,
                "images_by_bucket": dict(sorted(outcome.images.items())),
                "price_of_a_million_images": None if own.price is None else _price(servers, load, outcome, own.price),
            }
            for servers, outcome in sorted(found.tried.items())
        ],
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g}" if math.isfinite(seconds) else "refused"


def _price(servers: int, load: Load, outcome: Outcome, price: float) -> float:
    """Returns what a million answered images cost."""
    images_per_hour = load.rate * float(load.images.mean()) * (1 - outcome.failed) * 3600
    return servers * price / images_per_hour * 1e6


COMMAND = Command(
    "plan", "say how many servers a load needs", run, add_options, (*ADDRESS, "lanes", "max_queue_images")
)
