"""XLA against the other ways to run a model on this CPU: `python -m bench.xla [--quick] [--models A,B]`.

Each arm is a process of its own, without another's threads and memory, and runs at the lanes and the batch that suit it
best. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.figures import Figure, finish, ratio
from bench.processes import Worker, application, worker
from bench.trials import fastest, interleaved
from xlaserve.config import Lowering
from xlaserve.programs.tf.device import cpu_name, usable_cores

TARGETS: Final[Mapping[str, float]] = {
    "MobileNet": 1.0,
    "MobileNetV2": 1.25,
    "MobileNetV3Small": 1.0,
    "MobileNetV3Large": 1.0,
    "EfficientNetB0": 1.0,
    "EfficientNetV2B0": 1.0,
    "Xception": 1.0,
    "NASNetMobile": 1.0,
    "ConvNeXtTiny": 1.0,
    "ResNet50": 1.0,
}
"""Applications, and the least share of graph mode's images/s that XLA is to reach."""
OPENVINO_TARGETS: Final[Mapping[str, float]] = {"MobileNetV2": 0.7, "ResNet50": 0.8}
"""The same of what OpenVINO reaches by itself."""
SERVED: Final = (("auto", "bare openvino"), ("openvino bfloat16", "bare openvino bfloat16"))
"""Arms, and those of which they are to reach LEAST_SERVED."""
LEAST_SERVED: Final = 0.95
BATCHES: Final = (1, 2, 4, 8, 16)


class Arm(NamedTuple):
    """A way to run a model."""

    module: str
    mode: str
    model: dict[str, Any]


BFLOAT16: Final = {"openvino_precision": "bfloat16"}
ARMS: Final = {
    "xla": Arm("bench.in_process", "xla", {}),
    "xla as it is": Arm("bench.in_process", "xla", {"disable_lowerings": tuple(Lowering)}),
    "graph": Arm("bench.in_process", "graph", {}),
    "openvino": Arm("bench.in_process", "openvino", {}),
    "openvino bfloat16": Arm("bench.in_process", "openvino", BFLOAT16),
    "auto": Arm("bench.in_process", "auto", {}),
    "bare openvino": Arm("bench.openvino_process", "openvino", {}),
    "bare openvino bfloat16": Arm("bench.openvino_process", "openvino", BFLOAT16),
}


class Plan(NamedTuple):
    """How much is measured."""

    batches: tuple[int, ...]
    blocks: int
    block_s: float


def compare(name: str, arms: Mapping[str, Arm], plan: Plan) -> Iterator[Figure]:
    """Yields the ratios of XLA's images/s on one model to those of each other arm, over interleaved blocks."""
    with ExitStack() as stack:
        running = {arm: _best(stack, name, arms[arm], plan) for arm in arms}
        runs = {arm: partial(running[arm].run, arms[arm].mode, plan.block_s) for arm in arms}
        rates = interleaved(runs, plan.blocks)
    for arm, measured in rates.items():
        print(
            f"  {name} {arm}, {running[arm].about} lanes: {min(measured):.1f} to {max(measured):.1f} images/s",
            flush=True,
        )
    targets = {"graph": TARGETS.get(name), "bare openvino": OPENVINO_TARGETS.get(name)}
    for other in (arm for arm in arms if arm != "xla"):
        yield ratio(f"{name}: xla / {other}", rates["xla"], rates[other], targets.get(other))
    for arm, other in SERVED:
        if {arm, other} <= rates.keys():
            yield ratio(f"{name}: {arm} / {other}", rates[arm], rates[other], LEAST_SERVED)


def _best(stack: ExitStack, name: str, arm: Arm, plan: Plan) -> Worker:
    """Starts `arm` with one lane and with a lane for each core, and keeps the faster of the two."""
    cores = usable_cores()
    model = application(name, modes=(arm.mode,), buckets=plan.batches, **arm.model)
    lanes = dict.fromkeys((1, cores))
    configs = [{"device": "cpu", "models": [model], "lanes": n, "threads_per_lane": cores // n} for n in lanes]
    tried = [stack.enter_context(worker(arm.module, config)) for config in configs]
    return fastest(tried, lambda process: process.run(arm.mode, plan.block_s))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.xla", description=__doc__)
    parser.add_argument("--models", default=",".join(TARGETS), help="applications of Keras, separated by commas")
    parser.add_argument("--arms", default="xla,graph,auto,bare openvino", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--json", type=Path, default=Path("build/bench-xla.json"))
    parser.add_argument("--quick", action="store_true", help="shorter: minutes for all models, and wider ranges")
    options = parser.parse_args()
    plan = Plan((1, 4), 3, 1.0) if options.quick else Plan(BATCHES, 7, 5.0)
    names = ("xla", *(name for name in options.arms.split(",") if name != "xla"))
    has_openvino = importlib.util.find_spec("openvino") is not None
    arms = {name: ARMS[name] for name in names if "openvino" not in name or has_openvino}
    print(f"{cpu_name()}, {os.cpu_count()} cores, {plan.blocks} blocks of {plan.block_s:g} s", flush=True)
    if not has_openvino:
        print("openvino is not installed, and is left out", flush=True)
    figures = (figure for model in options.models.split(",") for figure in compare(model, arms, plan))
    finish(options.json, figures, processor=cpu_name(), cores=os.cpu_count())


if __name__ == "__main__":
    main()
