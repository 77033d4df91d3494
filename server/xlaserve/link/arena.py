"""Memory that a front shares with its engine. The front alone allocates; the engine only looks where it is told.

An extent is free again once no array of it is left, so that neither a request's pixels nor an answer's outputs can lie
in memory that has been given to another. A job that is under way keeps its extent until the engine is done with it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from bisect import bisect_left
from collections import deque
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.program import Outputs
from xlaserve.errors import InvalidArgument, QueueFull

PAGE_BYTES: Final = mmap.PAGESIZE
ALIGNMENT: Final = 64
"""Of each array, as vector instructions like it."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What is mapped stays there: reading where a file was cut off would kill the engine."""

Memory = NDArray[np.uint8]
"""Bytes, `[n]`."""
Layout = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""The type of each output, and the shape of one row."""


class Extent(NamedTuple):
    """Pages of an arena."""

    offset: int
    memory: Memory


class _Taken(weakref.ref[Memory]):
    """Tells where an extent lay once its memory is no longer referenced."""

    __slots__ = ("offset", "size_bytes")
    offset: int
    size_bytes: int


class Arena:
    """`size_bytes` of shared memory, in extents of whole pages. `take` is for one thread; extents may end on any."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = aligned(size_bytes, PAGE_BYTES)
        self.file = os.memfd_create("xlaserve-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """What the engine is given; `close` closes it."""
        os.ftruncate(self.file, self.size_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        self._map: mmap.mmap | bytes = _mapped(self.file, self.size_bytes)
        self._free = [(0, self.size_bytes)]
        """Offsets and bytes, by offset; no two adjoin."""
        self._taken: dict[int, _Taken] = {}
        self._ended: deque[weakref.ref[Memory]] = deque()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use."""
        self._reclaim()
        return self._used_bytes

    def take(self, size_bytes: int) -> Extent:
        """Returns an extent, with any content: the first that fits. Raises QueueFull, or InvalidArgument for more than
        there is."""
        self._reclaim()
        wanted = aligned(size_bytes, PAGE_BYTES)
        index = next((index for index, (_, free_bytes) in enumerate(self._free) if free_bytes >= wanted), None)
        if index is None:
            if wanted > self.size_bytes:
                raise InvalidArgument("images", f"at most {self.size_bytes} bytes with their outputs", size_bytes)
            raise QueueFull(f"{size_bytes} more bytes exceed what is left of {self.size_bytes} for images and outputs")
        offset, free_bytes = self._free[index]
        if free_bytes == wanted:
            del self._free[index]
        else:
            self._free[index] = offset + wanted, free_bytes - wanted
        memory: Memory = np.frombuffer(self._map, np.uint8, size_bytes, offset)
        taken = self._taken[offset] = _Taken(memory, self._ended.append)
        taken.offset, taken.size_bytes = offset, wanted
        self._used_bytes += wanted
        return Extent(offset, memory)

    def close(self) -> None:
        """Closes the file. The memory itself lives on."""
        os.close(self.file)

    def end(self) -> None:
        """Has no more memory to give: all of it is freed with the last array of it."""
        self._map = b""
        self._free.clear()

    def _reclaim(self) -> None:
        while self._ended:
            taken = self._ended.popleft()
            assert isinstance(taken, _Taken)
            del self._taken[taken.offset]
            self._used_bytes -= taken.size_bytes
            self._give_back(taken.offset, taken.size_bytes)

    def _give_back(self, offset: int, size_bytes: int) -> None:
        free = self._free
        after = bisect_left(free, (offset, 0))
        if after < len(free) and free[after][0] == offset + size_bytes:
            size_bytes += free.pop(after)[1]
        if after and sum(free[after - 1]) == offset:
            free[after - 1] = free[after - 1][0], free[after - 1][1] + size_bytes
        else:
            free.insert(after, (offset, size_bytes))


class ArenaView:
    """A front's arena as the engine sees it. Raises ValueError for a file whose size may change."""

    def __init__(self, file: int, size_bytes: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(file).st_size != size_bytes:
            raise ValueError(f"expected a sealed file of {size_bytes} bytes")
        self._map: mmap.mmap | bytes = _mapped(file, size_bytes)
        self._size_bytes = size_bytes

    def memory(self, offset: int, size_bytes: int) -> Memory:
        """Returns the bytes of an extent. Raises ValueError where that is not within the arena."""
        if offset % PAGE_BYTES or not 0 < size_bytes <= self._size_bytes - offset:
            raise ValueError(f"no extent of {size_bytes} bytes at {offset}")
        return np.frombuffer(self._map, np.uint8, size_bytes, offset)

    def end(self) -> None:
        """Shows no more: the memory is freed here with the last array of it."""
        self._map = b""
        self._size_bytes = 0


def aligned(size_bytes: int, to_bytes: int = ALIGNMENT) -> int:
    """Returns the least multiple of `to_bytes` that is no less than `size_bytes`."""
    return -(-size_bytes // to_bytes) * to_bytes


def outputs_in(memory: Memory, start: int, images: int, layout: Layout) -> Outputs:
    """Returns the outputs of `images` images, which begin at byte `start`. Raises ValueError where they don't fit."""
    outputs = []
    for dtype, shape in layout:
        start = aligned(start)
        stop = start + images * math.prod(shape) * dtype.itemsize
        if stop > len(memory):
            raise ValueError(f"outputs of {stop} bytes and more, in an extent of {len(memory)}")
        outputs.append(np.ndarray((images, *shape), dtype, memory, start))
        start = stop
    return tuple(outputs)


def _mapped(file: int, size_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(file, size_bytes)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
