"""Warm-up with `buckets: auto`: candidates are measured, and the set with the least expected cost is kept.

There is one set for all modes of a resolution, chosen by the measurements in the default mode, which traffic takes
unless a request names another; a set for each would compile every candidate in every mode. Where the default is
`auto`, a candidate costs what its fastest mode does.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from xlaserve.config import MIB, AutoBuckets, Bucket, Mode, ModelSettings
from xlaserve.engine import memory
from xlaserve.engine.buckets.choice import (
    OVERHEAD_S,
    Candidate,
    Limits,
    choose,
    expected_cost_s,
    in_order_of_use,
    powers_of_two,
)
from xlaserve.engine.buckets.demand import Demand, Resolution, even
from xlaserve.engine.program import Warmed
from xlaserve.engine.warmup.compiler import fastest
from xlaserve.errors import ModelFailed

log = logging.getLogger(__name__)

Programs = dict[tuple[Mode, Bucket], Warmed]
Warm = Callable[[Iterable[Mode], Iterable[Bucket]], Programs]
"""Compiles, runs and times the given modes and buckets: `compiler.warm_up` of one model."""


def smallest(programs: Programs) -> tuple[Mode, Bucket]:
    """Returns the mode and the bucket of the program that takes the fewest pixels in one batch."""
    return min(programs, key=lambda key: (math.prod(key[1]), key))


def warm_up_auto(
    warm: Warm,
    model: ModelSettings,
    buckets: Iterable[Bucket],
    demands: Mapping[Resolution, Demand],
    *,
    corrected: Callable[[Programs], Programs] = lambda programs: programs,
    clock: Callable[[], float] = time.perf_counter,
) -> Programs:
    """Measures the candidates `buckets` in the default mode, and returns the chosen ones, compiled in all modes.

    `demands` are the recorded ones; a resolution without a record gets `demand.even`. Costs are compared once they are
    `corrected`. Blocks. Raises the errors of `warm` and `corrected`, and ModelFailed where `max_memory_mib` is too
    little for any candidate.
    """
    settings, modes, default_mode = model.auto_buckets, model.compiled_modes, model.effective_default_mode
    measured_modes = modes if default_mode is Mode.AUTO else (default_mode,)
    by_resolution: dict[Resolution, list[int]] = {}
    for bucket in buckets:
        by_resolution.setdefault((bucket.height, bucket.width), []).append(bucket.batch)
    kept: Programs = {}
    give_up_at = clock() + settings.max_compile_s
    for left, (resolution, batches) in zip(range(len(by_resolution), 0, -1), by_resolution.items(), strict=True):
        until = clock() + (give_up_at - clock()) / left
        measured: Programs = {}
        taken: dict[Bucket, memory.Taken] = {}
        for batch in in_order_of_use(batches):
            if taken and clock() >= until:
                log.warning(
                    "model %s: auto_buckets.max_compile_s (%g) is over with %d of %d candidates measured",
                    model.name,
                    settings.max_compile_s,
                    len(taken),
                    len(batches),
                )
                break
            bucket = Bucket(batch, *resolution)
            warmed, taken[bucket] = _measured(partial(warm, measured_modes, (bucket,)), settings)
            measured |= warmed
        measured = corrected(measured)
        candidates = [
            Candidate(bucket.batch, measured[mode, bucket].cost.loaded_s + OVERHEAD_S, *taken[bucket])
            for bucket, mode in fastest(measured).items()
        ]
        demand = demands.get(resolution) or even(2 * settings.max_batch)
        chosen = _choose(model.name, resolution, candidates, demand, settings)
        kept |= {key: warmed for key, warmed in measured.items() if key[1].batch in chosen}
    other_modes = [mode for mode in modes if mode not in measured_modes]
    return kept | warm(other_modes, sorted({bucket for _, bucket in kept}))


def _measured(make: Callable[[], Programs], settings: AutoBuckets) -> tuple[Programs, memory.Taken]:
    if settings.max_memory_mib is None:
        return make(), memory.Taken(0, 0)
    try:
        return memory.measure(make)
    except OSError as error:
        raise ModelFailed(f"auto_buckets.max_memory_mib: memory can't be measured on this system: {error}") from error


def _choose(
    model: str, resolution: Resolution, candidates: Sequence[Candidate], demand: Demand, settings: AutoBuckets
) -> set[int]:
    limit_mib = settings.max_memory_mib
    limits = Limits(settings.max_buckets) if limit_mib is None else Limits(settings.max_buckets, limit_mib * MIB)
    chosen = choose(candidates, demand, limits)
    size = "x".join(map(str, resolution))
    if not chosen:
        least = min(-(-(one.held_bytes + one.run_bytes) // MIB) for one in candidates)
        raise ModelFailed(
            f"auto_buckets.max_memory_mib: expected at least {least} for one bucket of {size}, got {limit_mib}"
        )
    costs_s = {one.batch: one.cost_s for one in candidates}
    cost_s = expected_cost_s({one.batch: one.cost_s for one in chosen}, demand)
    powers = {batch: costs_s[batch] for batch in powers_of_two(max(costs_s)) if batch in costs_s}
    log.info(
        "model %s: buckets %s of %d measured at %s: %.2f ms expected for an image, %.2f with powers of two",
        model,
        ", ".join(str(one.batch) for one in chosen),
        len(candidates),
        size,
        cost_s * 1000,
        expected_cost_s(powers, demand) * 1000,
    )
    return {one.batch for one in chosen}
