"""Counts of everything that is bounded for a whole server: a table in memory that its fronts share.

Each front has a row, which it alone writes, and reads those of all. So nobody waits for a lock or calls the kernel, and
a front that is killed leaves nothing half done that others would need: its row is cleared before the next front of its
number begins. What fronts decide within the same microseconds they decide without knowing of each other, so that a
bound may be exceeded by what is taken in that time; but all of it is counted. A server of one process has a table of
one row, where nothing is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple, Self

WORD_BYTES: Final = 8
"""Of each number in the table: processors read and write an aligned word as a whole."""
SECRET_BYTES: Final = 64
"""At the beginning: what names are hashed with, so that nobody can choose ones that meet in one set."""
HEAD_BYTES: Final = SECRET_BYTES + 2 * WORD_BYTES
"""Bytes before the rows: the secret, how many fronts there are, and the stage of an upgrade."""
SETS: Final = 1024
WAYS: Final = 16
PLACES: Final = SETS * WAYS
"""Accounts of an area that a front remembers. A name has its place in one set; where none is left there, the account
that was changed longest ago is forgotten, idle ones first."""
NEVER: Final = float("-inf")


class Kind(IntEnum):
    """A quantity that is counted as one number."""

    CALLS = 0
    CALLS_REFUSED = 1
    """Since the front began."""
    ARRIVING = 2
    """Messages that are asked for, and have not arrived."""
    EXPECTED = 3
    """Messages that gRPC receives by itself, and that have not arrived."""
    HELD_BYTES = 4
    DECODE_BYTES = 5
    DECODE_WAITS_SINCE = 6
    """Nanoseconds of the monotonic clock; 0 while nothing waits."""
    SHADOW_BYTES = 7
    CHANGES = 8
    """Changes of models that clients have asked for, and that have begun."""


class Upgrade(IntEnum):
    """How far another server has come that is to take this one's place."""

    NONE = 0
    STARTING = 1
    """The other server starts with the models as they are: nothing may change until that has ended."""
    DONE = 2
    """The other server serves, and this one leaves."""


class Amount:
    """A number that all fronts make up. `own` is this front's part."""

    __slots__ = ("_parts", "_row")

    def __init__(self, parts: memoryview | None = None, row: int = 0) -> None:
        self._parts = memoryview(bytearray(WORD_BYTES)).cast("q") if parts is None else parts
        self._row = row

    @property
    def own(self) -> int:
        """This front's part."""
        return self._parts[self._row]

    @own.setter
    def own(self, part: int) -> None:
        self._parts[self._row] = part

    @property
    def total(self) -> int:
        """All fronts' parts together."""
        return sum(self._parts)

    @property
    def elsewhere(self) -> list[int]:
        """The other fronts' parts."""
        parts = self._parts.tolist()
        del parts[self._row]
        return parts


class _Row(NamedTuple):
    """A front's accounts in one area, by place."""

    names: memoryview
    """Hashes; 0 where there is no account."""
    under_way: memoryview
    """Images, or what else is counted."""
    taken: memoryview
    """Images that this front has ever counted. Each writes its own part: none overwrites another's."""
    granted: memoryview[float]
    """Images that all fronts together could have counted by the time when this one last changed the account."""
    at: memoryview[float]
    """When that was, in seconds."""

    @classmethod
    def of(cls, columns: Iterator[memoryview]) -> Self:
        """Returns a row of the next columns."""
        names, under_way, taken, granted, at = (next(columns) for _ in cls._fields)
        return cls(names.cast("Q"), under_way.cast("q"), taken.cast("q"), granted.cast("d"), at.cast("d"))

    def find(self, name: int) -> int | None:
        """Returns the place of an account."""
        first = name % SETS * WAYS
        try:
            return first + self.names[first : first + WAYS].tolist().index(name)
        except ValueError:
            return None

    def claim(self, name: int) -> int:
        """Returns a place for an account: one that is free, or of what was changed longest ago, idle ones first."""
        first = name % SETS * WAYS
        place = min(
            range(first, first + WAYS),
            key=lambda place: (self.names[place] != 0, self.under_way[place] > 0, self.at[place]),
        )
        self.under_way[place], self.taken[place], self.granted[place], self.at[place] = 0, 0, 0.0, NEVER
        self.names[place] = name
        return place


