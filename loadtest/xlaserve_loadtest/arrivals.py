"""When requests are sent: pure and seeded, so that the same arguments give the same plan.

A plan is a sequence of blocks, each with one arm (a way to run the model). Inside a block an arrival process says when
each request is due. Latency counts from that moment, not from when the generator got round to sending it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BLOCK_S: Final = 1.0
"""About how long one block measures."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of slots; a slot's next request is due at the moment when its last one was answered."""

    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"concurrency: expected at least 1, got {self.slots}")


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the run under one arm."""

    index: int
    arm: str
    warmup_s: float
    """Load without measurement, at least; longer until every slot has been answered once."""
    duration_s: float
    """How long requests that become due are measured."""


def interleave(arms: Sequence[str], *, duration_s: float, warmup_s: float, seed: int) -> tuple[Block, ...]:
    """Returns blocks that measure each arm for `duration_s` in all, mirrored so that drift hits each arm alike.

    The blocks come in rounds: the arms in a random order and then in the reverse of it (A B C, C B A). An arm's first
    block warms up for `warmup_s`, a later one for a quarter of that.
    """
    if not arms or len(set(arms)) != len(arms):
        raise ValueError(f"arms: expected one or more, each once, got {list(arms)}")
    if duration_s <= 0 or warmup_s < 0:
        raise ValueError(f"expected a duration over 0 and a warm-up of 0 or more, got {duration_s} and {warmup_s} s")
    rounds = max(1, round(duration_s / (2 * BLOCK_S)))
    generator = random.Random(seed)
    order: list[str] = []
    for _ in range(rounds):
        shuffled = generator.sample(list(arms), len(arms))
        order += shuffled + shuffled[::-1]
    return tuple(
        Block(index, arm, warmup_s if arm not in order[:index] else warmup_s / 4, duration_s / (2 * rounds))
        for index, arm in enumerate(order)
    )
