"""Which arm is measured when, under which load: pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
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
    min_rounds: int = MIN_ROUNDS,
    block_s: float | None = None,
    twins: Mapping[str, str] = MappingProxyType({}),
) -> tuple[BlockPlan, ...]:
    """Returns blocks that measure each arm for `duration_s` in all, mirrored so that drift hits each arm alike.

    Each block goes through all of a load that has a duration of its own.

    The blocks come in rounds: the arms in a random order and then in the reverse of it (A B C, C B A). An arm's first
    block warms up for `warmup_s`, a later one for a quarter of that. An arm alone is measured in one piece. Blocks last
    at least `block_s`, even where all of them take more than `duration_s` then; BLOCK_S or less without it.

    `twins` are the controls, by their baselines, that run on the server of their baseline. The rounds then have every
    other arm twice, once in each half, so that no server gets more requests, or less rest, than another: A B, A' B.
    """
    own_s = load.duration_s()
    if len(arms) == 1:
        return (BlockPlan(arms[0], load, warmup_s, own_s or duration_s),)
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
    """Returns how many mirrored rounds the blocks hold."""
    return len({block.round for block in blocks if block.round is not None})


def length_s(block: BlockPlan) -> float:
    """Returns about how long a block takes."""
    return block.warmup_s + block.duration_s + _TURNOVER_S


@dataclass
class Pace:
    """Corrects what is expected of blocks and of starting servers by what they took so far."""

    blocks: int = 0
    excess_s: float = 0.0
    """Seconds that these blocks took over what was expected."""
    starts_s: list[float] = field(default_factory=list)
    """Seconds that starting each generation of servers but the first took."""

    def add(self, block: BlockPlan, taken_s: float) -> None:
        """Adds a block."""
        self.blocks += 1
        self.excess_s += taken_s - length_s(block)

    def blocks_s(self, blocks: Sequence[BlockPlan]) -> float:
        """Returns how long blocks will take."""
        return sum(map(length_s, blocks)) + len(blocks) * self.excess_s / max(1, self.blocks)

    def start_s(self, expected_s: float) -> float:
        """Returns how long starting a generation of servers will take; `expected_s` until one was started."""
        return sum(self.starts_s) / len(self.starts_s) if self.starts_s else expected_s


def lasting(seconds: float) -> str:
    """Returns a length of time in words: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
