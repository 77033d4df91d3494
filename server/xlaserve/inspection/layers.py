"""Explanation of a model in OpenVINO: its layers after OpenVINO's optimisation, and the time of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from xlaserve.config import Bucket, Precision
from xlaserve.engine.program import Compilation
from xlaserve.engine.warmup.compiler import measure, noise
from xlaserve.errors import ModelFailed
from xlaserve.inspection.explanation import seconds
from xlaserve.models.catalog import Model
from xlaserve.programs.openvino.openvino_program import Layer, version
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

PROFILED_RUNS: Final = 10
"""Runs over which the time of a layer is averaged."""
COLUMNS: Final = ("operation", "kernel", "count", "took", "share")


@dataclass(frozen=True)
class LayersExplained:
    """Everything that `xlaserve explain` shows of a model in OpenVINO."""

    model: str
    source: str
    bucket: Bucket
    device: str
    versions: str
    precision: Precision
    """The type that the model computes in."""
    layers: tuple[Layer, ...]
    """Layers in the order in which they ran, with their mean seconds over the profiled runs."""
    compile_s: float
    measured_s: float
    """Median seconds of a run, alone on the device and not profiled."""

    @property
    def layers_s(self) -> float:
        """Sum of the seconds of all layers."""
        return sum(layer.seconds for layer in self.layers)

    def slowest(self, count: int) -> list[Layer]:
        """Returns the `count` layers that took longest, longest first."""
        return sorted(self.layers, key=lambda layer: layer.seconds, reverse=True)[:count]

    def group_cells(self) -> list[tuple[str, ...]]:
        """Returns the layers by operation and kernel as text, in COLUMNS, the group that took longest first."""
        groups: dict[tuple[str, str], list[float]] = {}
        for layer in self.layers:
            groups.setdefault((layer.operation, layer.kernel), []).append(layer.seconds)
        total_s = self.layers_s or 1.0
        return [
            (*group, str(len(took)), seconds(sum(took)), f"{sum(took) / total_s:.0%}")
            for group, took in sorted(groups.items(), key=lambda item: sum(item[1]), reverse=True)
        ]

    def json(self) -> dict[str, object]:
        """Returns the explanation in JSON's types; times are in seconds."""
        layers = [layer._asdict() for layer in self.layers]
        return {**asdict(self), "bucket": list(self.bucket), "layers": layers, "layers_s": self.layers_s}


def explain(model: Model, bucket: Bucket, device: Device, compilation: Compilation) -> LayersExplained:
    """Explains the program of `model` for `bucket`, compiled as `compilation`; blocks. Raises ModelFailed."""
    program = model.program
    if not isinstance(program, TensorFlowProgram):
        raise ModelFailed(f"expected a model of TensorFlow's, got {model.settings.source}")
    profiled = program.in_openvino(bucket, is_profiled=True)
    return LayersExplained(
        model=model.settings.name,
        source=model.settings.source,
        bucket=bucket,
        device=str(device),
        versions=f"OpenVINO {version()}",
        precision=profiled.precision,
        layers=tuple(profiled.layers(noise(bucket, model.inputs), PROFILED_RUNS)),
        compile_s=compilation.compile_s,
        measured_s=measure(compilation.executable, bucket, lanes=1, inputs=model.inputs).alone_s,
    )
