"""Reader and writer of run files: JSON lines, compressed by gzip.

A file grows during the run, and is readable at any time: the reader accepts a file that ends in mid-line.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from xlaserve_loadtest.files import naming
from xlaserve_loadtest.record.blocks import BlockLine
from xlaserve_loadtest.record.lines import (
    SCHEMA,
    SUFFIX,
    End,
    Equality,
    Event,
    Failure,
    GeneratorLine,
    Header,
    Line,
    Requests,
    Run,
    Server,
)
from xlaserve_loadtest.record.requests import REQUEST, STAGES, Rows, Status

_GZIP: Final = 16 + zlib.MAX_WBITS
_MAX_LISTED: Final = 5
"""Run files that an error names."""
_PIECE_BYTES: Final = 2**20
_LINES: Final = "lines"
"""Field of the last line: how many lines the file has, that one included."""


class RunFileError(Exception):
    """The file can't be read as a run; the message says why."""


def new_file(folder: Path, name: str) -> Path:
    """Creates `folder` and an empty run file in it; returns its path, with a number where the name is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    number = 1
    while True:
        # Created without a check before: another run may begin in the same second.
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            path = folder / f"{name}-{number}{SUFFIX}"
        else:
            return path


class RunWriter:
    """Writes a run file line by line, the header first; `with` closes it. Every line is on disk when `write` returns.

    Raises OSError, which names the file, where it can't be written, and ValueError for values that JSON lacks (NaN
    outside of rows).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._gzip = zlib.compressobj(6, wbits=_GZIP)
        self._lines = 0

    def write(self, line: Line) -> None:
        """Appends one line."""
        document = _as_json(line)
        if isinstance(line, End):
            document[_LINES] = self._lines + 1
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        with naming(self.path):
            self._file.write(self._gzip.compress(text.encode() + b"\n") + self._gzip.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()
        self._lines += 1

    def close(self) -> None:
        """Closes the file."""
        if not self._file.closed:
            with naming(self.path), self._file:
                self._file.write(self._gzip.flush())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_run(path: Path) -> Run:
    """Reads a run file, compressed or not. Of a file that was cut off, `Run.end` is None.

    Raises RunFileError, which names the line and the problem, such as data after the end of the run, or lines that are
    missing in its middle.
    """
    chunks: list[Rows] = []
    lines: list[Line] = []
    try:
        for line in _parse(path):
            if lines and isinstance(line, Requests):
                chunks.append(line.rows)
            else:
                lines.append(line)
    except IsADirectoryError:
        raise _no_run(path, "a folder") from None
    except FileNotFoundError:
        raise _no_run(path, "no such file") from None
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror}") from None
    if not lines:
        raise RunFileError(f"{path}: empty; nothing was recorded")
    header, *rest = lines
    if not isinstance(header, Header):
        raise RunFileError(f"{path}: line 1: expected a header, got {header.kind}")
    _check_order(path, header, rest)
    return Run(
        path=path,
        header=header,
        servers=tuple(line for line in rest if isinstance(line, Server)),
        blocks=tuple(line for line in rest if isinstance(line, BlockLine)),
        requests=np.concatenate(chunks) if chunks else np.empty(0, REQUEST),
        events=tuple(line for line in rest if isinstance(line, Event)),
        equalities=tuple(line for line in rest if isinstance(line, Equality)),
        failures=tuple(line for line in rest if isinstance(line, Failure)),
        end=next((line for line in rest if isinstance(line, End)), None),
        generators=tuple(line for line in rest if isinstance(line, GeneratorLine)),
    )


def _no_run(path: Path, got: str) -> RunFileError:
    """Returns the error for what is no run file; it names the newest of those in the folder."""
    where = path if path.is_dir() else path.parent
    found: list[tuple[float, str]] = []
    with suppress(OSError):  # a folder that is not there, or that may not be listed
        for file in where.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # a link to nothing
                found.append((file.stat().st_mtime, file.name))
    found.sort(reverse=True)
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    listed = ", ".join(name for _, name in found[:_MAX_LISTED]) + more or "none"
    return RunFileError(f"{path}: expected a run file, NAME{SUFFIX}, got {got}; run files in {where}: {listed}")


def _check_order(path: Path, header: Header, rest: Sequence[Line]) -> None:
    if any(isinstance(line, Header) for line in rest):
        raise RunFileError(f"{path}: a second header; expected one run")
    names = {arm.name for arm in header.arms}
    seen: set[int] = set()
    for block in rest:
        if not isinstance(block, BlockLine):
            continue
        if block.arm not in names:
            raise RunFileError(f"{path}: block {block.index}: the header names no arm {block.arm!r}")
        if block.index in seen:
            raise RunFileError(f"{path}: block {block.index}: there are two of this index")
        differing, compared = block.generator.differing, block.generator.compared
        if not 0 <= differing <= compared:
            raise RunFileError(
                f"{path}: block {block.index}: generator.differing: expected 0 to {compared}, as many as were "
                f"compared, got {differing}"
            )
        seen.add(block.index)


_STATUS_BY_NAME: Final = {status.name: status.value for status in Status}
_INDICES: Final = ("model", "target", "generator")
_COLUMNS: Final = ("scheduled_ns", "start_ns", "end_ns", "images", "measured")


