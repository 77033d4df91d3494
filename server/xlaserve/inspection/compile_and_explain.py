"""Compiles one program, runs it, and explains it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tensorflow as tf

from xlaserve.config import Bucket
from xlaserve.engine.inputs import Rows
from xlaserve.engine.program import Compilation, Executable
from xlaserve.engine.warmup.compiler import measure as measure_run
from xlaserve.engine.warmup.compiler import noise
from xlaserve.errors import ModelFailed
from xlaserve.inspection import buffers, dump, explanation, hlo, roofline
from xlaserve.inspection.dump import Programs
from xlaserve.inspection.explanation import Explanation
from xlaserve.models.catalog import Model
from xlaserve.programs.tf import trace
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.function import stablehlo

TRACED_RUNS: Final = 5
"""Runs over which the time of an instruction is averaged."""


@dataclass(frozen=True)
class Explained:
    """An explanation, and the program's texts from which it was made."""

    explanation: Explanation
    programs: Programs
    stablehlo: str
    """The program as TensorFlow gave it to XLA, in the portable dialect."""


def explain(
    model: Model,
    bucket: Bucket,
    device: Device,
    compilation: Compilation,
    *,
    folder: Path,
    peak: tuple[float | None, float | None],
) -> Explained:
    """Explains the XLA program of `model` for `bucket`, compiled as `compilation`.

    `folder` is the folder of `dump.dumped`. `peak` is the machine's FLOP/s and bytes/s; a value that is None is
    measured. Blocks. Raises ModelFailed where XLA compiled nothing.
    """
    compiled = dump.compiled(folder)
    if not compiled:
        raise ModelFailed("XLA compiled nothing: the model has no XLA program to look into")
    # The largest: a model may have other, small programs of its own.
    programs = dump.read(max(compiled, key=lambda file: file.stat().st_size))
    before, after = hlo.parse(programs.hlo), hlo.parse(programs.optimized_hlo)
    measured_s = measure_run(compilation.executable, bucket, lanes=1, inputs=model.inputs).alone_s
    traced = _trace(compilation.executable, noise(bucket, model.inputs))
    machine = roofline.measure(*peak)
    explained = Explanation(
        model=model.settings.name,
        source=model.settings.source,
        bucket=bucket,
        device=str(device),
        versions=f"TensorFlow {tf.__version__}",
        machine=machine,
        machine_is_measured=None in peak,
        operations_before=before.count(),
        operations_after=after.count(),
        fusions=explanation.fusions(after),
        rows=explanation.rows(after, machine, traced),
        memory=buffers.parse(programs.buffer_assignment),
        compile_s=compilation.compile_s,
        measured_s=measured_s,
    )
    return Explained(explained, programs, stablehlo(compilation.executable))


def _trace(executable: Executable, rows: Rows) -> dict[str, float]:
    """Returns the mean seconds of each instruction over a few runs."""
    with tempfile.TemporaryDirectory(prefix="xlaserve-trace-") as folder:
        with trace.recorded(Path(folder)):
            for _ in range(TRACED_RUNS):
                executable(*rows)
        seconds = trace.instruction_s(Path(folder))
    return {name: second / TRACED_RUNS for name, second in seconds.items()}
