"""The state of a sweep: JSON lines, one for each cell, from which it resumes and its report is made."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError

SCHEMA: Final = "xlaserve.loadtest.sweep/1"
FILE_NAME: Final = "sweep.jsonl"


class SweepFileError(Exception):
    """The state file can't be used; the message says why."""


@dataclass(frozen=True, order=True)
class Cell:
    """One model at one resolution and batch; its modes are measured together, in blocks that alternate."""

    source: str
    resolution: int | None
    """Height and width in pixels; None for the model's own."""
    batch: int

    def __str__(self) -> str:
        size = "own size" if self.resolution is None else f"{self.resolution} px"
        return f"{self.source}, {size}, batch {self.batch}"


@dataclass(frozen=True)
class ModeResult:
    """The figures of one mode in a cell, with 95% intervals, or why there are none."""

    reason: str | None = None
    """Why there is no figure: it did not load or compile, failed, or took too long."""
    images_per_s: float | None = None
    images_per_s_interval: tuple[float, float] | None = None
    ratio: float | None = None
    """Images/s over those of the baseline."""
    ratio_interval: tuple[float, float] | None = None
    verdict: str | None = None
    """faster, slower or inconclusive; None for the baseline."""
    verdict_reason: str | None = None
    """Why it is inconclusive."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    trace_s: float | None = None
    compile_s: float | None = None
    outputs_agree: bool | None = None
    """Whether the outputs are equal to the baseline's, within tolerance."""


@dataclass(frozen=True)
class Entry:
    """A cell that is done."""

    cell: Cell
    name: str
    family: str
    results: Mapping[str, ModeResult]
    """Results by mode."""
    at: str
    """When the cell was done, ISO 8601."""
    seconds: float
    """Time that the cell took."""


_ENTRY: Final = TypeAdapter(Entry)


@dataclass
class Sweep:
    """The contents of a state file."""

    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    baseline: str
    started_at: str
    entries: dict[Cell, Entry] = field(default_factory=dict)

    def done(self, cell: Cell, modes: Iterable[str], *, retry_failed: bool = False) -> bool:
        """Returns whether each of `modes` has its result, which may be the reason why it has no figure."""
        entry = self.entries.get(cell)
        if entry is None or not set(modes) <= set(entry.results):
            return False
        return not (retry_failed and any(entry.results[mode].reason for mode in modes))


class SweepFile:
    """The state file of a sweep in `folder`, locked by one process: `with` opens or creates it.

    `sweep` is what it holds. Entering raises SweepFileError when another process has it, when it isn't such a file, or
    when it was made in another environment or with another baseline: figures of two machines don't mix.
    """

    def __init__(self, folder: Path, fresh: Sweep) -> None:
        self.sweep = fresh
        self._path = folder / FILE_NAME

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.stat().st_size:
                self._resume()
            else:
                head = {name: value for name, value in vars(self.sweep).items() if name != "entries"}
                self._write({"kind": "header", "schema": SCHEMA, **head})
        except BlockingIOError:
            self._file.close()
            raise SweepFileError(f"{self._path} is in use by another sweep") from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, entry: Entry) -> None:
        """Appends an entry; it is on disk when this returns."""
        self.sweep.entries[entry.cell] = entry
        self._write({"kind": "entry", **dataclasses.asdict(entry)})

    def _resume(self) -> None:
        kept = read(self._path)
        for name in ("cpu", "cores", "gpus"):
            # As JSON gives it back: a tuple is a list there.
            here, there = (json.loads(json.dumps(sweep.environment.get(name))) for sweep in (self.sweep, kept))
            if here != there:
                other = f"another machine ({name}: {there}, here {here})"
                raise SweepFileError(f"{self._path} was measured on {other}; choose another --out")
        if kept.baseline != self.sweep.baseline:
            raise SweepFileError(f"{self._path} has {kept.baseline} as its baseline; choose another --out")
        # An incomplete last line, left by a crash, is removed; the next one would be appended to it.
        whole = self._path.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole[0]) + len(whole[1]))
        self.sweep = kept

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> Sweep:
    """Reads a state file, or the one in a folder; a last line that was cut off is ignored. Raises SweepFileError."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        head = json.loads(lines[0]) if lines else {}
        if head.get("schema") != SCHEMA:
            raise SweepFileError(f"{path}: expected schema {SCHEMA}, got {head.get('schema')}")
        sweep = Sweep(head["environment"], head["options"], head["baseline"], head["started_at"])
        for entry in map(_ENTRY.validate_json, lines[1:]):
            sweep.entries[entry.cell] = entry
    except OSError as error:
        raise SweepFileError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"])) or "entry"
        raise SweepFileError(f"{path} is not the state of a sweep: {field_name}: {first['msg'].lower()}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SweepFileError(f"{path} is not the state of a sweep: {error}") from error
    return sweep
