"""Processor time that an inference request takes of the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

COUNTED: Final = 10_000
FEW: Final = 200
"""Requests that say too little."""


class LoopTime:
    """Counts requests on the thread of the event loop; `processor_s` returns the processor seconds of that thread.

    All that the loop does counts, so that a request seems to take too much where there is hardly one.
    """

    def __init__(self, processor_s: Callable[[], float] = time.thread_time) -> None:
        self._processor_s = processor_s
        self._answered = -1  # the first one only begins: start-up is no part of a request
        self._earlier = self._later = (0, 0.0)
        """Requests and processor seconds at the last COUNTED of them, and at those before."""

    def count(self) -> None:
        """Counts a request that has been answered."""
        self._answered += 1
        if self._answered % COUNTED == 0:
            now = self._answered, self._processor_s()
            self._earlier, self._later = (self._later if self._answered else now), now

    def of_a_request_s(self) -> float:
        """Returns seconds for a request, over the last COUNTED and at most as many before; 0 before there were FEW."""
        answered, used_s = self._earlier
        requests = self._answered - answered
        return (self._processor_s() - used_s) / requests if requests >= FEW else 0.0
