"""`xlaserve buckets`: proposes buckets for a model from the traffic of a running server."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from xlaserve.commands import arguments, remote
from xlaserve.commands.command import ADDRESS, Command, Invocation
from xlaserve.config import AutoBuckets, Mode
from xlaserve.engine.buckets import demand
from xlaserve.engine.buckets.choice import OVERHEAD_S
from xlaserve.engine.buckets.report import Choice, Report, report
from xlaserve.errors import ConfigError, ModelNotReady
from xlaserve.telemetry import console
from xlaserve_proto import vision_pb2 as pb


def run(invocation: Invocation) -> int:
    """Prints the sets of buckets of each resolution that was asked for, and what to configure."""
    own = invocation.own
    server = own.target or remote.address(invocation.settings)
    model = remote.ready_model(remote.list_models(server).models, own.model, server)
    reports = reports_of(model, own.mode, own.max_batch, own.max_buckets)
    if not reports:
        raise ModelNotReady(f"model {model.name}: {server} has run no batch of it yet, so that no demand is known")
    if own.save:
        try:
            demand.write(own.save, {one.resolution: one.demand for one in reports})
        except OSError as error:
            raise ConfigError(f"--save: {own.save} can't be written: {error.strerror}") from None
    if own.json:
        console.print_json([_as_json(model, one) for one in reports])
        return 0
    out = console.stdout(120)
    for one in reports:
        out.print(_heading(model, one))
        out.print(_table(one))
    out.print(f"\nbuckets: {json.dumps(_to_configure(reports))}")
    if any(choice.estimated for one in reports for choice in (one.proposed, one.powers_of_two)):
        out.print("* was never measured: its cost is taken from the line between its neighbours")
    return 0


def reports_of(model: pb.Model, mode: str, most_batch: int | None, most_buckets: int) -> list[Report]:
    """Returns a report for each resolution that has demand and buckets."""
    mode = mode or model.default_mode
    if mode not in model.modes:
        raise ConfigError(f"--mode: expected one of {', '.join(model.modes)}, got {mode!r}")
    reports = []
    for seen in model.demands:
        size = (seen.height, seen.width)
        measured_s: dict[int, float] = {}
        for program in model.programs:
            if (program.bucket.height, program.bucket.width) == size and mode in (program.mode, Mode.AUTO):
                batch, cost_s = program.bucket.batch, program.run_loaded_s + OVERHEAD_S
                measured_s[batch] = min(measured_s.get(batch, cost_s), cost_s)
        present = [bucket.batch for bucket in model.buckets if (bucket.height, bucket.width) == size]
        if seen.images and present:
            reports.append(
                report(
                    size,
                    Counter(seen.images),
                    present=present,
                    measured_s=measured_s,
                    most_batch=most_batch,
                    most_buckets=most_buckets,
                )
            )
    return reports


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    remote.add_target(parser, "the server to ask; by default the one that the settings describe")
    parser.add_argument("--mode", default="", help="the mode to choose for; the model's default by default")
    parser.add_argument("--max-batch", type=arguments.count, metavar="N", help="no larger bucket")
    most = AutoBuckets().max_buckets
    parser.add_argument("--max-buckets", type=arguments.count, metavar="N", default=most, help=f"{most} by default")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the demand, for auto_buckets.demand")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _heading(model: pb.Model, one: Report) -> str:
    height, width = one.resolution
    images = one.demand.total()
    at_most = ", ".join(f"at most {n} for {share:.0%}" for n, share in _quantiles(one.demand))
    return f"\n[bold]{model.name}[/bold] at {height}x{width}: {images} images; waiting with them: {at_most}"


def _quantiles(images: Counter[int]) -> Iterable[tuple[int, float]]:
    """Yields the demands that half, nine tenths and all of the images met at most."""
    seen, wanted = 0, [0.5, 0.9, 1.0]
    for n in sorted(images):
        seen += images[n]
        if wanted and seen >= wanted[0] * images.total():
            yield n, seen / images.total()
            wanted = [share for share in wanted if seen < share * images.total()]


def _table(one: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("set", "buckets"):
        table.add_column(title)
    for title in ("ms an image", "padding", "the proposed saves"):
        table.add_column(title, justify="right")
    for name, choice in _choices(one):
        batches = ", ".join(f"{batch}{'*' * (batch in choice.estimated)}" for batch in choice.batches)
        gain = "" if choice is one.proposed else f"{round(one.gain_over(choice), 3) + 0.0:.1%}"  # never -0.0
        table.add_row(name, batches, f"{choice.image_s * 1000:.3f}", f"{choice.padding:.1%}", gain)
    return table


def _choices(one: Report) -> tuple[tuple[str, Choice], ...]:
    return ("present", one.present), ("powers of two", one.powers_of_two), ("proposed", one.proposed)


def _to_configure(reports: list[Report]) -> list[Any]:
    if len(reports) == 1:
        return list(reports[0].proposed.batches)
    return [[batch, *one.resolution] for one in reports for batch in one.proposed.batches]


def _as_json(model: pb.Model, one: Report) -> dict[str, object]:
    return {
        "model": model.name,
        "resolution": list(one.resolution),
        "demand": dict(sorted(one.demand.items())),
        "sets": [
            {
                "name": name,
                "buckets": list(choice.batches),
                "estimated": list(choice.estimated),
                "image_s": choice.image_s,
                "padding": choice.padding,
            }
            for name, choice in _choices(one)
        ],
        "gain_over_powers_of_two": one.gain_over(one.powers_of_two),
        "gain_over_present": one.gain_over(one.present),
    }


COMMAND = Command(run, add_options, ADDRESS)
