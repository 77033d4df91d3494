"""The report that `xlaserve plan` prints."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rich.table import Table

from xlaserve.commands.measured import Measured
from xlaserve.planning.load import Load
from xlaserve.planning.measured_profile import Profile
from xlaserve.planning.search import MODEL_ERROR, TRIES, ErrorBounds, Found, Slo
from xlaserve.planning.simulation import Outcome
from xlaserve.telemetry import console


class Variant(NamedTuple):
    """One way to run a server, and what the load needs of it."""

    profile: Profile
    found: Found

    def rank(self, slo: Slo) -> tuple[float, float]:
        """A key that is less for the better variant: servers, then the percentile with them."""
        servers = self.found.servers
        return (math.inf, math.inf) if servers is None else (servers, self.outcome.percentile_s(slo.percent))

    @property
    def outcome(self) -> Outcome:
        """The outcome of the load with as many servers as are enough, or with the most that were tried."""
        return self.found.tried[self.found.servers or max(self.found.tried)]

    @property
    def buckets(self) -> str:
        """Its buckets, as they are typed."""
        return ",".join(map(str, sorted(self.profile.costs)))


class Plan(NamedTuple):
    """The load that was simulated, and the variants that the report compares."""

    load: Load
    slo: Slo
    measured: Measured
    variants: list[Variant]
    best: Variant
    error: ErrorBounds | None
    """None where no number of servers is enough."""


def show(plan: Plan, balancing: str, price: float | None, most: int) -> None:
    """Prints it as tables."""
    out, load, slo, best = console.stdout(120), plan.load, plan.slo, plan.best
    profile = best.profile
    costs = ", ".join(f"{batch}: {profile.loaded_s(batch) * 1000:.3g} ms" for batch in sorted(profile.costs))
    out.print(f"{load.rate:,.0f} requests/s, {load.images.mean():.3g} images each; {slo}; {balancing}")
    if len(plan.variants) > 1:
        out.print(_compared(plan))
    loops = f"{profile.fronts} fronts, " if profile.fronts else ""
    out.print(
        f"a server: {loops}{profile.lanes} lanes, buckets {costs}, at most {profile.capacity:,.0f} images/s; "
        f"{profile.front_s * 1000:.2g} ms of an event loop for a request"
    )
    out.print(_simulated(plan, price))
    servers = best.found.servers
    if servers is None or plan.error is None:
        out.print(f"{most} servers are not enough")
        return
    out.print(f"images by bucket: {_by_bucket(best.outcome)}")
    target = best.outcome.queued_s
    out.print(f"{servers} servers are enough. Scale on xlaserve_queued_work_seconds above {target:.3g} a server.")
    surely = "no number is" if plan.error.surely is None else f"{plan.error.surely} are"
    known = plan.measured
    of_costs = f"costs that may be off by {known.error:.0%}, " if known.error else ""
    out.print(
        f"p{slo.percent:g} of {servers}: between {_ms(plan.error.least_s)} and {_ms(plan.error.most_s)} ms, by {TRIES} "
        f"simulations, {of_costs}and {MODEL_ERROR:.0%} for the simulation itself. At its worst {surely} enough."
    )
    if known.batches:
        out.print(
            f"The costs are of {known.batches} batches. The error supposes that they stay so: on cores that a model "
            "shares with other work they do not (--costs-error)."
        )
    else:
        out.print("The costs are not from traffic: what else the cores do meanwhile is not in them, nor in the error.")


def as_json(plan: Plan, price: float | None) -> dict[str, Any]:
    """Returns it as plain data of JSON."""
    load, slo, best, error = plan.load, plan.slo, plan.best, plan.error
    return {
        "servers": best.found.servers,
        "slo": str(slo),
        "requests_per_s": load.rate,
        "capacity_images_per_s": best.profile.capacity,
        "lanes": best.profile.lanes,
        "buckets": sorted(best.profile.costs),
        "batches_measured": plan.measured.batches,
        "costs_error": plan.measured.error,
        "model_error": MODEL_ERROR,
        "error": None
        if error is None
        else {
            f"p{slo.percent:g}_least_s": _finite(error.least_s),
            f"p{slo.percent:g}_most_s": _finite(error.most_s),
            "servers": error.surely,
        },
        "variants": [
            {
                "lanes": variant.profile.lanes,
                "buckets": sorted(variant.profile.costs),
                "servers": variant.found.servers,
                f"p{slo.percent:g}_s": _finite(variant.outcome.percentile_s(slo.percent)),
            }
            for variant in plan.variants
        ],
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
                "price_of_a_million_images": None if price is None else _price(servers, load, outcome, price),
            }
            for servers, outcome in sorted(best.found.tried.items())
        ],
    }


def _compared(plan: Plan) -> Table:
    """Returns what each variant needs."""
    table = _table("lanes", "buckets", "servers", f"p{plan.slo.percent:g} ms", "images a batch", "images by bucket")
    for variant in plan.variants:
        servers, outcome = variant.found.servers, variant.outcome
        table.add_row(
            f"{variant.profile.lanes}{' *' if variant is plan.best else ''}",
            variant.buckets,
            "not enough" if servers is None else str(servers),
            _ms(outcome.percentile_s(plan.slo.percent)),
            f"{outcome.fill:.2f}",
            _by_bucket(outcome),
        )
    return table


def _simulated(plan: Plan, price: float | None) -> Table:
    """Returns what becomes of the load with each number of servers that was tried."""
    titles = ["servers", "lanes busy", "p50 ms", f"p{plan.slo.percent:g} ms", "refused", "images a batch", "padding"]
    table = _table(*titles, "queued work ms", *["a million images"] * (price is not None))
    found = plan.best.found
    for servers, outcome in sorted(found.tried.items()):
        row = [
            f"{servers}{' *' if servers == found.servers else ''}",
            f"{outcome.busy:.0%}",
            _ms(outcome.percentile_s(50)),
            _ms(outcome.percentile_s(plan.slo.percent)),
            f"{outcome.failed:.1%}",
            f"{outcome.fill:.2f}",
            f"{outcome.padding:.0%}",
            f"{outcome.queued_s * 1000:.3g}",
        ]
        if price is not None:
            row.append(f"{_price(servers, plan.load, outcome, price):.2f}")
        table.add_row(*row)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right")
    return table


def _by_bucket(outcome: Outcome) -> str:
    """Returns the share of the images that ran in each bucket."""
    total = max(1, outcome.images.total())
    return ", ".join(f"{bucket}: {images / total:.0%}" for bucket, images in sorted(outcome.images.items()))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g}" if math.isfinite(seconds) else "refused"


def _price(servers: int, load: Load, outcome: Outcome, price: float) -> float:
    """Returns what a million answered images cost."""
    images_per_hour = load.rate * float(load.images.mean()) * (1 - outcome.failed) * 3600
    return servers * price / images_per_hour * 1e6
