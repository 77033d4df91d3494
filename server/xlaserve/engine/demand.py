"""Demand: how many images wait when a batch is formed. What a set of buckets is chosen for."""

from __future__ import annotations

from collections import Counter
from typing import Final

MOST: Final = 256
"""More waiting images than this count as this many, so that the record stays small: large demand is all alike."""

Demand = Counter[int]
"""Images by demand: `demand[n]` images were taken from a queue while n of them waited for the lane that took them.

Each image counts once, whatever a demand is split into: of 20 that wait a lane may take 16, which are 16 images of
demand 20; the 4 that stay are counted with whatever has joined them by then. Where several lanes are free, n is the
one lane's share.
"""


def note(demand: Demand, waiting: int, taken: int) -> None:
    """Adds a batch of `taken` images out of `waiting`."""
    demand[min(waiting, MOST)] += taken


def even(most: int) -> Demand:
    """Returns what is expected where nothing was recorded: as many images at every demand from 1 to `most`.

    Then a demand of n occurs in proportion to 1/n, so that each doubling of the load is as likely as the next: nothing
    is known of it.
    """
    return Counter(dict.fromkeys(range(1, most + 1), 1))
