"""Trace files: the times at which requests of a replay are due, and their kinds."""

from __future__ import annotations

import hashlib
import json
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import numpy as np

from xlaserve_loadtest.files import naming
from xlaserve_loadtest.schedule.arrivals import ArrivalsError, Places, Replay, Schedule
from xlaserve_loadtest.schedule.mix import Kind, Size, read_size

MAX_KINDS: Final = 4096
"""Largest number of kinds of requests in a trace: each is held in memory by every worker."""
MAX_S: Final = 4_000_000.0
"""Latest time of a request in seconds: up to it, a number of JSON is exact to the nanosecond."""

_NS: Final = 10**9
_MAX_SHOWN: Final = 80
_EXPECTED: Final = 'expected seconds, or a JSON object such as {"at_s": 0.25, "images": 4}'


class PartialKind(NamedTuple):
    """The kind of a request as a line states it; a field that is None is chosen by the run."""

    model: str | None = None
    images: int | None = None
    size: Size | None = None
    file: str | None = None
    """Path of the image or .npy file."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The contents of a trace file."""

    path: Path
    sha256: str
    due_ns: Schedule
    """Nanoseconds after the start, ascending; at least one."""
    kinds: tuple[PartialKind, ...]
    """The distinct kinds that lines state."""
    places: Places
    """Index in `kinds` of each request."""
    ends_s: float = math.inf
    """Seconds after the start at which it was cut; infinite where it is whole."""

    @property
    def models(self) -> tuple[str | None, ...]:
        """The distinct models that lines name; None among them where a line names none."""
        return tuple(dict.fromkeys(kind.model for kind in self.kinds))

    @property
    def has_files(self) -> bool:
        """Whether a line names a file."""
        return any(kind.file is not None for kind in self.kinds)

    def until(self, duration_s: float) -> Trace:
        """Returns the requests that are due before `duration_s`. Raises ArrivalsError where there are none."""
        number = int(np.searchsorted(self.due_ns, round(duration_s * _NS)))
        if number == self.due_ns.size:
            return self
        if not number:
            first_s = self.due_ns[0] / _NS
            raise ArrivalsError(f"{self.path}: its first request is due after {first_s:g} s, and --duration is shorter")
        left, places = np.unique(self.places[:number], return_inverse=True)
        kinds = tuple(self.kinds[place] for place in left.tolist())
        return replace(
            self, due_ns=self.due_ns[:number], kinds=kinds, places=places.astype(np.int32), ends_s=duration_s
        )

    def replay(self, models: Sequence[str], drawn: Sequence[Kind]) -> Replay:
        """Returns the replay of its requests. Fields that a line leaves out are taken from the kinds `drawn`, in turn.

        `Kind.model` is an index in `models`. Raises ArrivalsError where there are too many kinds.
        """
        own = {kind: place for place, kind in enumerate(dict.fromkeys(drawn))}
        turns = np.resize([own[kind] for kind in drawn], self.places.size)
        pairs, place_of = np.unique(self.places * np.int64(len(own)) + turns, return_inverse=True)
        rest, kinds = list(own), dict[Kind, int]()
        found = []
        for pair in pairs.tolist():
            kind = _completed(self.kinds[pair // len(own)], rest[pair % len(own)], models)
            found.append(kinds.setdefault(kind, len(kinds)))
        if len(kinds) > MAX_KINDS:
            raise ArrivalsError(f"{self.path}: {_too_many(len(kinds))}, with what --mix, --size and others add")
        return Replay(
            self.due_ns, tuple(kinds), np.array(found, np.int32)[place_of], str(self.path), self.sha256, self.ends_s
        )


def _completed(stated: PartialKind, rest: Kind, models: Sequence[str]) -> Kind:
    return Kind(
        rest.model if stated.model is None else models.index(stated.model),
        stated.images or rest.images,
        stated.size or rest.size,
        stated.file or rest.file,
    )


def read(path: Path) -> Trace:
    """Reads a trace file. Each line is a request: its seconds after the start, or a JSON object with `at_s` and its
    kind.

    Lines ascend in time; empty lines and lines that begin with `#` are ignored. The fields of an object are `model` (a
    name), `images` (a number), `size` (HEIGHTxWIDTH) and `file` (a path in the trace's folder); each may be missing or
    null, and others are ignored. Raises ArrivalsError, which names the line.
    """
    try:
        data = path.read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise ArrivalsError(f"{path}: expected a file that can be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ArrivalsError(f"{path}: expected text in UTF-8: {error}") from None
    due_ns, places, found = array("q"), array("i"), _KindReader(path.parent)
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            at_s, document = _parsed(line)
            at_ns = _read_time(at_s, due_ns[-1] if due_ns else 0)
            places.append(found.place(document))
        except ValueError as error:
            raise ArrivalsError(f"{path}: line {number}: {error}") from None
        due_ns.append(at_ns)
    if not due_ns:
        raise ArrivalsError(f"{path}: no request; {_EXPECTED} on each line")
    return Trace(
        path,
        hashlib.sha256(data).hexdigest(),
        np.array(due_ns, np.int64),
        tuple(found.kinds),
        np.array(places, np.int32),
    )


def _parsed(line: str) -> tuple[Any, dict[str, Any]]:
    """Returns the time in a line, and its object; empty where the line is only a number."""
    if line.startswith("["):
        raise ValueError("expected a request on each line, got a JSON list; `jq -c '.[]' FILE` makes lines of one")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and "at_s" in value:
        return value["at_s"], value
    if value is None or isinstance(value, (dict, str)):
        raise ValueError(f"{_EXPECTED}, got {_cut(line)}")
    return value, {}


def _read_time(at_s: Any, last_ns: int) -> int:
    if type(at_s) not in (int, float) or not 0 <= at_s <= MAX_S:
        raise ValueError(f"at_s: expected seconds after the start, from 0 to {MAX_S:,.0f}, got {_shown(at_s)}")
    at_ns: int = round(at_s * _NS)
    if at_ns < last_ns:
        raise ValueError(f"at_s: expected {last_ns / _NS!r} or later, as in the line before, got {_shown(at_s)}")
    return at_ns


class _KindReader:
    """Reads the kinds that lines state; equal kinds are checked and kept once."""

    def __init__(self, folder: Path) -> None:
        self.kinds: dict[PartialKind, int] = {}
        self._folder = folder
        self._places: dict[str, int] = {}

    def place(self, document: dict[str, Any]) -> int:
        """Returns the index in `kinds` of the kind that a line states. Raises ValueError."""
        fields = [document.get(key) for key in PartialKind._fields]
        text = repr(fields)
        if text not in self._places:
            model, images, size, file = fields
            kind = PartialKind(
                None if model is None else _read_model(model),
                None if images is None else _read_images(images),
                None if size is None else _read_size(size),
                None if file is None else _read_file(file, self._folder),
            )
            self._places[text] = self.kinds.setdefault(kind, len(self.kinds))
            if len(self.kinds) > MAX_KINDS:
                raise ValueError(_too_many(len(self.kinds)))
        return self._places[text]


def _read_model(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"model: expected a name, got {_shown(value)}")
    return value


def _read_images(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"images: expected a number from 1 on, got {_shown(value)}")
    return value


def _read_size(value: Any) -> Size:
    if not isinstance(value, str) or (size := read_size(value)) is None:
        raise ValueError(f"size: expected HEIGHTxWIDTH such as 224x224, got {_shown(value)}")
    return size


def _read_file(value: Any, folder: Path) -> str:
    # A trace may come from others: it must not be able to send any file of this machine.
    if not isinstance(value, str) or not value or PurePath(value).is_absolute() or ".." in PurePath(value).parts:
        raise ValueError(f"file: expected a path in the trace's folder, got {_shown(value)}")
    path = folder / value
    if not path.is_file():
        raise ValueError(f"file: there is no file {path}")
    return str(path)


def _shown(value: Any) -> str:
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _too_many(number: int) -> str:
    return f"expected up to {MAX_KINDS:,} kinds of requests, since each is held in memory, got {number:,} at least"


def described(document: Mapping[str, Any]) -> str:
    """Returns `Replay.document` as text."""
    fewest, most = document["images_per_request"]
    differs = [f"{number} {what}" for what in ("models", "sizes") if (number := document[what]) > 1]
    differs += [f"{fewest} to {most} images"] * (fewest != most) + [f"{document['files']} files"] * (
        document["files"] > 0
    )
    kinds = "of one kind" if document["kinds"] == 1 else f"of {document['kinds']:,} kinds"
    kinds += f" ({', '.join(differs)})" if differs else ""
    requests, seconds = f"{document['requests']:,} requests", f"{document['duration_s']:,.4g} s"
    return f"{document['path']}: {requests} in {seconds}, {kinds}, SHA-256 {document['sha256'][:12]}…"


def write(path: Path, due_ns: Schedule, kinds: Sequence[Kind], models: Sequence[str]) -> None:
    """Writes a trace that `read` reads back to the nanosecond; the requests are of `kinds`, which repeat.

    The model is written where there are several `models`, the size and the file where the kind has one.
    """
    rests = {kind: _rest(kind, models, path.parent) for kind in set(kinds)}
    with naming(path), path.open("w") as file:
        for at_ns, kind in zip(due_ns.tolist(), cycle(kinds), strict=False):
            file.write(f'{{"at_s": {at_ns // _NS}.{at_ns % _NS:09}, {rests[kind]}\n')


def _rest(kind: Kind, models: Sequence[str], folder: Path) -> str:
    fields = {
        "model": models[kind.model] if len(models) > 1 else None,
        "images": kind.images,
        "size": "{}x{}".format(*kind.size) if kind.size else None,
        "file": os.path.relpath(kind.file, folder) if kind.file else None,
    }
    return json.dumps({key: value for key, value in fields.items() if value is not None})[1:]
