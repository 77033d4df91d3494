"""What memory a program takes, from XLA's buffer assignment as it is dumped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_ALLOCATION: Final = re.compile(r"^allocation \d+: (?:0x[0-9a-f]+, )?size (\d+), (.*)$", re.MULTILINE)
_PARAMETER: Final = re.compile(r"parameter (\d+),")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they hold."""

    input: int = 0
    """The images: parameter 0."""
    parameters: int = 0
    """Weights that are handed over at every call."""
    constants: int = 0
    """Weights and numbers that are part of the program."""
    temporaries: int = 0
    """Further memory of one run, for as long as it lasts; every lane has its own."""
    outputs: int = 0

    @property
    def run(self) -> int:
        """Bytes that each run needs for itself."""
        return self.input + self.temporaries + self.outputs


def parse(text: str) -> Memory:
    """Returns what the allocations of a `*-buffer-assignment.txt` add up to. ValueError where there are none."""
    sums = dict.fromkeys(("input", "parameters", "constants", "temporaries", "outputs"), 0)
    found = _ALLOCATION.findall(text)
    if not found:
        raise ValueError("expected a buffer assignment, found no allocation")
    for size, what in found:
        sums[_kind(what)] += int(size)
    return Memory(**sums)


def _kind(what: str) -> str:
    # Where an output shares the memory of a parameter, nothing is allocated for it.
    if parameter := _PARAMETER.search(what):
        return "input" if parameter[1] == "0" else "parameters"
    if "output" in what or "maybe-live-out" in what:
        return "outputs"
    return "constants" if "constant" in what else "temporaries"
