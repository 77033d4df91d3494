"""Blocks as long as a warning asks for: does a queue that begins empty settle in them?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np
from tests.prove.queues import run, true_mean_s
from tests.prove.registry import Row, Trials, part

from xlaserve_loadtest.analysis.settling import SETTLED_AFTER

RATE: Final = 100.0
QUEUES: Final[tuple[tuple[Literal["M/M/1", "G/M/1", "M/D/1"], float], ...]] = (
    ("M/M/1", 0.5),
    ("M/M/1", 0.8),
    ("M/M/1", 0.9),
    ("M/M/1", 0.95),
    ("M/D/1", 0.9),
    ("G/M/1", 0.8),
    ("G/M/1", 0.9),
    ("G/M/1", 0.95),
)
LEAST: Final = 0.9


@part
def block_length(trials: Trials) -> Iterator[Row]:
    """Mean latency over the true one, in blocks of 1 s and in those that are asked for where these are too short."""
    count = trials.number(400)
    for kind, utilisation in trials.some(*QUEUES):
        truth_s = true_mean_s(kind, utilisation, RATE)
        length_s = max(SETTLED_AFTER * truth_s * truth_s * RATE, 1.0)
        for claim, seconds, limit, is_least in (
            ("mean latency in blocks of 1 s is below the true one", 1.0, 1.0, False),
            ("in blocks as long as is asked for, it is near that", length_s, LEAST, True),
        ):
            blocks = run(trials.random, kind, utilisation, rate=RATE, seconds=seconds * count, blocks=count)
            means = np.array([block.mean() for block in blocks]) / truth_s / 1e9
            where = f"{kind} at {utilisation:g}, {seconds:.3g} s at {RATE:g}/s"
            yield Row(claim, where, limit, is_least, float(means.mean()), float(means.std(ddof=1)) / math.sqrt(count))
