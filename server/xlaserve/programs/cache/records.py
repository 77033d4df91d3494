"""Files that are whole or are not there: written at once, checked when they are read, removed when they are damaged.

A record is a header of JSON and named bytes behind a SHA-256 of everything, its own place among them: one that was
copied or renamed is of no use elsewhere. It holds data only: nothing in it is run by reading it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

MAGIC: Final = b"xlaserve cache 1\n"
SUFFIX: Final = ".xlaserve"
_PARTIAL: Final = ".partial"
_PARTIAL_S: Final = 3600.0
"""A file that is still partial after this time belongs to a process that was killed."""
_LENGTH_BYTES: Final = 8
_KEYS: Final = 2
"""Folders above a record that are named by keys."""
_PREFIX_BYTES: Final = len(MAGIC) + hashlib.sha256().digest_size


class Record(NamedTuple):
    """The contents of a file: a header of JSON types, and bytes by name."""

    header: dict[str, Any]
    blobs: Mapping[str, memoryview]


class RecordError(ValueError):
    """A file is not a record, or a record for another place."""


class RecordFolder:
    """A folder of records. Several processes and threads may share it. With `read_only` nothing in it is changed."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._is_full = False

    def has(self, name: str) -> bool:
        """Returns whether there is a record of that name, which may be damaged."""
        return self._file(name).is_file()

    def read(self, name: str, parse: Callable[[Record], T]) -> T | None:
        """Returns what `parse` makes of a record, or None where there is none.

        One that is damaged, that was written elsewhere, or that `parse` can't use is removed, with a warning.
        """
        try:
            data = self._file(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("compile cache: %s can't be read: %s", self._file(name), error.strerror)
            return None
        try:
            return parse(_decode(data, self._place(name)))
        except OSError as error:  # of a full disk, say: the record is not to blame
            log.warning("compile cache: %s can't be used: %s", self._file(name), error.strerror)
            return None
        except Exception as error:  # nothing in a file may fail a model
            reason = str(error) if isinstance(error, RecordError) else f"{type(error).__name__} when it was loaded"
            log.debug("compile cache: %s", name, exc_info=error)
            self.discard(name, reason)
            return None

    def write(self, name: str, header: Mapping[str, object], blobs: Mapping[str, bytes | memoryview]) -> None:
        """Puts a record in the place of any other of that `name`.

        Where that fails, a warning is logged; where it is the disk that fails, once, and nothing more is written.
        """
        if self._is_full:
            return
        if self.read_only:
            log.info("compile cache: %s is read-only, %s is not kept", self.path, name)
            return
        partial = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_partial()
            with tempfile.NamedTemporaryFile(dir=self.path, suffix=_PARTIAL, delete=False) as file:
                partial = Path(file.name)
                for part in _encode(self._place(name), header, blobs):
                    file.write(part)
            # Not as private as temporary files are: another user may serve from what an image build has warmed.
            partial.chmod(0o644)
            partial.replace(self._file(name))
            partial = None
        except OSError as error:
            if not self._is_full:
                log.warning("compile cache: %s can't be written: %s", self._file(name), error.strerror or error)
            self._is_full = True
        except Exception as error:
            log.warning("compile cache: %s can't be written: %s: %s", self._file(name), type(error).__name__, error)
        finally:
            if partial is not None:
                with suppress(OSError):
                    partial.unlink()

    def discard(self, name: str, reason: str) -> None:
        """Removes a record that is of no use, with a warning."""
        file = self._file(name)
        log.warning("compile cache: %s is damaged (%s) and is made again", file, reason)
        if not self.read_only:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("compile cache: %s can't be removed: %s", file, error.strerror)

    def _place(self, name: str) -> str:
        """Returns the parts of a record's path that say what it is for: the environment, the model and its own name."""
        return "/".join((*self.path.parts[-_KEYS:], name))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def _remove_partial(self) -> None:
        for file in self.path.glob(f"*{_PARTIAL}"):
            try:
                if time.time() - file.stat().st_mtime > _PARTIAL_S:
                    file.unlink(missing_ok=True)
            except FileNotFoundError:  # another process was faster
                continue


def _encode(
    place: str, header: Mapping[str, object], blobs: Mapping[str, bytes | memoryview]
) -> list[bytes | memoryview]:
    sizes = {name: len(blob) for name, blob in blobs.items()}
    text = json.dumps({"place": place, "header": header, "sizes": sizes}).encode()
    body = [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *blobs.values()]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    return [MAGIC, digest.digest(), *body]


def _decode(data: bytes, place: str) -> Record:
    view = memoryview(data)
    if len(data) < _PREFIX_BYTES or not data.startswith(MAGIC):
        raise RecordError("it is no record")
    body = view[_PREFIX_BYTES:]
    if hashlib.sha256(body).digest() != view[len(MAGIC) : _PREFIX_BYTES]:
        raise RecordError("its checksum does not match")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    contents = json.loads(bytes(body[_LENGTH_BYTES:end]))
    if contents["place"] != place:
        raise RecordError("it was written for another place")
    blobs = {}
    for name, size in contents["sizes"].items():
        blobs[name] = body[end : end + size]
        end += size
    return Record(contents["header"], blobs)


def check_writable(folder: Path) -> None:
    """Raises OSError where `folder` can't be made or nothing can be written into it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=_PARTIAL)
    os.close(handle)
    Path(name).unlink()
