"""The plan of a run: the order of its blocks and the load of each. Pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Final

from xlaserve_loadtest.record.blocks import Role
from xlaserve_loadtest.schedule.arrivals import Load

BLOCK_S: Final = 1.0
"""Approximate measured seconds of a block where arms are compared."""

MIN_ROUNDS: Final = 4
"""Least number of mirrored rounds: with fewer, an interval over blocks means nothing."""

_TURNOVER_S: Final = 0.15
"""Seconds that beginning and ending a block takes."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A part of the run with one arm and one load."""

    arm: str
    load: Load
    warmup_s: float
    """Least seconds of load before the measurement; a closed loop warms up until every slot has been answered once."""
    duration_s: float
    """Seconds in which requests must become due to be measured."""
    role: Role = "measure"
    round: int | None = None
    """Number of the mirrored round, whose blocks have the same arrivals."""


def mirrored(
    arms: Sequence[str],
    load: Load,
    *,
    duration_s: float,
    warmup_s: float,
    seed: int,
    first_round: int = 0,
    min_rounds: int = MIN_ROUNDS,
    block_s: float | None = None,
    twins: Mapping[str, str] = MappingProxyType({}),
) -> tuple[BlockPlan, ...]:
    """Returns blocks that measure each arm for `duration_s` in all, mirrored so that drift affects each arm alike.

    Where the load has a duration of its own, each block runs all of it.

    The blocks are in rounds: the arms in a random order and then in the reverse order (A B C, C B A). An arm's first
    block warms up for `warmup_s`, a later one for a quarter of that. A single arm is measured in one block. Blocks last
    at least `block_s`, even if all of them then take more than `duration_s`; without it, BLOCK_S or less.

    `twins` are the controls, by their baselines, that run on the server of their baseline. Each half of a round then
    runs the arms twice, once with the baselines and once with the controls in their place, so that no server gets more
    requests or less rest than another: A B, A' B.
    """
    own_s = load.duration_s()
    if len(arms) == 1:
        return (BlockPlan(arms[0], load, warmup_s, own_s or max(duration_s, block_s or 0.0)),)
    rounds = min_rounds if own_s else max(min_rounds, round(duration_s / (2 * (block_s or BLOCK_S))))
    length_s = own_s or max(duration_s / (2 * rounds), block_s or 0.0)
    generator = random.Random(seed + first_round)
    own = [arm for arm in arms if arm not in twins.values()]
    seen: set[str] = set()
    blocks: list[BlockPlan] = []
    for number in range(first_round, first_round + rounds):
        shuffled = generator.sample(own, len(own))
        if twins:
            halves = [shuffled, [twins.get(arm, arm) for arm in shuffled]]
            shuffled = list(chain(*generator.sample(halves, 2)))
        for arm in shuffled + shuffled[::-1]:
            own_warmup_s = warmup_s / 4 if arm in seen else warmup_s
            blocks.append(BlockPlan(arm, load, own_warmup_s, length_s, round=number))
            seen.add(arm)
    return tuple(blocks)


def rounds_of(blocks: Sequence[BlockPlan]) -> int:
    """Returns the number of mirrored rounds of the blocks."""
    return len({block.round for block in blocks if block.round is not None})


def length_s(block: BlockPlan) -> float:
    """Returns the approximate seconds of a block."""
    return block.warmup_s + block.duration_s + _TURNOVER_S


@dataclass
class Pace:
    """Estimates of the remaining time, corrected by the time that blocks and starts of servers took so far."""

    blocks: int = 0
    excess_s: float = 0.0
    """Seconds that these blocks took beyond `length_s`."""
    starts_s: list[float] = field(default_factory=list)
    """Seconds of each start of servers but the first."""

    def add(self, block: BlockPlan, taken_s: float) -> None:
        """Adds a block that took `taken_s` seconds."""
        self.blocks += 1
        self.excess_s += taken_s - length_s(block)

    def blocks_s(self, blocks: Sequence[BlockPlan]) -> float:
        """Returns the expected seconds of blocks."""
        return sum(map(length_s, blocks)) + len(blocks) * self.excess_s / max(1, self.blocks)

    def start_s(self, expected_s: float) -> float:
        """Returns the expected seconds of a start of servers; `expected_s` until one is known."""
        return sum(self.starts_s) / len(self.starts_s) if self.starts_s else expected_s


def lasting(seconds: float) -> str:
    """Returns a length of time in words: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
