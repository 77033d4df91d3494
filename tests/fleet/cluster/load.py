"""Load on a fleet, each call of which is accounted for."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from xlaserve_client import VisionClient
from xlaserve_client.errors import ServerError

DEADLINE_S = 20.0
ANSWERED = "answered"


@dataclass(slots=True)
class Calls:
    """What became of the calls."""

    started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """`answered`, or the name of the error."""
    latencies_s: list[float] = field(default_factory=list)
    """Of the answered ones, in the order of their answers."""
    answered_at: list[float] = field(default_factory=list)

    @property
    def lost(self) -> dict[str, int]:
        """Calls that failed, by error."""
        return {name: count for name, count in self.outcomes.items() if name != ANSWERED}

    @property
    def longest_gap_s(self) -> float:
        """The longest time without any answer."""
        return max((b - a for a, b in itertools.pairwise(self.answered_at)), default=0.0)

    def rate(self, since: float, until: float) -> float:
        """Answers a second in a period of the monotonic clock."""
        return sum(since <= at < until for at in self.answered_at) / (until - since)


@contextmanager
def load(
    fleet: str, *, model: str = "digits", callers: int = 8, images: int = 4, pause_s: float = 0.02
) -> Iterator[Calls]:
    """Calls `fleet`, fleet://HOST:PORT, from so many threads, `pause_s` after each answer, until the block ends.

    Every call that was started has ended then: one that hangs fails the test.
    """
    calls, lock, stopping = Calls(), threading.Lock(), threading.Event()
    pixels = np.zeros((images, 32, 32, 3), np.uint8)

    def run() -> None:
        while not stopping.is_set():
            with lock:
                calls.started += 1
            started_at = time.monotonic()
            try:
                client.infer(pixels, model=model)
                outcome = ANSWERED
            except ServerError as error:
                outcome = type(error).__name__
            now = time.monotonic()
            with lock:
                calls.outcomes[outcome] += 1
                if outcome == ANSWERED:
                    calls.latencies_s.append(now - started_at)
                    calls.answered_at.append(now)
            time.sleep(pause_s)

    with VisionClient(fleet, deadline_s=DEADLINE_S) as client:
        threads = [threading.Thread(target=run, daemon=True) for _ in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            stopping.set()
            for thread in threads:
                thread.join(2 * DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    assert calls.outcomes.total() == calls.started
