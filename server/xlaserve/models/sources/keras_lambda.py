"""The names and constants in the bytecode of a Lambda layer, of any Python 3, without running or unmarshalling it."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

MOST_SHOWN: Final = 8
MOST_DIGITS: Final = 200
"""Digits of 15 bits of a number."""
_REFERENCED: Final = 0x80
"""Bit of a type whose value others may refer to."""
_SINGLE: Final = {"N": None, "F": False, "T": True, ".": ..., "S": StopIteration}
_INTS: Final = 5
"""Whole numbers before a function's bytecode, argument counts and flags; Python 3.8 to 3.10 have one more."""


class _Code(NamedTuple):
    """The constants and names that the code of a function refers to."""

    constants: tuple[Any, ...]
    names: tuple[Any, ...]


class _Reader:
    """Values as `marshal` writes them; raises IndexError, ValueError, TypeError or struct.error for anything else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._references: list[Any] = []

    def value(self) -> Any:
        """Reads the next value."""
        kind = self._data[self._at]
        self._at += 1
        if not kind & _REFERENCED:
            return self._value(chr(kind))
        place = len(self._references)
        self._references.append(None)
        self._references[place] = value = self._value(chr(kind & ~_REFERENCED))
        return value

    def _value(self, kind: str) -> Any:  # noqa: PLR0911 - one each
        match kind:
            case "N" | "F" | "T" | "." | "S":
                return _SINGLE[kind]
            case "i":
                return self._unpack("<i")
            case "g":
                return self._unpack("<d")
            case "l":
                count = self._unpack("<i")
                if abs(count) > MOST_DIGITS:
                    raise ValueError("a number of too many digits")
                digits = [self._unpack("<H") << 15 * place for place in range(abs(count))]
                return sum(digits) * (1 if count > 0 else -1)
            case "s":
                return self._take(self._unpack("<i"))
            case "u" | "t" | "a" | "A":
                return self._take(self._unpack("<i")).decode(errors="replace")
            case "z" | "Z":
                return self._take(self._unpack("B")).decode(errors="replace")
            case "(" | "[" | "<" | ">":
                return self._values(self._unpack("<i"))
            case ")":
                return self._values(self._unpack("B"))
            case "r":
                return self._references[self._unpack("<i")]
            case "c":
                return self._code()
        raise ValueError(f"of unknown type {kind}")

    def _code(self) -> _Code:
        for _ in range(_INTS):
            self._unpack("<i")
        if chr(self._data[self._at] & ~_REFERENCED) != "s":
            self._unpack("<i")
        _, constants, names, _ = self._values(4)
        # Since Python 3.11 the kinds of variables follow, and what handles exceptions; before, two more lists of names.
        is_new = isinstance(self.value(), bytes)
        self._values(3)
        self._unpack("<i")
        self._values(2 if is_new else 1)
        return _Code(constants, names)

    def _values(self, count: int) -> tuple[Any, ...]:
        return tuple(self.value() for _ in range(count))

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self._at:
            raise ValueError("longer than all")
        self._at += size
        return self._data[self._at - size : self._at]

    def _unpack(self, form: str) -> Any:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return number


def uses(code: str) -> str:
    """Returns the names and constants that a layer's bytecode, in base64, refers to, such as `tf, image, resize, 224`;
    empty where it has none, or can't be read."""
    try:
        function = _Reader(base64.b64decode(code)).value()
    except (IndexError, ValueError, TypeError, RecursionError, struct.error, binascii.Error):
        return ""
    found = dict.fromkeys(map(str, _used(function))) if isinstance(function, _Code) else ()
    return ", ".join([*found][:MOST_SHOWN])


def _used(function: _Code) -> Iterator[object]:
    """Yields names and numbers of a function and of those in it, each tuple once, however often it is referred to."""
    pending: list[Any] = [function]
    seen = set[int]()
    for value in pending:
        match value:
            case _Code(constants, names) if id(value) not in seen:
                yield from names
                pending += constants
            case tuple() if id(value) not in seen:
                pending += value
            case int() | float() if not isinstance(value, bool):
                yield value
        seen.add(id(value))
