"""Answers under load, compared with what the same request got alone: some servers are wrong only when they are busy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array
from xlaserve_loadtest.targets.ties import are_all_alike
from xlaserve_loadtest.targets.tolerance import are_alike, differing_shares, slacks_of

TIME_SHARE: Final = 0.01
"""Share of a generator's time that it spends on comparing at most: it measures the target, and not itself."""
MAX_NUMBERS: Final = 65_536
"""Numbers of an output that are compared at a time: answers that come meanwhile wait, which their latency shows."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Outputs that a request got alone."""

    outputs: Sequence[Array]
    share: float | None = 0.0
    """Share of an image's numbers that may be beyond the tolerance, as the same request alone does not always get the
    same; None where nothing can be told from its answers."""


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
        self._alone: dict[int, tuple[Request, Reference]] = {}
        self._slacks: dict[int, list[float]] = {}

    def learn(self, requests: Sequence[Request], references: Sequence[Reference]) -> None:
        """Takes what the first of `requests` got, one request at a time."""
        pairs = list(zip(requests, references, strict=False))
        for model in {request.model for request, _ in pairs}:
            self._slacks[model] = slacks_of(own.outputs for request, own in pairs if request.model == model)
        self._alone = {id(request): (request, own) for request, own in pairs if own.share is not None}

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
        is_right = self._is_right(outputs(), known[1], self._slacks[request.model])
        self.compared += 1
        self.differing += not is_right
        now_s = self._clock()
        self._next_s = now_s + (now_s - began_s) * (1 / TIME_SHARE - 1)
        return "" if is_right else "expected the outputs that the same request got alone, within the tolerance"

    def _is_right(self, ours: Sequence[Array], reference: Reference, slacks: Sequence[float]) -> bool:
        theirs = reference.outputs
        if [own.shape for own in ours] != [other.shape for other in theirs]:
            return False
        triples = list(zip(ours, theirs, slacks, strict=True))
        if all(are_alike(self._some(own), self._some(other), slack) for own, other, slack in triples):
            return True
        share = reference.share or 0.0
        if max(output.size for output in theirs) <= MAX_NUMBERS:
            return are_all_alike(ours, theirs, slacks, share)
        some, others = ([self._some(output)[np.newaxis] for output in outputs] for outputs in (ours, theirs))
        return bool(share and (differing_shares(some, others, slacks) <= share).all())

    def _some(self, output: Array) -> Array:
        """Returns numbers that are evenly spread over an output, and others at the next comparison."""
        step = math.ceil(output.size / MAX_NUMBERS) or 1
        return output.reshape(-1)[self.compared % step :: step]


NONE: Final = References()
"""References to nothing."""