@dataclass(frozen=True, slots=True)
class _RequestColumns:
    """The JSON form of a `Requests` line."""

    block: int
    scheduled_ns: list[int]
    start_ns: list[int]
    end_ns: list[int]
    status: list[str]
    images: list[int]
    measured: list[bool]
    stages: dict[str, list[float | None]] = field(default_factory=dict)
    model: list[int] | None = None
    """None where all requests are for the arm's first model; `target` and `generator` likewise."""
    target: list[int] | None = None
    generator: list[int] | None = None

    def to_requests(self) -> Requests:
        indices = {column: values for column in _INDICES if (values := getattr(self, column)) is not None}
        columns = [*(getattr(self, column) for column in _COLUMNS), *indices.values(), *self.stages.values()]
        if any(len(column) != len(self.status) for column in columns):
            raise ValueError("columns of different lengths")  # NumPy would repeat a single value
        rows = np.zeros(len(self.status), REQUEST)
        rows["block"] = self.block
        rows["status"] = [_STATUS_BY_NAME[name] for name in self.status]
        for column in _COLUMNS:
            rows[column] = getattr(self, column)
        for column, values in indices.items():
            rows[column] = values
        for stage in STAGES:
            # NumPy reads None as NaN.
            rows[stage] = self.stages.get(stage, math.nan)
        if (rows["end_ns"] < rows["scheduled_ns"]).any():
            raise ValueError("a request that ended before it was due")
        return Requests(self.block, rows)


_ADAPTERS: Final[Mapping[str, TypeAdapter[Any]]] = {
    **{
        line.kind: TypeAdapter(line)
        for line in (Header, Server, GeneratorLine, BlockLine, Event, Equality, Failure, End)
    },
    Requests.kind: TypeAdapter(_RequestColumns),
}


def _as_json(line: Line) -> dict[str, Any]:
    if not isinstance(line, Requests):
        return {"kind": line.kind, **asdict(line)}
    rows = line.rows
    reported = {stage: np.round(rows[stage].astype(np.float64), 7) for stage in STAGES}
    return {
        "kind": line.kind,
        "block": line.block,
        "status": [Status(status).name for status in rows["status"].tolist()],
        **{column: rows[column].tolist() for column in _COLUMNS},
        **{column: rows[column].tolist() for column in _INDICES if rows[column].any()},
        "stages": {
            stage: [None if math.isnan(value) else value for value in values.tolist()]
            for stage, values in reported.items()
            if not np.isnan(values).all()
        },
    }


def _parse(path: Path) -> Iterator[Line]:
    is_over = False
    for number, text in enumerate(_lines(path), start=1):
        where = f"{path}: line {number}"
        if not text.endswith(b"\n"):  # it was cut off
            if is_over:
                raise RunFileError(f"{path}: {len(text):,} bytes follow the end of the run; expected one run in a file")
            return
        if is_over:
            raise RunFileError(f"{where}: follows the end of the run; expected one run in a file")
        document, kind = _document(path, number, text)
        if kind not in _ADAPTERS:
            if number == 1:
                raise RunFileError(f"{where}: expected a header, got {kind}")
            continue  # a kind of line that a later version has added
        schema = document.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise RunFileError(f"{where}: schema {schema!r} is not known here; this version reads {SCHEMA!r}")
        try:
            line = _ADAPTERS[kind].validate_python({key: value for key, value in document.items() if key != "kind"})
            is_over = isinstance(line, End)
            if is_over and document.get(_LINES, number) != number:  # older files have no such number
                raise RunFileError(
                    f"{where}: end: lines: expected {number:,}, got {document[_LINES]}: lines are missing"
                )
            yield line.to_requests() if isinstance(line, _RequestColumns) else line
        except ValidationError as error:
            first = error.errors()[0]
            field_name = ".".join(map(str, first["loc"])) or kind
            raise RunFileError(f"{where}: {kind}: {field_name}: {first['msg'].lower()}") from None
        except KeyError as error:
            raise RunFileError(f"{where}: {kind}: status: {error.args[0]!r} is not a status") from None
        except (ValueError, OverflowError) as error:
            raise RunFileError(f"{where}: {kind}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    """Yields lines with their ends; the last one has none where the file was cut off."""
    begun: list[bytes] = []
    """Pieces of a line whose end has not come."""
    is_first = True
    for piece in filter(None, _pieces(path)):
        if is_first and not piece.startswith(b"{"):
            raise _no_run(path, "another file")
        is_first = False
        first, *others = piece.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun) + b"\n"
            begun = [other]
    if any(begun):
        yield b"".join(begun)


def _document(path: Path, number: int, text: bytes) -> tuple[dict[str, Any], str]:
    """Returns the object that a line holds, and its kind."""
    with suppress(ValueError, RecursionError):
        document = json.loads(text, parse_constant=_no_number)
        if isinstance(document, dict) and isinstance(kind := document.get("kind"), str):
            return document, kind
    if number == 1:
        raise _no_run(path, "another file")
    raise RunFileError(f"{path}: line {number}: expected JSON of a kind, got something else: the file is damaged")


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields the contents of a file, of gzip as far as they go where it was cut off. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_PIECE_BYTES)
        unpacker = zlib.decompressobj(wbits=_GZIP) if data.startswith(b"\x1f\x8b") else None
        while data:
            try:
                yield unpacker.decompress(data, _PIECE_BYTES) if unpacker else data
            except zlib.error as error:
                raise RunFileError(f"{path}: damaged: {error}") from None
            # A piece of zeros unpacks to a thousand times its size.
            data = (unpacker.unconsumed_tail if unpacker else b"") or file.read(_PIECE_BYTES)
            if unpacker and unpacker.eof and (after := len(unpacker.unused_data) + len(data) + len(file.read())):
                raise RunFileError(f"{path}: {after:,} bytes follow the end of the run; expected one run in a file")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not in JSON")
