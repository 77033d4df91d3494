"""The head for sequences of classes."""

from __future__ import annotations

from collections.abc import Mapping

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.heads import AS_TENSORS, Head, TensorShape, activated, pick
from xlaserve.models.task import ClassSequence


def sequence(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for scores `[n, steps, classes]`. Raises ModelFailed for other outputs."""
    name, scores = pick(outputs, settings, "scores")
    match scores.shape:
        case (_, steps, int(classes)) if classes > 1:
            task = ClassSequence(classes, steps=-1 if steps is None else steps, blank=settings.blank or "last")
            return Head(task, lambda raw, _: (activated(raw[name], settings),))
    raise ModelFailed(f"source: expected an output of scores [None, steps, classes], got {scores}; {AS_TENSORS}")
