"""Where a request's time goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """The stages of one request in seconds, each filled in once it is over."""

    decode_s: float = 0.0
    queue_s: float = 0.0
    """Waiting until the batch with its first image ran."""
    gather_s: float = 0.0
    """Gathering its batch; the slowest one where it was split over several, as for `execute_s`."""
    execute_s: float = 0.0
    encode_s: float = 0.0
    """Rendering, and making the response's message."""
    total_s: float = 0.0
