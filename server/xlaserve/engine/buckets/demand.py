"""Demand: the number of images that wait when a batch is formed, for which a set of buckets is chosen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from xlaserve.errors import ModelFailed

MAX_DEMAND: Final = 256
"""More waiting images than this count as this many, so that the record stays small: large demand is all alike."""

Demand = Counter[int]
"""Images by demand: `demand[n]` images were taken from a queue while n of them waited for the lane that took them.

Each image counts once, however a demand is split: of 20 that wait a lane may take 16, which are 16 images of demand 20;
the 4 that stay are counted together with those that have joined them by then. Where several lanes are free, n is the
one lane's share.
"""


Resolution = tuple[int, int]
"""Height and width."""


def note(demand: Demand, waiting: int, taken: int) -> None:
    """Adds a batch of `taken` images out of `waiting`."""
    demand[min(waiting, MAX_DEMAND)] += taken


def even(most: int) -> Demand:
    """Returns the demand that is assumed where none was recorded: as many images at every demand from 1 to `most`.

    Then a demand of n occurs in proportion to 1/n, so that each doubling of the load is as likely as the next. `most`
    is to be beyond the largest bucket, as the demand of a busy server is.
    """
    return Counter(dict.fromkeys(range(1, most + 1), 1))


def write(file: Path, demands: Mapping[Resolution, Demand]) -> None:
    """Writes demands as JSON, `{"224x224": {"1": 5320, "7": 84}}`. Raises OSError."""
    text = {f"{height}x{width}": dict(sorted(demand.items())) for (height, width), demand in demands.items()}
    file.write_text(json.dumps(text, indent=2) + "\n")


def read(file: Path) -> dict[Resolution, Demand]:
    """Reads demands that `write` wrote. Raises ModelFailed."""
    try:
        return {_resolution(size): _demand(counts) for size, counts in json.loads(file.read_text()).items()}
    except OSError as error:
        reason = error.strerror or "can't be read"
    except (ValueError, TypeError, AttributeError):
        reason = 'expected JSON such as {"224x224": {"1": 5320, "7": 84}}: how many images met which demand'
    raise ModelFailed(f"auto_buckets.demand: {file.name}: {reason}")


def _resolution(text: str) -> Resolution:
    height, width = map(int, text.split("x"))
    return height, width


def _demand(counts: Mapping[str, int]) -> Demand:
    demand = Demand({int(n): int(images) for n, images in counts.items() if images})
    if not demand or not all(1 <= n <= MAX_DEMAND and images > 0 for n, images in demand.items()):
        raise ValueError
    return demand
