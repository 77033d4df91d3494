"""Warnings at warm-up about settings that make a model slower than it need be, with what was measured."""

from __future__ import annotations

from typing import Final

from xlaserve.config import Bucket, Lowering, Mode, ModelSettings, Precision
from xlaserve.engine.warmup.auto_buckets import Programs

CLEARLY: Final = 1.5
"""Ratio to another mode's seconds from which on a warning is given: with auto's own margin, noise would cause one."""

MIN_S: Final = 1e-3
"""Seconds that a batch has to gain."""


def slower(settings: ModelSettings, programs: Programs, *, on_cpu: bool) -> list[str]:
    """Returns a sentence for each setting of a model that another would be faster than; none where `auto` decides."""
    if Mode.XLA not in settings.modes or settings.effective_default_mode is Mode.AUTO:
        return []
    is_widened = on_cpu and settings.precision is not Precision.FLOAT32
    measured = _measured(programs)
    if is_widened:
        what = (
            "converts to float32 and back at each operation, which is several times slower"
            if Lowering.FLOAT32 in settings.disable_lowerings
            else "computes in float32 all the same"
        )
        return [
            f"precision {settings.precision} in mode xla: on a CPU XLA {what}{measured and ': '}{measured};"
            " bfloat16 pays in the modes graph and openvino, where the processor multiplies it"
        ]
    is_default = settings.effective_default_mode is Mode.XLA
    return [f"mode xla, the default: {measured}; mode auto takes the faster one"] if is_default and measured else []


def _measured(programs: Programs) -> str:
    """Returns how much faster than XLA another mode is, in the bucket where it is most so; empty if nowhere."""
    ratios: dict[float, tuple[Bucket, Mode]] = {}
    for (mode, bucket), program in programs.items():
        xla = programs.get((Mode.XLA, bucket))
        if xla is not None and xla.cost.loaded_s - program.cost.loaded_s >= MIN_S:
            ratios[xla.cost.loaded_s / max(program.cost.loaded_s, MIN_S)] = bucket, mode
    if not ratios or max(ratios) < CLEARLY:
        return ""
    bucket, mode = ratios[max(ratios)]
    xla_s, other_s = (programs[each, bucket].cost.loaded_s for each in (Mode.XLA, mode))
    return f"a batch in {bucket} takes {xla_s * 1000:.3g} ms in xla and {other_s * 1000:.3g} ms in {mode}"
