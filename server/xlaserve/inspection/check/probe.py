"""The process that checks one model: `python -m xlaserve.inspection.check.probe`.

Reads an `Assignment` as one line of JSON from stdin, and ends when stdin is closed, since its parent may have been
killed. Writes each finding to stdout as a line of JSON at once.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from xlaserve.config import Bucket, Lowering, Mode
from xlaserve.engine import memory
from xlaserve.engine.inputs import Rows
from xlaserve.engine.program import Executable, IsLowered, Outputs, run_batch
from xlaserve.engine.warmup.compiler import noise
from xlaserve.engine.warmup.difference import relative
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import XlaserveError
from xlaserve.inspection import buffers, dump
from xlaserve.inspection.check.record import WITHOUT, Assignment, CheckedProgram, Environment
from xlaserve.models import catalog, pixel_doubts, scores
from xlaserve.models.catalog import Model
from xlaserve.programs.tf import device
from xlaserve.programs.xla_refusal import Refusal, explain
from xlaserve.telemetry.logs import quiet_tensorflow

MAX_RUNS: Final = 5
TIMING_BUDGET_S: Final = 1.0
"""Seconds after which a program is not run again; it runs MAX_RUNS times at most."""
SLOW_S: Final = 5.0
"""Seconds of a run beyond which a mode is not tried with a larger batch."""
_PACKAGES: Final = ("xlaserve", "tensorflow", "tensorflow-cpu", "keras", "keras-cv", "keras-hub", "numpy", "openvino")

Write = Callable[[dict[str, Any]], object]


def main() -> None:
    """Checks a model. A model that can't be built or compiled is reported, and does not fail the process."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout
    assignment = Assignment.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def write(line: dict[str, Any]) -> None:
        results.write(json.dumps(line) + "\n")
        results.flush()

    quiet_tensorflow()
    try:
        with dump.dumped() as folder:
            Probe(assignment, folder, write).check()
    except XlaserveError as error:
        write({"failure": str(error)})
    write({"is_done": True})
    sys.stderr.flush()
    os._exit(0)  # TensorFlow's threads may not end


