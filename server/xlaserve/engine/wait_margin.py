"""The margin of expected waits, learned from the ratio of the time that requests took to the time that was expected."""

from __future__ import annotations

from typing import Final

NEWEST: Final = 1 / 128
"""The part of the mean that the newest request makes. Requests of one batch say much the same, and batches that follow
each other differ, so that many are needed."""
NEWEST_ERROR: Final = 1 / 32
"""The part of the mean deviation that the newest request makes: a mean that lags behind costs a wider margin first."""
FIRST: Final = 8
"""Requests that the mean starts with, as if they had taken the expected time; the first real ones thus count for
more."""
MARGIN: Final = 4.0
"""Mean deviations that are added to the mean, so that few requests take longer than is likely."""
MIN_MARGIN: Final = 0.05
"""The least margin, as a part of the expected time: deviations are measured over a shorter time than some requests
wait."""
GRACE_S: Final = 0.005
"""Added to both sides of a ratio: delays of the event loop count for little where the expected time is short, too."""
MAX_RATIO: Final = 8.0
"""The largest ratio, and the inverse of the least, with which a request counts."""


class WaitMargin:
    """Learns by how much requests take longer than expected, or shorter."""

    __slots__ = ("_deviation", "_mean", "_observed")

    def __init__(self) -> None:
        self._mean = 1.0
        self._deviation = 0.0
        self._observed = FIRST

    def observe(self, expected_s: float, took_s: float) -> None:
        """Takes into account a request that took `took_s`."""
        self._observed += 1
        ratio = (took_s + GRACE_S) / (expected_s + GRACE_S)
        error = min(max(ratio, 1 / MAX_RATIO), MAX_RATIO) - self._mean
        self._mean += max(NEWEST, 1 / self._observed) * error
        self._deviation += NEWEST_ERROR * (abs(error) - self._deviation)

    def likely_s(self, expected_s: float) -> float:
        """Returns the seconds within which most requests with an expected time of `expected_s` are answered."""
        ratio = self._mean + max(MARGIN * self._deviation, MIN_MARGIN)
        return max(0.0, (expected_s + GRACE_S) * ratio - GRACE_S)