class Account:
    """The use by one name at all fronts, at the moment this was made."""

    __slots__ = ("_elsewhere", "_granted", "_name", "_own", "_place", "_taken", "at", "under_way")

    def __init__(self, name: int, rows: list[_Row], own: _Row) -> None:
        self._name = name
        self._own = own
        self.under_way = 0
        """Under way."""
        self.at = NEVER
        """When it was last changed, in seconds."""
        self._taken, self._elsewhere, self._granted = 0, 0, 0.0
        self._place: int | None = None
        """Where this front had it last."""
        places = [(row, place) for row in rows if (place := row.find(name)) is not None]
        # In the opposite order of `begin`: what was taken before something was granted is seen with it. A place may
        # have become another name's meanwhile.
        for row, place in places:
            at, granted = row.at[place], row.granted[place]
            if at > self.at and row.names[place] == name:
                self._granted, self.at = granted, at
        for row, place in places:
            under_way, taken = row.under_way[place], row.taken[place]
            if row.names[place] != name:
                continue
            self.under_way += under_way
            if row is own:
                self._taken, self._place = taken, place
            else:
                self._elsewhere += taken

    @property
    def is_known(self) -> bool:
        """Whether anybody has changed it, and it was not forgotten."""
        return self.at > NEVER

    @property
    def level(self) -> float:
        """Images that might be asked for at the time `at`; below 0 where more were taken than that."""
        return self._granted - self._elsewhere - self._taken

    def begin(self, images: int, level: float, at: float) -> None:
        """Counts `images` as under way and as taken, of `level` that might be asked for at the time `at`."""
        own, place = self._own, self._found()
        if place is None:
            place = self._place = own.claim(self._name)
        taken = own.taken[place]
        own.under_way[place] += images
        own.taken[place] = taken + images
        own.granted[place] = self._elsewhere + taken + level
        own.at[place] = at

    def give_back(self, images: int) -> None:
        """Counts `images` as never taken, unless the account was forgotten meanwhile. They may still be under way."""
        if (place := self._found()) is not None:
            self._own.taken[place] -= images

    def end(self, images: int) -> None:
        """Counts `images` no longer, unless the account was forgotten meanwhile."""
        if (place := self._found()) is not None:
            self._own.under_way[place] = max(0, self._own.under_way[place] - images)

    def _found(self) -> int | None:
        """Returns where this front has it now."""
        if self._place is None or self._own.names[self._place] != self._name:
            self._place = self._own.find(self._name)
        return self._place


class Accounts:
    """Accounts by name, of which the latest PLACES are remembered."""

    def __init__(self, secret: bytes, rows: list[_Row], own: int) -> None:
        self._rows = rows
        self._own = rows[own]
        self._secret = secret
        self._hash = lru_cache(PLACES)(self._hashed)

    def look(self, name: str) -> Account:
        """Returns what a name has in use now."""
        return Account(self._hash(name), self._rows, self._own)

    def __len__(self) -> int:
        """Returns how many this front remembers."""
        return PLACES - self._own.names.tolist().count(0)

    def _hashed(self, name: str) -> int:
        hashed = blake2b(name.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=WORD_BYTES).digest()
        return int.from_bytes(hashed, "little") or 1


class SharedCounts:
    """The table of `fronts` fronts, as front number `front`, from 0, sees it: all of it, and its own row to write.

    `file` is what `create` returned; by default nobody else sees the table. There may be rows of fronts that do not
    serve: `serving`.
    """

    def __init__(self, file: int | None = None, fronts: int = 1, front: int = 0) -> None:
        memory = memoryview(mmap.mmap(-1 if file is None else file, _size_bytes(fronts)))
        secret, numbers = bytes(memory[:SECRET_BYTES]), memory[HEAD_BYTES:]
        self._head = memory[SECRET_BYTES:HEAD_BYTES].cast("q")
        words = (numbers[start : start + PLACES * WORD_BYTES] for start in _areas(fronts))
        self._amounts = numbers[: len(Kind) * fronts * WORD_BYTES].cast("q")
        listed, others = ([_Row.of(words) for _ in range(fronts)] for _ in range(2))
        self._rows = (listed, others)
        self.fronts, self.front = fronts, front
        self.listed = Accounts(secret, listed, front)
        """Of callers that the access file names."""
        self.others = Accounts(secret, others, front)
        """Of those that it does not name: however many come, the accounts of those that it does stay."""

    @property
    def serving(self) -> int:
        """How many fronts there are, those included that start; all by default. The supervisor sets it."""
        return self._head[0] or self.fronts

    @serving.setter
    def serving(self, fronts: int) -> None:
        self._head[0] = fronts

    @property
    def upgrade(self) -> Upgrade:
        """The stage of an upgrade. The supervisor sets it."""
        return Upgrade(self._head[1])

    @upgrade.setter
    def upgrade(self, stage: Upgrade) -> None:
        self._head[1] = stage

    def amount(self, kind: Kind) -> Amount:
        """Returns one of the numbers."""
        return Amount(self._amounts[kind * self.fronts : (kind + 1) * self.fronts], self.front)

    def clear(self, front: int) -> None:
        """Counts what a front that has ended had under way no longer. What callers have asked for stays counted."""
        for kind in Kind:
            self._amounts[kind * self.fronts + front] = 0
        for area in self._rows:
            under_way = area[front].under_way
            under_way[:] = memoryview(bytes(under_way.nbytes)).cast("q")


def create(fronts: int) -> int:
    """Returns a file in memory with an empty table, for processes to inherit. The caller closes it. Raises OSError."""
    file = os.memfd_create("xlaserve-usage", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, _size_bytes(fronts))
        os.pwrite(file, os.urandom(SECRET_BYTES), 0)
    except OSError:
        os.close(file)
        raise
    return file


def _areas(fronts: int) -> Iterator[int]:
    """Yields where each column of the accounts begins, in bytes after the head."""
    columns = len(_Row._fields) * 2 * fronts
    first = len(Kind) * fronts * WORD_BYTES
    return iter(range(first, first + columns * PLACES * WORD_BYTES, PLACES * WORD_BYTES))


def _size_bytes(fronts: int) -> int:
    return HEAD_BYTES + (len(Kind) * fronts + len(_Row._fields) * 2 * fronts * PLACES) * WORD_BYTES
