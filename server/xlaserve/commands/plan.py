"""`xlaserve plan`: says how many servers a load needs, and which lanes and buckets, by simulating them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from xlaserve.commands import arguments, plan_report, remote
from xlaserve.commands.command import ADDRESS, FAILED, Command, Invocation
from xlaserve.commands.measured import ENGINE_S, SPREAD, Measured, measured
from xlaserve.commands.plan_report import Plan, Variant
from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ConfigError
from xlaserve.planning.load import Load, poisson, read_trace
from xlaserve.planning.measured_profile import Profile, lognormal
from xlaserve.planning.search import Slo, error, fewest, parse_slo
from xlaserve.planning.simulation import BALANCINGS, MOST_SERVERS, Outcome, simulate
from xlaserve.telemetry import console

BEYOND: Final = 100
"""Requests that are to be over the percentile, so that chance hardly moves it."""
LEAST_S: Final = 10.0
MOST_REQUESTS: Final = 100_000
FRONT_MS: Final = 0.4
"""Measured for unary gRPC calls of 150 KB on the CPU that docs/operations.md names."""


def run(invocation: Invocation) -> int:
    """Prints how many servers are enough, and what becomes of the load with some more and some fewer."""
    own = invocation.own
    slo, known = parse_slo(own.slo), _measured(invocation)
    load = _load(own, known.profile, slo)
    deadline_s = math.inf if own.deadline_ms is None else own.deadline_ms / 1000

    done: dict[tuple[int, int, int], tuple[Profile, Outcome]] = {}

    def simulated(profile: Profile, servers: int, seed: int) -> Outcome:
        key = id(profile), servers, seed
        if key not in done:
            outcome = simulate(profile, servers, load, balancing=own.balancing, deadline_s=deadline_s, seed=seed)
            done[key] = profile, outcome  # for as long as it is remembered, no other profile is at its address
        return done[key][1]

    profiles = _variants(known.profile, own)
    variants = [Variant(one, fewest(one, load, slo, own.max_servers, partial(simulated, one))) for one in profiles]
    best = min(variants, key=lambda variant: variant.rank(slo))
    found, bounds = best.found, None
    if found.servers is not None:
        for servers in (found.servers - 1, found.servers + 1, math.ceil(found.servers * 1.5)):
            if servers >= 1 and servers not in found.tried:
                found.tried[servers] = simulated(best.profile, servers, 0)
        bounds = error(
            best.profile,
            load,
            slo,
            found.servers,
            most=own.max_servers,
            costs=known.error,
            simulate=simulated,
        )
    plan = Plan(load, slo, known, variants, best, bounds)
    if own.json:
        console.print_json(plan_report.as_json(plan, own.price))
    else:
        plan_report.show(plan, own.balancing, own.price, own.max_servers)
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
    remote.add_target(parser, "the server that measured the costs; by default the one that the settings describe")
    parser.add_argument(
        "--costs",
        metavar="N=MS,...",
        help="milliseconds of a batch by bucket, such as 1=4.2,8=21, instead of a server's; 1=4.2/6 is 6 while all "
        "lanes are busy",
    )
    parser.add_argument(
        "--lanes",
        type=arguments.counts,
        metavar="N,...",
        help="numbers of lanes to compare, no more than the server has; those that it has by default",
    )
    parser.add_argument(
        "--buckets",
        type=_bucket_sets,
        metavar="N,...;...",
        help="sets of buckets to compare, such as 1,8;1,2,4,8, of those that are measured; all by default",
    )
    parser.add_argument("--balancing", choices=BALANCINGS, default=BALANCINGS[0], help="how clients choose a server")
    parser.add_argument(
        "--deadline-ms", type=arguments.positive, metavar="MS", help="requests' deadline; none by default"
    )
    parser.add_argument(
        "--fronts",
        type=arguments.count,
        metavar="N",
        help="processes that speak to clients, beside the engine; as the server says by default",
    )
    parser.add_argument(
        "--front-ms",
        type=arguments.positive,
        metavar="MS",
        help=f"the event loop's time for a request; as the server measured it by default, and {FRONT_MS} before that",
    )
    parser.add_argument(
        "--outside-ms",
        type=arguments.positive,
        default=0.0,
        metavar="MS",
        help="what clients and the network add to each latency; 0 by default",
    )
    parser.add_argument(
        "--spread",
        type=arguments.share,
        metavar="SHARE",
        help=f"how far batches stray from their cost; as traffic has shown by default, and {SPREAD} before any",
    )
    parser.add_argument(
        "--costs-error",
        type=arguments.error,
        metavar="SHARE",
        help="by what part the costs may be off; as so few batches leave possible by default, which is too little for "
        "cores that a model shares with other work",
    )
    parser.add_argument("--max-servers", type=arguments.count, default=1000, metavar="N", help="1000 by default")
    parser.add_argument(
        "--price", type=arguments.positive, metavar="N", help="of a server for an hour, in any currency"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _measured(invocation: Invocation) -> Measured:
    own, settings = invocation.own, invocation.settings
    if own.costs:
        lanes = max(own.lanes) if own.lanes else 1
        known = Measured(Profile(_costs(own.costs), lanes, deviations=lognormal(SPREAD)), 0, 0.0)
    else:
        server = own.target or remote.address(settings)
        answer = remote.list_models(server)
        model = remote.ready_model(answer.models, own.model, server)
        mode = own.mode or model.default_mode
        if mode not in model.modes:
            raise ConfigError(f"--mode: expected one of {', '.join(model.modes)}, got {mode!r}")
        known = measured(answer, model, mode)
    profile = known.profile
    front_s = own.front_ms / 1000 if own.front_ms else profile.front_s or FRONT_MS / 1000
    changes: dict[str, Any] = {
        "front_s": front_s,
        "outside_s": own.outside_ms / 1000,
        "max_images": settings.max_queue_images,
    }
    if own.fronts is not None:
        changes |= {"fronts": own.fronts, "engine_s": ENGINE_S}
    if own.spread is not None:
        changes["deviations"] = lognormal(own.spread)
    error = known.error if own.costs_error is None else own.costs_error
    return known._replace(profile=replace(profile, **changes), error=error)


def _variants(profile: Profile, own: argparse.Namespace) -> list[Profile]:
    """Returns the servers to compare. Raises ConfigError."""
    lanes = own.lanes or (profile.lanes,)
    if max(lanes) > profile.lanes:
        raise ConfigError(f"--lanes: expected at most {profile.lanes}, as the server has, got {max(lanes)}")
    sets = own.buckets or [tuple(profile.costs)]
    for buckets in sets:
        if unknown := [bucket for bucket in buckets if bucket not in profile.costs]:
            known = ", ".join(map(str, sorted(profile.costs)))
            raise ConfigError(f"--buckets: expected some of {known}, which are measured, got {unknown[0]}")
    return [profile.with_lanes(number).with_buckets(buckets) for number in lanes for buckets in sets]


def _bucket_sets(text: str) -> list[tuple[int, ...]]:
    """Parses `1,8;1,2,4,8`, for argparse."""
    return [arguments.counts(part) for part in text.split(";")]


def _costs(text: str) -> dict[int, Cost]:
    costs = {}
    try:
        for part in text.split(","):
            batch, _, milliseconds = part.partition("=")
            alone, _, loaded = milliseconds.partition("/")
            cost = Cost(float(alone) / 1000, float(loaded or alone) / 1000)
            if int(batch) < 1 or not 0 < cost.alone_s <= cost.loaded_s < math.inf:
                raise ValueError(part)
            costs[int(batch)] = cost
    except ValueError:
        raise ConfigError(
            f"--costs: expected buckets and milliseconds such as 1=4.2,8=21 or 8=21/30, got {text!r}"
        ) from None
    return costs


def _load(own: argparse.Namespace, profile: Profile, slo: Slo) -> Load:
    if own.trace is not None:
        load = read_trace(own.trace)
        return load if own.rate is None else Load(load.at_s * (load.rate / own.rate), load.images)
    if own.rate is None:
        raise ConfigError("--rate: expected requests a second, or --trace with a recorded load")
    # Of more servers than are simulated, the load of the others is thrown away.
    share = min(1.0, MOST_SERVERS * profile.capacity / (own.rate * own.images))
    least = BEYOND / (1 - slo.percent / 100)
    requests = min(MOST_REQUESTS, max(least, LEAST_S * own.rate * share)) / share
    return poisson(own.rate, requests / own.rate, own.images, seed=0)


COMMAND = Command(run, add_options, (*ADDRESS, "max_queue_images"))
