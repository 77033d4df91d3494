"""The number of servers that a fleet should have. Sent to Ray Serve's controller, so it imports nothing of ours."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

WAIT: Final = "wait_s"
"""Name of a server's report: expected seconds until one of its lanes has done everything that waits now."""
BUSY: Final = "busy"
"""Name of a server's report: share of its lanes' time in use lately, from 0 to 1."""
MOST_BUSY: Final = 0.8
"""Queues are empty until a server is busy. Servers that are busy for this share of their lanes are needed."""
TOLERANCE: Final = 0.1
"""Servers by which the need may be over a whole number, before there is one more."""
FASTEST: Final = 2
"""The most by which the number is multiplied at a time: what waits says more once the new servers have taken some."""


def servers_needed(waits_s: Collection[float], busy: Collection[float], target_wait_s: float) -> int:
    """Returns how many servers hold the target, from what each running one reports.

    As many as have the waiting work done within the target, and no fewer than keep their lanes below MOST_BUSY: three
    that expect waits of 0.1, 0.2 and 0.3 s need six for a target of 0.1 s.
    """
    needed = max(sum(waits_s) / target_wait_s, sum(busy) / MOST_BUSY)
    running = max(len(waits_s), len(busy), 1)
    return max(1, min(math.ceil(needed - TOLERANCE), FASTEST * running))


class Policy:
    """An autoscaling policy of Ray Serve, which keeps the bounds and the delays itself."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas for a `ray.serve.config.AutoscalingContext`, and no state."""
        reports = context.aggregated_metrics or {}
        waits_s, busy = reports.get(WAIT, {}), reports.get(BUSY, {})
        if not waits_s:
            return context.target_num_replicas, {}
        return servers_needed(waits_s.values(), busy.values(), self._target_wait_s), {}
