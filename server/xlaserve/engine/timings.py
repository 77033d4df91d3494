"""The stages of a request, in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Final, Self


@dataclass(slots=True)
class Timings:
    """The stages of one request in seconds, each filled in once it is over."""

    decode_s: float = 0.0
    queue_s: float = 0.0
    """Waiting for its batch to be formed and, once that is gathered, for a lane; of the batch with its first image."""
    gather_s: float = 0.0
    """Gathering its batch; the slowest one where it was split over several, as for `execute_s`."""
    execute_s: float = 0.0
    encode_s: float = 0.0
    """Rendering, and making the response's message."""
    total_s: float = 0.0

    @classmethod
    def slowest(cls, timings: Iterable[Self]) -> Self:
        """Returns the longest of each stage."""
        return cls(*map(max, zip(*map(astuple, timings), strict=True)))


STAGES: Final = tuple(stage.name for stage in fields(Timings))
"""The names of all stages, the total included, as protocols and logs spell them."""
