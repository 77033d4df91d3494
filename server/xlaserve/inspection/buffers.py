"""The memory of a program, from XLA's dumped buffer assignment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ALLOCATION: Final = re.compile(r"^allocation \d+: (?:0x[0-9a-f]+, )?size (\d+), (.*)$", re.MULTILINE)
_PARAMETER: Final = re.compile(r"parameter (\d+),")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a program's buffers, by their content."""

    input: int = 0
    """The images: parameter 0."""
    parameters: int = 0
    """Weights that are passed at every call."""
    constants: int = 0
    """Weights and numbers that are part of the program."""
    temporaries: int = 0
    """Memory that one run needs in addition while it lasts; every lane has its own."""
    outputs: int = 0

    @property
    def run(self) -> int:
        """Bytes that each run needs for itself."""
        return self.input + self.temporaries + self.outputs


def parse(text: str) -> Memory:
    """Returns the sums of the allocations in a `*-buffer-assignment.txt`. Raises ValueError where it has none."""
    sums = dict.fromkeys(("input", "parameters", "constants", "temporaries", "outputs"), 0)
    found = _ALLOCATION.findall(text)
    if not found:
        raise ValueError("expected a buffer assignment, found no allocation")
    for size, description in found:
        sums[_kind(description)] += int(size)
    return Memory(**sums)


def _kind(description: str) -> str:
    """Returns the field of Memory that an allocation belongs to."""
    # An output that shares the memory of a parameter has no allocation of its own.
    if parameter := _PARAMETER.search(description):
        return "input" if parameter[1] == "0" else "parameters"
    if "output" in description or "maybe-live-out" in description:
        return "outputs"
    return "constants" if "constant" in description else "temporaries"
