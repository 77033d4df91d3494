"""The files beside an ONNX file that have its weights: `external_data` in the wire format of protocol buffers.

The file may have 2 GB, most of which are weights: only the fields that lead to the names are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, NamedTuple

from xlaserve.config.stamp import Stamp

SUFFIX: Final = ".onnx"
TENSOR: Final = "TensorProto"
MESSAGES: Final[Mapping[str, Mapping[int, str]]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: TENSOR, 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **{5: TENSOR, 10: TENSOR, 6: "GraphProto", 11: "GraphProto"},
        **{22: "SparseTensorProto", 23: "SparseTensorProto"},
    },
    "SparseTensorProto": {1: TENSOR, 2: TENSOR},
}
"""ONNX's messages that lead to tensors, and their fields that do, by number."""
EXTERNAL_DATA: Final = 13
DATA_LOCATION: Final = 14
"""Fields of tensors: where the numbers are, as keys (1) and values (2), and whether they are there."""
EXTERNAL: Final = b"\x01"
"""The value of `data_location` for tensors whose numbers are in another file."""
WINDOW_BYTES: Final = 1 << 16
KEPT: Final = 256
LONGEST_NAME_BYTES: Final = 4096
MOST_FIELDS: Final = 1_000_000
"""Fields that are looked at, in about a second; networks of a thousand layers have some ten thousand."""
NESTED: Final = 100
"""How deep messages may be in each other: as deep as protocol buffers are read."""
_VARINT, _BYTES = 0, 2
_FIXED: Final[Mapping[int, int]] = {1: 8, 5: 4}
_KINDS: Final = {_VARINT, _BYTES, *_FIXED}
"""The wire types, and the bytes of those that have a fixed length."""
_HEAD_BYTES: Final = 20
"""Bytes of a field's number and length, at most."""


def names(file: Path) -> tuple[str, ...]:
    """Returns the names of the files with weights that an ONNX file lists, sorted, as they are written there.

    Those that could be read where the file is damaged or has more than MOST_FIELDS. Raises OSError.
    """
    stamp = Stamp.of(file)
    # Polls ask each time. A file that was changed just now may be changed again without another stamp.
    return _kept(file, stamp) if stamp.shows_changes_after(time.time_ns()) else _names(file)


def is_inside(name: str) -> bool:
    """Returns whether a name is that of a file in the folder of its ONNX file, or in one below. Links may lead out."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def files(file: Path) -> list[Path]:
    """Returns the paths of the files with weights that an ONNX file lists and that are named as inside its folder.

    There may be nothing at them. None for other files, and where it can't be read.
    """
    if file.suffix.lower() != SUFFIX or not file.is_file():  # to open a pipe would wait for whoever writes it
        return []
    with suppress(OSError):
        return [file.parent / name for name in names(file) if is_inside(name)]
    return []


@lru_cache(KEPT)
def _kept(file: Path, stamp: Stamp) -> tuple[str, ...]:
    return _names(file)


def _names(file: Path) -> tuple[str, ...]:
    with file.open("rb") as opened:
        window = _Window(opened)
        model = _Field(0, 0, file.stat().st_size)
        found = {_name(window, tensor) for tensor in _tensors(window, "ModelProto", model, NESTED)}
    return tuple(sorted(name.decode(errors="replace") for name in found if name is not None))


class _Field(NamedTuple):
    """A field of a message: its number, and where in the file its content is."""

    number: int
    start: int
    end: int


class _Window:
    """A file, of which a piece at a time is in memory.

    It is not mapped: where a mapped file is cut off meanwhile, reading it ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._start, self._piece = 0, b""
        self.fields_left = MOST_FIELDS

    def read(self, start: int, count: int) -> bytes:
        """Returns `count` bytes from `start` on, or fewer at the end of the file. Raises OSError."""
        at = start - self._start
        if not 0 <= at <= at + count <= len(self._piece):
            self._file.seek(start)
            at, self._start, self._piece = 0, start, self._file.read(max(count, WINDOW_BYTES))
        return self._piece[at : at + count]

    def content(self, field: _Field) -> bytes:
        """Returns the content of a short field. Raises OSError."""
        return self.read(field.start, min(field.end - field.start, LONGEST_NAME_BYTES))


def _tensors(window: _Window, kind: str, message: _Field, nested: int) -> Iterator[_Field]:
    """Yields the tensors of a message, and of those in it up to `nested` deep."""
    fields = MESSAGES[kind]
    for field in _fields(window, message):
        inner = fields.get(field.number)
        if inner == TENSOR:
            yield field
        elif inner is not None and nested:
            yield from _tensors(window, inner, field, nested - 1)


def _name(window: _Window, tensor: _Field) -> bytes | None:
    """Returns the name of the file that has a tensor's numbers; None where the tensor has them."""
    name, is_external = None, False
    for field in _fields(window, tensor):
        if field.number == DATA_LOCATION:
            is_external = window.content(field) == EXTERNAL
        elif field.number == EXTERNAL_DATA:
            pair = {each.number: window.content(each) for each in _fields(window, field)}
            if pair.get(1) == b"location":
                name = pair.get(2, b"")
    return name if is_external else None


def _fields(window: _Window, message: _Field) -> Iterator[_Field]:
    """Yields the fields of a message, up to the first that is damaged or goes beyond its end."""
    at = message.start
    while at < message.end and window.fields_left:
        window.fields_left -= 1
        head = window.read(at, _HEAD_BYTES)
        key, start = _varint(head, 0)
        number, kind = key >> 3, key & 7
        length = _FIXED.get(kind, 0)
        if kind == _BYTES:
            length, start = _varint(head, start)
        elif kind == _VARINT:
            _, end = _varint(head, start)
            length = end - start
        if not start or length < 0 or (kind not in _KINDS) or at + start + length > message.end:
            return
        yield _Field(number, at + start, at + start + length)
        at += start + length


def _varint(head: bytes, at: int) -> tuple[int, int]:
    """Returns the number that is written from `at` on, and where it ends: 0 where it does not."""
    value = 0
    for index, byte in enumerate(head[at : at + 10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    return 0, 0
