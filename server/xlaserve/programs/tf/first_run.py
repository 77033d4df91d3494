"""The first run of an executable, in which XLA compiles, timed apart from the later ones."""

from __future__ import annotations

import time

from xlaserve.config import Bucket
from xlaserve.engine.inputs import Inputs, zeros
from xlaserve.engine.program import Compilation, Executable, FixedShape
from xlaserve.programs.openvino.openvino_program import CompiledModel
from xlaserve.programs.tf.frozen_graph import trim_heap
from xlaserve.programs.tf.function import Function


def run_first(
    prepared: Executable,
    inputs: Inputs,
    bucket: Bucket,
    began: float,
    *,
    runs: int = 1,
    run_s: float | None = None,
) -> Compilation:
    """Runs the executable `prepared` for a bucket since `began`; its first `runs` runs may compile.

    `run_s` is the time of a later run in seconds, which is measured if it is not known.
    """
    executable = FixedShape(prepared, bucket, inputs)
    traced = time.perf_counter()
    blank = zeros(inputs, bucket)
    for _ in range(runs):
        executable(*blank)
    compiled = time.perf_counter()
    if run_s is None:
        executable(*blank)
        run_s = time.perf_counter() - compiled
    trim_heap()
    warnings = prepared.warnings if isinstance(prepared, CompiledModel | Function) else ()
    if isinstance(prepared, CompiledModel):
        traced -= prepared.compile_s
    compile_s = max(0.0, compiled - traced - runs * run_s)
    return Compilation(executable, traced - began, compile_s, warnings)
