"""Whether everything that a run had planned was measured, and if not, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from xlaserve_loadtest.analysis.samples import Sample, label
from xlaserve_loadtest.record.lines import Run

MARK: Final = "Incomplete run: these are figures of a part of it."
"""First words of every report of such a run in which something was measured."""
_WHOLE: Final = 0.95
"""Share of the asked duration from which on an arm counts as measured to the end."""


def missing(run: Run, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Returns sentences about what is missing, most serious first; none where the run is complete."""
    return tuple(_missing(run, samples))


def _missing(run: Run, samples: Sequence[Sample]) -> Iterator[str]:
    if run.end is None:
        yield "The file was cut off: this is what was measured until then."
    elif run.end.interrupted:
        yield "Interrupted: this is what was measured until then."
    elif not run.end.complete:
        yield f"Not everything that was planned was measured: {run.end.reason or 'no reason was recorded'}."
    measured = {sample.block.arm for sample in samples if sample.answered.size}
    unmeasured = [arm.name for arm in run.header.arms if arm.name not in measured]
    if unmeasured:
        yield f"{', '.join(unmeasured)}: nothing was measured."
    if run.end is None or not run.end.complete:
        yield from _parts(run, samples)


def _parts(run: Run, samples: Sequence[Sample]) -> Iterator[str]:
    """Yields which parts of the plan there are, as far as the file tells the plan."""
    lost = run.requests.size - int(np.isin(run.requests["block"], [block.index for block in run.blocks]).sum())
    if lost:
        yield f"Requests of a block whose end is missing are left out: {lost:,}."
    asked_s, loads = run.header.configuration.get("duration_s"), run.header.configuration.get("loops")
    if run.header.configuration.get("find_max") or not isinstance(asked_s, int | float):
        return
    seconds: dict[tuple[str, str], float] = {}
    for sample in samples:
        key = sample.block.arm, label(sample.block.load)
        seconds[key] = seconds.get(key, 0.0) + sample.seconds
    reached = {load for (_, load), measured_s in seconds.items() if measured_s}
    if isinstance(loads, list) and len(reached) < len(loads):
        yield f"Loads that were reached: {len(reached)} of {len(loads)}."
    short = [(key, own_s) for key, own_s in seconds.items() if 0 < own_s < _WHOLE * asked_s]
    if short:
        parts = "; ".join(f"{arm}, {load} ({own_s:.3g} s)" for (arm, load), own_s in short)
        yield f"Measured for less than the {asked_s:g} s that were asked for: {parts}."