class Probe:
    """Checks one model. `folder` is where XLA dumps the programs that it compiles."""

    def __init__(self, assignment: Assignment, folder: Path, write: Write) -> None:
        (self._settings,) = assignment.settings.models
        self._assignment = assignment
        self._folder = folder
        self._write = write
        self._eager: Outputs | None = None
        self._doubts: list[str] = []

    def check(self) -> None:
        """Checks the modes one after the other. Raises XlaserveError where the model can't be built."""
        chosen = device.configure(self._assignment.settings, catalog.uses_tensorflow(self._settings))
        self._write({"machine": environment(chosen.name).model_dump()})
        began = time.perf_counter()
        model = catalog.load(self._settings)
        self._write(
            {
                "task": model.task.name,
                "reading": catalog.reading(model.task, model.reason) if model.reason else "",
                "weights": model.weights,
                "size": model.buckets[0][1:],
                "lowered": model.lowerings,
                "load_s": time.perf_counter() - began,
            }
        )
        for mode in self._assignment.modes:
            self._check_arm(model, mode, str(mode))
            self._write({"doubts": self._doubts})
            if mode.traits.is_jit and isinstance(model.program, IsLowered):  # now without lowerings that failed
                self._write({"lowered": model.program.lowerings(model.buckets[0])})
        if not self._assignment.lowerings or Mode.XLA not in self._assignment.modes:
            return
        for lowering in Lowering:
            if lowering in model.lowering_names:
                without = (*self._settings.disable_lowerings, lowering)
                other = catalog.load(self._settings.model_copy(update={"disable_lowerings": without}))
                self._check_arm(other, Mode.XLA, f"{Mode.XLA} {WITHOUT} {lowering}")

    def _check_arm(self, model: Model, mode: Mode, arm: str) -> None:
        row = noise(model.buckets[0]._replace(batch=1), model.inputs)
        # It compares nothing.
        rows = Verifier(task=model.task, reference=None, buckets=(), batch_dependence="allow", inputs=model.inputs)
        slowest_s = 0.0
        # Eager is only the reference, so that one batch size is enough.
        for bucket in model.buckets[:1] if mode is Mode.EAGER else model.buckets:
            self._write({"trying": f"{arm} {bucket}"})
            if slowest_s > SLOW_S:
                program = CheckedProgram(arm=arm, batch=bucket.batch, skipped=f"a smaller batch took {slowest_s:.0f} s")
            else:
                batch = tuple(np.repeat(each, bucket.batch, axis=0) for each in row)
                program = self._try(model, mode, arm, bucket, batch, rows=rows)
            slowest_s = max(slowest_s, (program.run_ms or 0.0) / 1000)
            self._write({"program": program.model_dump(mode="json")})

    def _try(
        self, model: Model, mode: Mode, arm: str, bucket: Bucket, batch: Rows, *, rows: Verifier
    ) -> CheckedProgram:
        """Tries a program with `batch`, and with those of warm-up, for each of which `rows` wants a row."""
        before, dumped = memory.resident_bytes(), dump.compiled(self._folder)
        with suppress(OSError):  # the peak is then the peak of the whole process's life
            memory.forget_peak()
        try:
            compilation = model.program.compile(mode, bucket)
            seconds, outputs = _run(compilation.executable, batch)
            peak_bytes = max(0, memory.peak_bytes() - before)
            rows.verify(mode, bucket, compilation, partial(model.program.compile, mode, bucket))
            self._doubts = self._doubts or [*pixel_doubts.doubts(model), *scores.doubts(model, outputs)]
        except Exception as error:
            return CheckedProgram(arm=arm, batch=bucket.batch, refusal=explain(error))
        apart: tuple[float | None, float | None] = (None, None)
        if mode is Mode.EAGER:
            self._eager = outputs
        elif self._eager is not None:
            apart = difference(model, self._eager, outputs)
        if apart[0] == np.inf:
            refusal = Refusal(message="gives NaN or infinity where eager does not")
            return CheckedProgram(arm=arm, batch=bucket.batch, refusal=refusal)
        assigned = [_memory(file) for file in dump.compiled(self._folder) - dumped] if mode.traits.is_jit else []
        return CheckedProgram(
            arm=arm,
            batch=bucket.batch,
            trace_s=compilation.trace_s,
            compile_s=compilation.compile_s,
            run_ms=seconds * 1000,
            difference=apart[0],
            disagreement=apart[1],
            parameter_bytes=max((found.parameters + found.constants for found in assigned), default=None),
            temporary_bytes=max((found.temporaries for found in assigned), default=None),
            peak_bytes=peak_bytes,
        )


def environment(device_name: str) -> Environment:
    """Returns the device, the machine and the versions of packages with which the check runs."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return Environment(
        device=device_name, cores=device.usable_cores(), python=platform.python_version(), packages=found
    )


def difference(model: Model, eager: Outputs, outputs: Outputs) -> tuple[float | None, float | None]:
    """Returns how far `outputs`, each of whose rows answers the one image of `eager`, are from `eager`.

    The first number is the largest difference of float32 outputs, over the largest magnitude of that output in eager;
    the second is the largest share of differing integers in an output. Either is None where no output of that kind can
    be compared: an output that is constant in eager and equal in both, as of a detector with random weights that finds
    nothing, is left out.
    """
    floats, integers = [], []
    for spec, wanted, got in zip(model.task.outputs, eager, outputs, strict=True):
        if spec.name in model.task.reordered or (np.all(wanted == wanted.flat[0]) and np.all(got == wanted)):
            continue
        if wanted.dtype.kind == "f":
            floats.append(relative(wanted, got))
        else:
            integers.append(float(np.mean(got != wanted)))
    return max(floats, default=None), max(integers, default=None)


def _memory(file: Path) -> buffers.Memory:
    return buffers.parse(dump.read(file).buffer_assignment)


def _run(executable: Executable, rows: Rows) -> tuple[float, Outputs]:
    """Returns the median seconds of a few runs, and the outputs of the last."""
    seconds: list[float] = []
    while len(seconds) < MAX_RUNS and sum(seconds) < TIMING_BUDGET_S:
        began = time.perf_counter()
        outputs = run_batch(executable, *rows)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), outputs


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
