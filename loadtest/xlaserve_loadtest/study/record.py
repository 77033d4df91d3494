"""The state file of a sweep: JSON lines, one for each cell, from which the sweep resumes and its report is made.

Each header has the conditions of the cells after it: versions, duration, load. A sweep resumes only from cells whose
header agrees with its own conditions in everything that changes a figure.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError

from xlaserve_loadtest.analysis.changes import apart

SCHEMA: Final = "xlaserve.loadtest.sweep/1"
FILE_NAME: Final = "sweep.jsonl"

_MACHINE: Final = ("cpu", "cores", "gpus")
_FIGURE_OPTIONS: Final = ("duration", "concurrency", "in_process", "no_control", "processes")
"""Options that change a figure of a cell. The time limit decides only whether there is a figure."""


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
    """The figures of one mode in a cell with 95% intervals, or the reason why there are none."""

    reason: str | None = None
    """Why there are no figures: the model did not load or compile, failed, or took too long; None where there are."""
    images_per_s: float | None = None
    images_per_s_interval: tuple[float, float] | None = None
    ratio: float | None = None
    """Images/s over images/s of the baseline."""
    ratio_interval: tuple[float, float] | None = None
    verdict: str | None = None
    """faster, slower or inconclusive; None for the baseline."""
    verdict_reason: str | None = None
    """Why the verdict is inconclusive."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    trace_s: float | None = None
    compile_s: float | None = None
    outputs_agree: bool | None = None
    """Whether the outputs are equal to the baseline's, within tolerance."""


@dataclass(frozen=True)
class Entry:
    """A measured cell."""

    cell: Cell
    name: str
    family: str
    results: Mapping[str, ModeResult]
    """Results by mode."""
    at: str
    """Time at which the cell was done, ISO 8601."""
    seconds: float
    """Seconds that the cell took."""
    file: str = ""
    """Size and modification time of the model's file or folder; empty where the source is neither."""


_ENTRY: Final = TypeAdapter(Entry)


@dataclass
class Sweep:
    """The contents of a state file."""

    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    baseline: str
    started_at: str
    entries: dict[Cell, Entry] = field(default_factory=dict)
    left_out: dict[Cell, Sequence[str]] = field(default_factory=dict)
    """Cells that were measured only under other conditions, with the differences: "duration: 5 became 10"."""

    @property
    def key(self) -> Mapping[str, Any]:
        """The conditions that change a figure of a cell, in JSON's types."""
        options = {name: self.options.get(name) for name in _FIGURE_OPTIONS}
        key: Mapping[str, Any] = json.loads(
            json.dumps({**self.environment, "machine_ids": (), **options, "baseline": self.baseline})
        )
        return key

    def done(self, cell: Cell, modes: Iterable[str], *, retry_failed: bool = False) -> bool:
        """Returns whether each of `modes` has a result for the present model file; with `retry_failed`, whether all
        have figures."""
        entry = self.entries.get(cell)
        if entry is None or not set(modes) <= set(entry.results) or entry.file != state_of_file(cell.source):
            return False
        return not (retry_failed and any(entry.results[mode].reason for mode in modes))


class SweepFile:
    """The state file of a sweep in `folder`. Entering opens or creates it and locks it for this process.

    `sweep` has its cells that were measured under the conditions of `fresh`. Entering raises SweepFileError where
    another process has locked the file, where it is no state file, or where it was made on another machine, since
    figures of two machines can't be compared.
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
                self._write_header()
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
        """Appends an entry; it is on disk when `add` returns."""
        self.sweep.entries[entry.cell] = entry
        self._write({"kind": "entry", **dataclasses.asdict(entry)})

    def _resume(self) -> None:
        fresh, sessions = self.sweep, _sessions(self._path)
        for name in _MACHINE:
            here, there = (sweep.key.get(name) for sweep in (fresh, sessions[-1]))
            if here != there:
                other = f"another machine ({name}: {there}, here {here})"
                raise SweepFileError(f"{self._path} was measured on {other}; choose another --out")
        # An incomplete last line, left by a crash, is removed; the next one would be appended to it.
        whole = self._path.read_bytes().rpartition(b"\n")
        self._file.truncate(len(whole[0]) + len(whole[1]))
        self.sweep = _merged(sessions, fresh)
        if (fresh.key, _plain(fresh.options)) != (sessions[-1].key, sessions[-1].options):
            self._write_header()

    def _write_header(self) -> None:
        head = {name: getattr(self.sweep, name) for name in ("environment", "options", "baseline", "started_at")}
        self._write({"kind": "header", "schema": SCHEMA, **head})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> Sweep:
    """Reads a state file, or the one in a folder; a last line that was cut off is ignored. Raises SweepFileError."""
    sessions = _sessions(path / FILE_NAME if path.is_dir() else path)
    return _merged(sessions, sessions[-1])


def state_of_file(source: str) -> str:
    """Returns size and modification time of a model's file or folder; empty where the source is neither."""
    path = Path(source)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else []
    if not files:
        return ""
    states = [each.stat() for each in files]
    return f"{sum(state.st_size for state in states)} bytes, {max(state.st_mtime_ns for state in states)}"


def _merged(sessions: Sequence[Sweep], last: Sweep) -> Sweep:
    """Returns the cells measured under the conditions of `last`, and in `left_out` those measured only under others."""
    merged = Sweep(last.environment, last.options, last.baseline, last.started_at)
    for session in sessions:
        differs = [f"{name}: {what}" for name, what in apart("", session.key, last.key)]
        for cell, entry in session.entries.items():
            if differs:
                merged.left_out[cell] = [text.removeprefix(".") for text in differs]
            else:
                merged.entries[cell] = entry
    merged.left_out = {cell: why for cell, why in merged.left_out.items() if cell not in merged.entries}
    return merged


def _plain(options: Mapping[str, Any]) -> Any:
    """Returns options in the types in which JSON gives them back: tuples become lists."""
    return json.loads(json.dumps(options))


def _sessions(path: Path) -> list[Sweep]:
    """Reads a state file: a sweep for each header, at least one, with the cells after it. Raises SweepFileError."""
    sessions: list[Sweep] = []
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            head = json.loads(line) if not sessions or b'"kind": "header"' in line else {}
            if head.get("kind") == "header" or not sessions:
                if head.get("schema") != SCHEMA:
                    raise SweepFileError(f"{path}: expected schema {SCHEMA}, got {head.get('schema')}")
                sessions.append(Sweep(head["environment"], head["options"], head["baseline"], head["started_at"]))
            else:
                entry = _ENTRY.validate_json(line)
                sessions[-1].entries[entry.cell] = entry
        if not sessions:
            raise SweepFileError(f"{path}: expected schema {SCHEMA}, got nothing")
    except OSError as error:
        raise SweepFileError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(map(str, first["loc"])) or "entry"
        raise SweepFileError(f"{path} is not the state of a sweep: {field_name}: {first['msg'].lower()}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SweepFileError(f"{path} is not the state of a sweep: {error}") from error
    return sessions
