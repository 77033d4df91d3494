"""The record of a check, as its JSON file has it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from xlaserve.config import Mode, Settings
from xlaserve.config.base import Frozen
from xlaserve.errors import ConfigError
from xlaserve.programs.xla_refusal import Refusal

DIFFERENCE_LIMIT = 1e-3
"""Difference of float32 outputs from eager's, by `CheckedProgram.difference`, above which a mode computes something
else; rounding stays far below."""
WITHOUT: Final = "without"
"""The word in an arm's name between the mode and the lowering that it lacks."""


class Assignment(Frozen):
    """An order to check the one model of `settings`, with the batches of its buckets."""

    settings: Settings
    modes: tuple[Mode, ...]
    lowerings: bool
    """Whether XLA is also checked without each of the model's lowerings."""


class CheckedProgram(Frozen):
    """The check of one program of a model."""

    arm: str
    """The mode, perhaps without a lowering: `xla`, `xla without depthwise`."""
    batch: int
    refusal: Refusal | None = None
    skipped: str | None = None
    """Why the program was not made, where that is no failure."""
    trace_s: float | None = None
    compile_s: float | None = None
    run_ms: float | None = None
    """Median of a few runs, alone on the device."""
    difference: float | None = None
    """Largest difference from eager of any float32 output, over the largest magnitude of that output in eager."""
    disagreement: float | None = None
    """Share of the integers of the outputs (classes, pixels of a class map) that are not eager's."""
    parameter_bytes: int | None = None
    """Bytes of the weights, as XLA holds them."""
    temporary_bytes: int | None = None
    """Further bytes that XLA needs for one run."""
    peak_bytes: int | None = None
    """Largest growth of the process's resident memory while the program was made and run, in bytes."""

    @property
    def is_wrong(self) -> bool:
        """Whether the program can't be made, or differs from eager by more than DIFFERENCE_LIMIT."""
        return self.refusal is not None or (self.difference or 0.0) > DIFFERENCE_LIMIT


class Environment(Frozen):
    """The device, the machine and the versions of packages with which a model was checked."""

    device: str
    cores: int
    python: str
    packages: dict[str, str]

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return f"{self.device}, {self.cores} cores, Python {self.python}, {packages}"


class Checked(Frozen):
    """The check of one model."""

    name: str
    """The model as the command named it: a configured name, or a source."""
    source: str
    modes: tuple[Mode, ...]
    batches: tuple[int, ...]
    lowerings: bool = False
    """Whether XLA was also checked without each of the lowerings."""
    at: str
    """Time at which the check ended, UTC, ISO 8601."""
    seconds: float
    """Seconds that the check took, building the model included."""
    machine: Environment | None = None
    task: str | None = None
    reading: str = ""
    """The task that `auto` chose, and why; empty where the settings or the source name the task."""
    doubts: tuple[str, ...] = ()
    """Doubts about the scores, and the settings that would end them."""
    weights: str | None = None
    size: tuple[int, int] | None = None
    """Height and width of the model's input, in pixels."""
    load_s: float | None = None
    lowered: str = ""
    """The lowerings that XLA runs the model with, and the number of uses of each: `depthwise 17`."""
    programs: tuple[CheckedProgram, ...] = ()
    failure: str | None = None
    """Why the check ended early: the model can't be built, the process died, or it took too long."""

    @property
    def has_failed(self) -> bool:
        """Whether anything is wrong with the model in any mode."""
        return self.failure is not None or any(program.is_wrong for program in self.programs)

    def find(self, arm: str, batch: int) -> CheckedProgram | None:
        """Returns the program of an arm and a batch; None where it was not tried."""
        return next((found for found in self.programs if (found.arm, found.batch) == (arm, batch)), None)

    def answers(self, modes: Iterable[Mode], batches: Iterable[int], lowerings: bool) -> bool:
        """Whether this record already covers a check with these modes, batches and lowerings, without a failure."""
        is_covered = set(modes) <= set(self.modes) and set(batches) <= set(self.batches) and lowerings <= self.lowerings
        return is_covered and not self.has_failed


_records = TypeAdapter(tuple[Checked, ...])


def read(file: Path) -> tuple[Checked, ...]:
    """Reads what `write` wrote. Raises ConfigError."""
    try:
        return _records.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--json: {file} can't be read: {error.strerror}") from None
    except ValidationError as error:
        got = error.errors()[0]["msg"]
        raise ConfigError(f"--json: expected the records of a check in {file}, got {got}") from None


def write(file: Path, checked: Iterable[Checked]) -> None:
    """Writes a JSON list of records atomically: readers see a whole file at any time, also after a crash.

    Raises ConfigError.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(_records.dump_python(tuple(checked), mode="json"), indent=1) + "\n")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{file} can't be written: {error.strerror}") from None


def check_writable(file: Path) -> None:
    """Raises ConfigError where `write` could not write `file`."""
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
        raise ConfigError(f"expected a file in a folder that can be written, got {file}")
