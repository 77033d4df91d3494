"""Parts of a message, which are joined only when it is sent."""

from __future__ import annotations

from collections.abc import Iterable

Part = bytes | memoryview
"""A part of a message as it is sent."""


def wire_bytes(parts: Iterable[Part]) -> int:
    """Returns the size of a message in bytes."""
    return sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])
