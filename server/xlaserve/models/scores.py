"""Scores of classifiers in a few runs: probabilities, or numbers that the settings should say more about."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import sources
from xlaserve.engine.program import Outputs, run_batch
from xlaserve.engine.warmup.auto_buckets import Programs, smallest
from xlaserve.engine.warmup.sample import make_rows
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, ClassSequence, readings_of

SUM_TOLERANCE: Final = 1e-2
"""Largest difference from 1 of the sum of probabilities, in narrow types."""


def are_probabilities(values: NDArray[Any]) -> bool:
    """Returns whether the last axis holds probabilities: numbers from 0 to 1 that sum up to 1."""
    return _are_shares(values) and bool(np.abs(values.sum(axis=-1, dtype=np.float64) - 1).max() <= SUM_TOLERANCE)


def measure(model: Model, programs: Programs) -> list[str]:
    """Returns `doubts` about answers to a few images, in the smallest bucket. Blocks."""
    if not _of_classes(model):
        return []
    mode, bucket = smallest(programs)
    return doubts(model, run_batch(programs[mode, bucket].executable, *make_rows(model.inputs, *bucket)))


def doubts(model: Model, outputs: Outputs) -> list[str]:
    """Returns a warning for each classification or sequence of a user's model whose scores are no probabilities, with
    what to set; none where the settings have an `activation`."""
    found = []
    for name, task in _of_classes(model):
        scores = outputs[task.at]
        if are_probabilities(scores):
            continue
        activation = "sigmoid" if isinstance(task, Classification) and task.threshold is not None else "softmax"
        if _are_shares(scores):
            what = "are from 0 to 1 but don't sum up to 1, as those of a model with several labels for an image"
        else:
            what = f"are no probabilities: they are from {scores.min():.3g} to {scores.max():.3g}, as logits are"
        found.append(
            f"{name}: the scores {what}; set activation: {activation} to make them probabilities, activation: none to"
            " keep them without this warning, or another task if they are no scores"
        )
    return found


def _of_classes(model: Model) -> list[tuple[str, Classification | ClassSequence]]:
    """Returns the classifications and sequences of a user's model for which the settings name no activation, and their
    outputs."""
    settings, task = model.settings, model.task
    kind = sources.kind_of(settings.source)
    if kind is None or "activation" not in (sources.PARTICULAR if kind.value.takes is None else kind.value.takes):
        return []
    named = {name for name, own in settings.outputs if own.activation is not None}
    whole = (task,) if isinstance(task, (Classification, ClassSequence)) and settings.activation is None else ()
    found = [one for one in (*whole, *readings_of(task)) if isinstance(one, (Classification, ClassSequence))]
    return [(name, one) for one in found if (name := task.outputs[one.at].name) not in named]


def _are_shares(values: NDArray[Any]) -> bool:
    is_known = values.dtype.kind == "f" and values.size > 0
    return is_known and bool(values.min() >= 0) and bool(values.max() <= 1 + SUM_TOLERANCE)
