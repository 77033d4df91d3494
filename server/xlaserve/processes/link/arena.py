"""Memory that a front shares with its engine. The front alone allocates; the engine maps the same file.

An extent is free again once no array of it is left, so that neither a request's pixels nor an answer's outputs can lie
in memory that has been given to another. A job that is under way keeps its extent until the engine is done with it.

The `Share` of each model bounds what it takes. The arena itself is large enough for all of them: it has more addresses
than the machine has memory, and takes memory only for pages that are used.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.engine.inputs import Layout, Rows
from xlaserve.errors import InvalidArgument, QueueFull

PAGE_BYTES: Final = mmap.PAGESIZE
ALIGNMENT: Final = 64
"""The alignment of each array in an extent, in bytes, which suits vector instructions."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals that keep the file's size: reading a mapping beyond the end of its file would kill the engine."""
TRIM_BYTES: Final = 2 * 2**20
"""The memory that is given back to the system in one step, which takes some milliseconds: a huge page, if any."""
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`."""

MAX_INLINE_BYTES: Final = 2**20
"""Pixels and outputs up to this size are copied on the event loop, in some 100 microseconds; others on a thread."""

Memory = NDArray[np.uint8]
"""Bytes, `[n]`."""


class Extent(NamedTuple):
    """Pages of an arena."""

    offset: int
    memory: Memory


@dataclass(eq=False)
class Share:
    """The bytes of an arena that one model may have at a time. No other model can take them."""

    model: str
    max_bytes: int
    used_bytes: int = 0


class _Taken(weakref.ref[Memory]):
    """A reference to an extent's memory that tells its place and share once the memory is no longer referenced."""

    __slots__ = ("offset", "share", "size_bytes")
    offset: int
    size_bytes: int
    share: Share | None


class Arena:
    """`size_bytes` of shared memory, in extents of whole pages. `take` is for one thread; extents may end on any.

    The size is in addresses. Pages take memory once they are written to, and `trim` gives it back to the system.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = aligned(size_bytes, PAGE_BYTES)
        self.file = os.memfd_create("xlaserve-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The descriptor of the file, which the engine maps."""
        self._close = weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.size_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        self._map: mmap.mmap | None = _mapped(self.file, self.size_bytes)
        self._by_size: list[tuple[int, int]] = []
        """Bytes and offset of each free range, the smallest first; no two adjoin."""
        self._free: dict[int, int] = {}
        """The free ranges again: bytes by offset."""
        self._ends: dict[int, int] = {}
        """The free ranges again: offsets by the offset where each ends."""
        self._put(0, self.size_bytes)
        self._taken: dict[int, _Taken] = {}
        self._ended: deque[weakref.ref[Memory]] = deque()
        self._used_bytes = self._most_used_bytes = 0
        self._top = 0
        """The offset from which on no page was used since its memory was given back."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents in use."""
        self._reclaim()
        return self._used_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the arena takes, in use or not."""
        return 0 if self._map is None else os.fstat(self.file).st_blocks * _BLOCK_BYTES

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory that the arena takes and that are not in use: kept for the next requests."""
        return max(0, self.resident_bytes - self.used_bytes)

    def take(self, size_bytes: int, share: Share | None = None) -> Extent:
        """Returns an extent, with any content, of the smallest free range that fits, so that large ones stay whole.

        The extent counts towards the share until it ends. Raises QueueFull, or InvalidArgument for more bytes than the
        share or the arena ever has.
        """
        self._reclaim()
        wanted = aligned(size_bytes, PAGE_BYTES)
        max_bytes = self.size_bytes if share is None else min(share.max_bytes, self.size_bytes)
        if wanted > max_bytes:
            raise InvalidArgument("images", f"at most {max_bytes} bytes with their outputs", size_bytes)
        if share is not None and share.used_bytes + wanted > share.max_bytes:
            raise QueueFull(
                f"model {share.model}: {size_bytes} more bytes exceed the {share.max_bytes} for its images and outputs,"
                f" of which {share.used_bytes} are in use"
            )
        index = bisect_left(self._by_size, (wanted, 0))
        if index == len(self._by_size):
            raise QueueFull(f"{size_bytes} more bytes exceed what is left of {self.size_bytes} for images and outputs")
        assert self._map is not None
        free_bytes, offset = self._by_size.pop(index)
        del self._free[offset], self._ends[offset + free_bytes]
        if free_bytes > wanted:
            self._put(offset + wanted, free_bytes - wanted)
        memory: Memory = np.frombuffer(self._map, np.uint8, size_bytes, offset)
        taken = self._taken[offset] = _Taken(memory, self._ended.append)
        taken.offset, taken.size_bytes, taken.share = offset, wanted, share
        if share is not None:
            share.used_bytes += wanted
        self._used_bytes += wanted
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        self._top = max(self._top, offset + wanted)
        return Extent(offset, memory)

    def used_of(self, share: Share) -> int:
        """Returns the bytes of a share's extents in use."""
        self._reclaim()
        return share.used_bytes

    def most_used_bytes(self) -> int:
        """Returns the most bytes that were in use at a time since the last call."""
        most, self._most_used_bytes = self._most_used_bytes, self.used_bytes
        return most

    def trim(self, kept_bytes: int) -> Iterator[None]:
        """Gives free memory back to the system until the arena takes no more than `kept_bytes`.

        Each step gives back up to `TRIM_BYTES`, the highest addresses first. Extents in use are not touched.
        """
        self._reclaim()
        below = self._top
        # `take` raises it again between the steps.
        self._top = max((taken.offset + taken.size_bytes for taken in self._taken.values()), default=0)
        try:
            while self._map is not None and self.resident_bytes > kept_bytes:
                self._reclaim()
                start = max((offset for offset in self._free if offset < below), default=None)
                if start is None:
                    below = 0
                    return
                stop = min(start + self._free[start], below)
                step = max(start, (stop - 1) // TRIM_BYTES * TRIM_BYTES)
                try:
                    self._map.madvise(mmap.MADV_REMOVE, step, stop - step)
                except OSError:  # locked into memory, say
                    return
                below = step
                yield
        finally:
            self._top = max(self._top, below)

    def end(self) -> None:
        """Ends the arena: `take` raises QueueFull, and the memory is freed with the last array of it."""
        self._map = None
        self._close()
        for each in (self._by_size, self._free, self._ends):
            each.clear()

    def _reclaim(self) -> None:
        while self._ended:
            taken = self._ended.popleft()
            assert isinstance(taken, _Taken)
            del self._taken[taken.offset]
            self._used_bytes -= taken.size_bytes
            if taken.share is not None:
                taken.share.used_bytes -= taken.size_bytes
            if self._map is not None:
                self._give_back(taken.offset, taken.size_bytes)

    def _give_back(self, offset: int, size_bytes: int) -> None:
        if offset + size_bytes in self._free:
            size_bytes += self._remove(offset + size_bytes)
        if (before := self._ends.get(offset)) is not None:
            size_bytes += self._remove(before)
            offset = before
        self._put(offset, size_bytes)

    def _put(self, offset: int, size_bytes: int) -> None:
        insort(self._by_size, (size_bytes, offset))
        self._free[offset] = size_bytes
        self._ends[offset + size_bytes] = offset

    def _remove(self, offset: int) -> int:
        """Removes the free range at an offset, and returns its bytes."""
        size_bytes = self._free.pop(offset)
        del self._ends[offset + size_bytes]
        del self._by_size[bisect_left(self._by_size, (size_bytes, offset))]
        return size_bytes


class ArenaView:
    """A front's arena, mapped by the engine. Raises ValueError for a file whose size may change."""

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
        """Ends the view: the memory is freed here with the last array of it."""
        self._map = b""
        self._size_bytes = 0


def aligned(size_bytes: int, to_bytes: int = ALIGNMENT) -> int:
    """Returns the least multiple of `to_bytes` that is no less than `size_bytes`."""
    return -(-size_bytes // to_bytes) * to_bytes


def arrays_in(memory: Memory, start: int, images: int, layout: Layout) -> tuple[NDArray[Any], ...]:
    """Returns arrays of `images` rows, one after the other from byte `start` on. Raises ValueError where they don't
    fit."""
    arrays = []
    for dtype, shape in layout:
        start = aligned(start)
        stop = start + images * math.prod(shape) * dtype.itemsize
        if stop > len(memory):
            raise ValueError(f"arrays of {stop} bytes and more, in an extent of {len(memory)}")
        arrays.append(np.ndarray((images, *shape), dtype, memory, start))
        start = stop
    return tuple(arrays)


def arrays_bytes(images: int, layout: Layout) -> int:
    """Returns the bytes that `arrays_in` takes from the beginning of an extent, up to the next array."""
    return sum(aligned(images * math.prod(shape) * dtype.itemsize) for dtype, shape in layout)


def rows_bytes(rows: Rows) -> int:
    """Returns the same for the arrays themselves."""
    return sum(aligned(each.nbytes) for each in rows)


def _mapped(file: int, size_bytes: int) -> mmap.mmap:
    mapped = mmap.mmap(file, size_bytes)
    mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump would need memory for all of it
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
