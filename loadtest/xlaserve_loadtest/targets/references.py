"""Answers under load, compared with what the same request got alone: some servers are wrong only when they are busy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array
from xlaserve_loadtest.targets.tolerance import are_alike, slacks_of

TIME_SHARE: Final = 0.01
"""Share of a generator's time that it spends on comparing at most: it measures the target, and not itself."""
MAX_NUMBERS: Final = 65_536
"""Numbers of an output that are compared at a time: answers that come meanwhile wait, which their latency shows."""


class References:
    """Outputs that some requests of an arm got alone. Of its answers to these under load a sample is compared."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.compared = 0
        """Answers that were compared since `reset`."""
        self.differing = 0
        """Answers of these that differ beyond the tolerance."""
        self._clock = clock
        self._next_s = 0.0
        # By id, which is quick to look up: the requests are kept, so that no other has it.
        self._alone: dict[int, tuple[Request, Sequence[Array]]] = {}
        self._slacks: dict[int, list[float]] = {}

    def learn(self, requests: Sequence[Request], outputs: Sequence[Sequence[Array]]) -> None:
        """Takes the outputs that the first of `requests` got, one request at a time."""
        pairs = list(zip(requests, outputs, strict=False))
        self._alone = {id(request): (request, own) for request, own in pairs}
        for model in {request.model for request, _ in pairs}:
            self._slacks[model] = slacks_of(own for request, own in pairs if request.model == model)

    def reset(self) -> None:
        """Counts from 0 again."""
        self.compared = self.differing = 0

    def fault(self, request: Request, outputs: Callable[[], Sequence[Array]]) -> str:
        """Returns how an answer differs from what the request got alone; empty where it does not, or is not compared.

        `outputs` gives the answer's outputs, and is called only where they are compared.
        """
        known = self._alone.get(id(request))
        if known is None or (began_s := self._clock()) < self._next_s:
            return ""
        ours, (_, theirs) = outputs(), known
        is_right = [own.shape for own in ours] == [own.shape for own in theirs] and all(
            are_alike(self._some(own), self._some(other), slack)
            for own, other, slack in zip(ours, theirs, self._slacks[request.model], strict=True)
        )
        self.compared += 1
        self.differing += not is_right
        now_s = self._clock()
        self._next_s = now_s + (now_s - began_s) * (1 / TIME_SHARE - 1)
        return "" if is_right else "expected the outputs that the same request got alone, within the tolerance"

    def _some(self, output: Array) -> Array:
        """Returns numbers that are evenly spread over an output, and others at the next comparison."""
        step = math.ceil(output.size / MAX_NUMBERS) or 1
        return output.reshape(-1)[self.compared % step :: step]


NONE: Final = References()
"""References to nothing."""
