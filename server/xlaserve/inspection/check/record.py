"""What a check finds out, as its JSON file holds it."""

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
"""A mode whose float32 outputs are further from eager's than this computes something else; rounding stays far below."""


WITHOUT: Final = "without"


class Assignment(Frozen):
    """What to check: the one model of `settings`, with the batches of its buckets."""

    settings: Settings
    modes: tuple[Mode, ...]
    lowerings: bool
    """Whether XLA is tried without each of the model's lowerings too."""


class CheckedProgram(Frozen):
    """One program of one model."""

    arm: str
    """Its mode, perhaps without a lowering: `xla`, `xla without depthwise`."""
    batch: int
    refusal: Refusal | None = None
    skipped: str | None = None
    """Why it was not made, where that is no failure."""
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
    """What the process's resident size rose by, at most, while the program was made and run."""

    @property
    def is_wrong(self) -> bool:
        """Whether it can't be made, or computes something other than eager does."""
        return self.refusal is not None or (self.difference or 0.0) > DIFFERENCE_LIMIT


class Machine(Frozen):
    """Where and with what a model was checked."""

    device: str
    cores: int
    python: str
    packages: dict[str, str]

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return f"{self.device}, {self.cores} cores, Python {self.python}, {packages}"


class Checked(Frozen):
    """One model."""

    name: str
    """What it was asked for by: a configured name, or a source."""
    source: str
    modes: tuple[Mode, ...]
    batches: tuple[int, ...]
    lowerings: bool = False
    """Whether XLA was tried without the lowerings too."""
    at: str
    """When its check ended, UTC, ISO 8601."""
    seconds: float
    """What its check took, building the model included."""
    machine: Machine | None = None
    task: str | None = None
    weights: str | None = None
    size: tuple[int, int] | None = None
    """Height and width of its input."""
    load_s: float | None = None
    lowered: str = ""
    """The lowerings that XLA runs it with, and how often each: `depthwise 17`."""
    programs: tuple[CheckedProgram, ...] = ()
    failure: str | None = None
    """Why the check ended early: the model can't be built, the process died, or its time was up."""

    @property
    def has_failed(self) -> bool:
        """Whether anything is wrong with the model in any mode."""
        return self.failure is not None or any(program.is_wrong for program in self.programs)

    def find(self, arm: str, batch: int) -> CheckedProgram | None:
        """Returns one of its programs, where that was tried."""
        return next((found for found in self.programs if (found.arm, found.batch) == (arm, batch)), None)

    def answers(self, modes: Iterable[Mode], batches: Iterable[int], lowerings: bool) -> bool:
        """Whether nothing would be learnt by checking it again with these."""
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
    """Writes a JSON list of records, at once: readers see a whole file at any time, also after a crash.

    Raises ConfigError.
    """
    write_text(file, json.dumps(_records.dump_python(tuple(checked), mode="json"), indent=1) + "\n")


def check_writable(file: Path) -> None:
    """Raises ConfigError where `write_text` could not put anything there."""
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
        raise ConfigError(f"expected a file in a folder that can be written, got {file}")


def write_text(file: Path, text: str) -> None:
    """Puts `text` in the place of `file` at once. Raises ConfigError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{file} can't be written: {error.strerror}") from None
