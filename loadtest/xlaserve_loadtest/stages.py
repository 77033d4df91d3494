"""Where a request's time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the mean latency."""

    name: str
    """"send" (from due to sent), "network", "decode", "queue", "gather", "execute", "encode", or "other" (the server's)."""
    mean_ms: float
    share: float
    """Of the mean latency."""
