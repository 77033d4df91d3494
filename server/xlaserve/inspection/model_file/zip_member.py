"""A file in a zip archive, read where it lies."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from typing import IO, Final, cast

_LENGTHS: Final = struct.Struct("<26xHH")
"""Lengths of the name and of other fields, in the header of a member."""


class _Part(io.RawIOBase):
    """A part of a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._place = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer)).cast("B")
        self._file.seek(self._start + self._place)
        read = self._file.read(max(0, min(len(view), self._size - self._place)))
        view[: len(read)] = read
        self._place += len(read)
        return len(read)


def opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """Opens a member. One that is stored without compression, as in Keras's files, is read only where it is asked for,
    while `ZipFile` would read all before that."""
    member, file = archive.getinfo(name), archive.fp
    if member.compress_type != zipfile.ZIP_STORED or file is None:
        return archive.open(name)
    file.seek(member.header_offset)
    lengths = _LENGTHS.unpack(file.read(_LENGTHS.size))
    return cast(IO[bytes], _Part(file, member.header_offset + _LENGTHS.size + sum(lengths), member.file_size))
