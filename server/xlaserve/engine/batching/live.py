"""What a model has to do at a moment, for people to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.costs import Turn
from xlaserve.engine.buckets.demand import Demand


class Live(NamedTuple):
    """Plain data, which can be pickled."""

    waiting_images: int = 0
    outstanding_s: float = 0.0
    """In which all that waits and runs should be answered."""
    queued_work_s: float = 0.0
    """What those that wait should take the device, by its measured costs."""
    in_flight_images: int = 0
    """Those that are decoded, wait or run."""
    in_flight_images_limit: int = 0
    turns: tuple[tuple[Mode, Bucket, Turn], ...] = ()
    """The buckets that serve, and what a batch of each takes from the queue to its answers."""
    demand: Mapping[tuple[int, int], Demand] = {}
    """By height and width, of all modes together."""
