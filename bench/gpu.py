"""What a GPU brings: `python -m bench.gpu [--quick]`, which is `make bench-gpu`.

Every mode at every batch in float32, TF32 and bfloat16: in process, as warm-up measures it, and served over gRPC.
Writes the tables into docs/gpu.md; only from a GPU, and only from a whole run. What was measured until then is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import processes
from bench.generator import closed_loop, pixels_request
from bench.options import numbers
from bench.trials import interleaved
from xlaserve.programs.tf.device import cpu_name
from xlaserve_loadtest.reports import markdown
from xlaserve_loadtest.reports.table import Cell, Number, Table
from xlaserve_loadtest.run import environment, gpus

PAGE: Final = Path("docs/gpu.md")
TARGET: Final = "bench-gpu"
MODES: Final = ("eager", "graph", "xla")
LANES: Final = 2
WARM_TIMEOUT_S: Final = 3 * 3600


class Variant(NamedTuple):
    """What numbers are computed in."""

    name: str
    server: dict[str, Any]
    model: dict[str, Any]


class Plan(NamedTuple):
    """What is measured."""

    models: Mapping[str, int]
    """Applications of Keras and the side of their input."""
    batches: Sequence[int]
    images_per_request: int
    concurrency: int
    blocks: int
    block_s: float


class Row(NamedTuple):
    """One model in one variant."""

    model: str
    variant: str
    in_process: dict[str, dict[int, float]]
    """Images/s by mode and batch, all lanes busy."""
    served: dict[str, tuple[float, float, float]]
    """Images/s by mode: the median of the blocks, the least and the most."""


VARIANTS: Final = (
    Variant("float32", {"tf32": False}, {}),
    Variant("TF32", {"tf32": True}, {}),
    Variant("bfloat16", {"tf32": True}, {"precision": "bfloat16"}),
)
WHOLE: Final = Plan({"ResNet50": 224, "EfficientNetV2S": 384}, tuple(2**n for n in range(9)), 32, 8, 5, 10.0)
QUICK: Final = Plan({"MobileNet": 32}, (1, 8), 4, 4, 2, 1.0)


def measure(plan: Plan, device: str) -> Iterator[Row]:
    """Measures one model in one variant after the other."""
    for name, side in plan.models.items():
        for variant in VARIANTS:
            model = processes.application(name, input_size=(side, side), buckets=plan.batches, **variant.model)
            with tempfile.TemporaryDirectory() as cache:
                config = {"device": device, "lanes": LANES, "compile_cache": cache, **variant.server}
                in_process = _in_process({**config, "models": [{**model, "modes": MODES}]})
                # Requests of many images go to the large buckets; nobody serves in eager mode.
                buckets = [batch for batch in plan.batches if batch >= plan.images_per_request]
                offered = {**model, "modes": ("xla", "graph"), "buckets": buckets}
                yield Row(name, variant.name, in_process, _served({**config, "models": [offered]}, side, plan))


def marks(target: str) -> tuple[str, str]:
    """Returns what is before and after the tables of a target of make on a page."""
    return f"<!-- made by make {target}: begin -->", f"<!-- made by make {target}: end -->"


def page(text: str, made: str, target: str = TARGET) -> str:
    """Returns the page `text` with what `target` has `made` in its place."""
    begin, end = marks(target)
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{made}\n{end}{after}"


def machine_or_exit(target: str, *, quick: bool) -> tuple[str, bool]:
    """Returns what is measured on, and whether that is a GPU. Ends the process without one, unless `quick`."""
    gpu = next((f"{name}, driver {gpus.driver_version()}" for name in gpus.names()), None)
    if gpu is None and not quick:
        sys.exit(f"{target}: expected an NVIDIA GPU, found none; --quick runs a tiny form anywhere")
    return f"{gpu or cpu_name()}, Python {sys.version.split()[0]}, {_versions()}", gpu is not None


def report(rows: Iterable[Row], plan: Plan, machine: str) -> str:
    """Returns the tables as Markdown."""
    rows = list(rows)
    in_process: Iterator[Mapping[str, Cell]] = (
        {
            "model": row.model,
            "numbers": row.variant,
            "mode": mode,
            **{str(batch): round(by_batch[batch]) for batch in plan.batches},
        }
        for row in rows
        for mode, by_batch in row.in_process.items()
    )
    served: Iterator[Mapping[str, Cell]] = (
        {
            "model": row.model,
            "numbers": row.variant,
            **{mode: Number("{:,.0f} ({:,.0f} to {:,.0f})".format(*row.served[mode])) for mode in ("graph", "xla")},
            "xla / graph": Number(f"{row.served['xla'][0] / row.served['graph'][0]:.2f}"),
        }
        for row in rows
    )
    lines = [
        f"{machine}, {datetime.now(UTC):%Y-%m-%d}. Random weights, {LANES} lanes.",
        "",
        "In process, images/s with all lanes busy, as warm-up measures them, by batch:",
        "",
        *markdown.lines(Table.of(in_process)),
        "",
        f"Served over gRPC to a client on the same machine, {plan.images_per_request} images a request,",
        f"{plan.concurrency} requests in flight: images/s, the median of {plan.blocks} interleaved blocks of",
        f"{plan.block_s:g} s (least to most):",
        "",
        *markdown.lines(Table.of(served)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny form that runs anywhere: shows that it works")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*WHOLE.models], help="%(default)s")
    parser.add_argument("--batches", type=numbers, default=WHOLE.batches, help="such as 1,32,128")
    parser.add_argument("--blocks", type=int, default=WHOLE.blocks, help="blocks of each mode served; %(default)s")
    parser.add_argument("--seconds", type=float, default=WHOLE.block_s, help="of a block; %(default)s")
    options = parser.parse_args()
    machine, is_gpu = machine_or_exit(TARGET, quick=options.quick)
    models = {name: WHOLE.models[name] for name in options.models}
    asked = WHOLE._replace(models=models, batches=options.batches, blocks=options.blocks, block_s=options.seconds)
    plan = QUICK if options.quick else asked
    print(machine, flush=True)
    rows = []
    for row in measure(plan, "gpu" if is_gpu else "cpu"):
        rows.append(row)
        print(f"{row.model} {row.variant}: {json.dumps([row.in_process, row.served])}", flush=True)
    made = report(rows, plan, machine)
    print(made)
    if is_gpu and not options.quick:
        PAGE.write_text(page(PAGE.read_text(), made))


def _in_process(config: Mapping[str, object]) -> dict[str, dict[int, float]]:
    """Returns what `xlaserve warm` measures: images/s by mode and batch."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        command = (sys.executable, "-m", "xlaserve", "warm", "--json", "--config", str(file), "--log-level", "warning")
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WARM_TIMEOUT_S)
    found: dict[str, dict[int, float]] = {}
    for entry in json.loads(done.stdout):
        batch = entry["bucket"][0]
        found.setdefault(entry["mode"], {})[batch] = LANES * batch / entry["run_loaded_s"]
    return {mode: found[mode] for mode in MODES}


def _served(config: Mapping[str, object], side: int, plan: Plan) -> dict[str, tuple[float, float, float]]:
    with processes.xlaserve(config) as server:

        def images_per_s(payload: bytes) -> float:
            load = closed_loop(server.address, payload, plan.concurrency, seconds=plan.block_s)
            return load.per_s * plan.images_per_request

        payloads = {mode: pixels_request("model", side, mode, plan.images_per_request) for mode in ("graph", "xla")}
        arms = {mode: partial(images_per_s, payload) for mode, payload in payloads.items()}
        rates = interleaved(arms, plan.blocks)
    return {mode: (statistics.median(arm), min(arm), max(arm)) for mode, arm in rates.items()}


def _versions() -> str:
    packages = environment.describe().packages
    named = ("tensorflow", "tensorflow-cpu", "keras", "grpcio")
    return ", ".join(f"{package} {packages[package]}" for package in named if package in packages)


if __name__ == "__main__":
    main()
