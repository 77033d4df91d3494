"""Writes and reads run files: JSON lines, compressed by gzip.

A file grows while the run goes on, and every line is kept: the reader accepts a file that ends in mid-line.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from xlaserve_loadtest.record.lines import (
    REQUEST,
    SCHEMA,
    STAGES,
    BlockLine,
    End,
    Equality,
    Event,
    Failure,
    Header,
    Line,
    Requests,
    Run,
    Server,
    Status,
)

_GZIP: Final = 16 + zlib.MAX_WBITS


class RunFileError(Exception):
    """The file can't be read as a run; the message says why."""


class RunWriter:
    """Writes a run file line by line, the header first; `with` closes it. Every line is on disk when `write` returns.

    Raises OSError where the file can't be written, ValueError for values that JSON lacks (NaN outside of rows).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb")
        self._gzip = zlib.compressobj(6, wbits=_GZIP)

    def write(self, line: Line) -> None:
        """Appends one line."""
        text = json.dumps(_as_json(line), allow_nan=False, separators=(",", ":"))
        self._file.write(self._gzip.compress(text.encode() + b"\n") + self._gzip.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if not self._file.closed:
            self._file.write(self._gzip.flush())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_run(path: Path) -> Run:
    """Reads a run file, compressed or not, whole or cut off. Raises RunFileError with the line and what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror}") from None
    lines = list(_parse(path, data))
    if not lines:
        raise RunFileError(f"{path}: empty; nothing was recorded")
    header, *rest = lines
    if not isinstance(header, Header):
        raise RunFileError(f"{path}: line 1: expected a header, got {header.kind}")
    _check_order(path, header, rest)
    chunks = [line.rows for line in rest if isinstance(line, Requests)]
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
    )


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
        seen.add(block.index)


_STATUS_BY_NAME: Final = {status.name: status.value for status in Status}
_COLUMNS: Final = ("scheduled_ns", "start_ns", "end_ns", "images", "measured")


@dataclass(frozen=True, slots=True)
class _RequestColumns:
    """`Requests` as it stands in the file."""

    block: int
    scheduled_ns: list[int]
    start_ns: list[int]
    end_ns: list[int]
    status: list[str]
    images: list[int]
    measured: list[bool]
    stages: dict[str, list[float | None]] = field(default_factory=dict)
    model: list[int] | None = None
    """None where all requests are for the arm's first model."""

    def to_requests(self) -> Requests:
        columns = [*(getattr(self, column) for column in _COLUMNS), *self.stages.values()]
        if any(len(column) != len(self.status) for column in columns):
            raise ValueError("columns of different lengths")  # NumPy would repeat a single value
        rows = np.zeros(len(self.status), REQUEST)
        rows["block"] = self.block
        rows["status"] = [_STATUS_BY_NAME[name] for name in self.status]
        for column in _COLUMNS:
            rows[column] = getattr(self, column)
        if self.model is not None:
            rows["model"] = self.model
        for stage in STAGES:
            # NumPy reads None as NaN.
            rows[stage] = self.stages.get(stage, math.nan)
        if (rows["end_ns"] < rows["scheduled_ns"]).any():
            raise ValueError("a request that ended before it was due")
        return Requests(self.block, rows)


_ADAPTERS: Final[Mapping[str, TypeAdapter[Any]]] = {
    **{line.kind: TypeAdapter(line) for line in (Header, Server, BlockLine, Event, Equality, Failure, End)},
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
        **({"model": rows["model"].tolist()} if rows["model"].any() else {}),
        "stages": {
            stage: [None if math.isnan(value) else value for value in values.tolist()]
            for stage, values in reported.items()
            if not np.isnan(values).all()
        },
    }


def _parse(path: Path, data: bytes) -> Iterator[Line]:
    if data.startswith(b"\x1f\x8b"):
        try:
            data = zlib.decompressobj(wbits=_GZIP).decompress(data)
        except zlib.error as error:
            raise RunFileError(f"{path}: damaged: {error}") from None
    # What stands after the last end of line was cut off.
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        where = f"{path}: line {number}"
        try:
            document = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise RunFileError(f"{where}: not JSON; is this a run file?") from None
        kind = str(document.get("kind")) if isinstance(document, dict) else type(document).__name__
        if kind not in _ADAPTERS:
            raise RunFileError(f"{where}: expected a kind of {', '.join(sorted(_ADAPTERS))}; got {kind!r}")
        schema = document.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise RunFileError(f"{where}: schema {schema!r} is not known here; this version reads {SCHEMA!r}")
        try:
            line = _ADAPTERS[kind].validate_python({key: value for key, value in document.items() if key != "kind"})
            yield line.to_requests() if isinstance(line, _RequestColumns) else line
        except ValidationError as error:
            first = error.errors()[0]
            field_name = ".".join(map(str, first["loc"])) or kind
            raise RunFileError(f"{where}: {kind}: {field_name}: {first['msg'].lower()}") from None
        except KeyError as error:
            raise RunFileError(f"{where}: {kind}: status: {error.args[0]!r} is not a status") from None
        except (ValueError, OverflowError) as error:
            raise RunFileError(f"{where}: {kind}: {error}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not in JSON")
