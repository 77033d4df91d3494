"""Measured costs of a running server, as a profile for simulations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from xlaserve.engine.buckets.choice import OVERHEAD_S
from xlaserve.engine.buckets.planner import Cost
from xlaserve.errors import ModelNotReady
from xlaserve.planning.measured_profile import POINTS, Profile, Quantiles, lognormal
from xlaserve.processes.capacity import TYPICAL, US_PER_S
from xlaserve_proto import vision_pb2 as pb

SPREAD: Final = 0.1
"""How far batches stray before any traffic has shown it."""
FEW: Final = 200
"""Batches that say too little of what they take under load. Below them, warm-up's costs are more to be trusted."""
FEW_OF_BUCKET: Final = 8
"""Batches that say too little of one bucket."""
SURE: Final = 2.0
"""Standard errors of a mean that are taken for its error."""
INDEPENDENT: Final = 0.5
"""Share of the batches that counts as independent: a slow moment makes several batches slow."""


ENGINE_S: Final = TYPICAL.engine_us / US_PER_S
"""Of the engine's event loop for a request that a front has read."""


class Measured(NamedTuple):
    """A profile, and where it comes from."""

    profile: Profile
    batches: int
    """Of traffic that its costs come from; 0 where they are warm-up's."""
    error: float
    """By what part of them the costs may be off for so few batches; 0 where nothing is known of it."""


def measured(answer: pb.ListModelsResponse, model: pb.Model, mode: str) -> Measured:
    """Returns how a server runs the resolution of `model` that has the most buckets.

    Costs are those of the traffic, where there was enough of it, else those of warm-up. Raises ModelNotReady.
    """
    sizes: dict[tuple[int, int], dict[int, Cost]] = {}
    for program in model.programs:
        if program.mode == mode:
            costs = sizes.setdefault((program.bucket.height, program.bucket.width), {})
            costs[program.bucket.batch] = Cost(program.run_s, program.run_loaded_s)
    if not sizes:
        raise ModelNotReady(f"model {model.name}: no program of mode {mode} was measured")
    size = max(sizes, key=lambda it: len(sizes[it]))
    turns = [turn for turn in model.turns if turn.mode == mode and (turn.bucket.height, turn.bucket.width) == size]
    warmed = sizes[size]
    server = replace(
        Profile(warmed, answer.lanes or 1, warmed),
        front_s=answer.front_s,
        fronts=answer.fronts,
        engine_s=ENGINE_S if answer.fronts else 0.0,
    )
    batches = sum(turn.batches for turn in turns)
    if batches <= FEW or max(turn.batches for turn in turns) < FEW_OF_BUCKET:
        hop = (OVERHEAD_S / 2,)
        return Measured(replace(server, deviations=lognormal(SPREAD), started_s=hop, returned_s=hop), 0, 0.0)
    deviations = _pooled(turns, lambda turn: turn.deviations)
    server = replace(
        server,
        costs=_costs(warmed, turns),
        deviations=deviations,
        started_s=_pooled(turns, lambda turn: turn.started_s),
        returned_s=_pooled(turns, lambda turn: turn.returned_s),
    )
    return Measured(server, batches, SURE * float(np.std(np.log(deviations))) / math.sqrt(INDEPENDENT * batches))


def _costs(warmed: dict[int, Cost], turns: Sequence[pb.Turn]) -> dict[int, Cost]:
    """Returns what batches take in traffic; of buckets that hardly ran, what warm-up says, with the others' factor."""
    known = {turn.bucket.batch: turn for turn in turns if turn.batches >= FEW_OF_BUCKET and turn.bucket.batch in warmed}
    found = {batch: Cost(turn.alone_s, turn.loaded_s) for batch, turn in known.items()}
    weights = [turn.batches for turn in known.values()]
    factors = [
        math.exp(np.average([math.log(found[batch][end] / warmed[batch][end]) for batch in known], weights=weights))
        for end in range(len(Cost._fields))
    ]
    guessed = {
        batch: Cost(*(seconds * factor for seconds, factor in zip(cost, factors, strict=True)))
        for batch, cost in warmed.items()
        if batch not in found
    }
    return dict(sorted({**found, **guessed}.items()))


def _pooled(turns: Sequence[pb.Turn], of: Callable[[pb.Turn], Sequence[float]]) -> Quantiles:
    """Returns the distribution over the batches of all buckets."""
    values = np.concatenate([of(turn) for turn in turns])
    weights = np.concatenate([np.full(len(of(turn)), turn.batches / max(1, len(of(turn)))) for turn in turns])
    order = np.argsort(values)
    reached = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return tuple(np.interp(np.linspace(0, 1, POINTS), reached, values[order]).tolist())
