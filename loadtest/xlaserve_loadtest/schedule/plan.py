"""Which arm is measured when, under which load: pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xlaserve_loadtest.record.lines import Role
from xlaserve_loadtest.schedule.arrivals import Load

BLOCK_S: Final = 1.0
"""About how long one block measures where arms are compared."""

MIN_ROUNDS: Final = 4
"""Least number of mirrored rounds in all: with fewer, an interval over blocks means nothing."""

_TURNOVER_S: Final = 0.15
"""Seconds to begin and end a block."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A stretch of the run under one arm and one load."""

    arm: str
    load: Load
    warmup_s: float
    """Load without measurement, at least; in a closed loop longer until every slot has been answered once."""
    duration_s: float
    """How long requests that become due are measured."""
    role: Role = "measure"
    round: int | None = None
    """Blocks of one mirrored round share it, and their arrivals."""


def mirrored(
    arms: Sequence[str],
    load: Load,
    *,
    duration_s: float,
    warmup_s: float,
    seed: int,
    first_round: int = 0,
    rounds: int | None = None,
    min_rounds: int = MIN_ROUNDS,
) -> tuple[BlockPlan, ...]:
    """Returns blocks that measure each arm for `duration_s` in all, mirrored so that drift hits each arm alike.

    The blocks come in rounds: the arms in a random order and then in the reverse of it (A B C, C B A). An arm's first
    block warms up for `warmup_s`, a later one for a quarter of that. An arm alone is measured in one piece.
    """
    if len(arms) == 1:
        return (BlockPlan(arms[0], load, warmup_s, duration_s),)
    rounds = rounds or max(min_rounds, round(duration_s / (2 * BLOCK_S)))
    generator = random.Random(seed + first_round)
    seen: set[str] = set()
    blocks: list[BlockPlan] = []
    for number in range(first_round, first_round + rounds):
        shuffled = generator.sample(list(arms), len(arms))
        for arm in shuffled + shuffled[::-1]:
            own_warmup_s = warmup_s / 4 if arm in seen else warmup_s
            blocks.append(BlockPlan(arm, load, own_warmup_s, duration_s / (2 * rounds), round=number))
            seen.add(arm)
    return tuple(blocks)


def rounds_of(blocks: Sequence[BlockPlan]) -> int:
    """Returns how many mirrored rounds the blocks hold."""
    return len({block.round for block in blocks if block.round is not None})


def length_s(block: BlockPlan) -> float:
    """Returns about how long a block takes."""
    return block.warmup_s + block.duration_s + _TURNOVER_S


def lasting(seconds: float) -> str:
    """Returns a length of time in words: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
