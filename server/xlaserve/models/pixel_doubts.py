"""Doubts about the scale of the pixels that a user's model gets: a file seldom tells how they were scaled in training,
and a network answers all the same."""

from __future__ import annotations

from typing import Final

import numpy as np

from xlaserve.config import Preprocess, ScalingSettings, sources
from xlaserve.engine.inputs import selected
from xlaserve.engine.program import Outputs, run_batch
from xlaserve.engine.warmup.auto_buckets import Programs, smallest
from xlaserve.engine.warmup.sample import make_rows
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, Embedding, Regression, Tensors

OF_LEVELS: Final = 1 / 32
"""The largest factor for levels from 0 to 255 of a model that scales them itself."""
OF_PREPROCESS: Final = {"unit": 1 / 255, "tf": 1 / 127.5, "torch": 1 / 255 / 0.226}
"""The factors of preprocessing in the settings, of all channels together."""
IMAGES: Final = (0, 1, 3, 5)
"""Places of the images of warm-up that are tried: all different, none of one colour."""
ALIKE: Final = 1e-6
"""Largest difference of answers that are the same, as a share of the largest number."""
_CHOICE: Final = "unit if it was trained on 0..1, tf on -1..1, torch on ImageNet's mean and deviation, none on 0..255"


def measure(model: Model, programs: Programs) -> list[str]:
    """Returns warnings about the scale of pixels, from the graph and from a few runs of the smallest bucket. Blocks."""
    if not sources.is_of_file(model.settings.source) or not model.inputs[0].is_image or model.image.is_deep:
        return []
    found = doubts(model)
    if isinstance(model.task, Classification | Embedding | Regression | Tensors):
        mode, bucket = smallest(programs)
        images = selected(make_rows(model.inputs, max(IMAGES) + 1, bucket.height, bucket.width), [*IMAGES])
        rows = zip(*images, strict=True)
        batches = [[np.resize(one, (bucket.batch, *one.shape)) for one in row] for row in rows]
        answers = [run_batch(programs[mode, bucket].executable, *batch) for batch in batches]
        if are_alike(answers):
            found.append(
                f"{len(IMAGES)} different images get the same answer; are pixels scaled as in training?"
                f" preprocess: {_CHOICE}"
            )
    return found


def doubts(model: Model) -> list[str]:
    """Returns warnings about the scale of pixels that a model of a file gets, with the line to write."""
    how, scale = model.settings.preprocess, model.pixel_scale
    if scale is None:
        return []
    if how == "auto" and model.is_unscaled and scale > OF_LEVELS:
        return [
            "the file doesn't tell how pixels were scaled in training; without preprocess they are from 0 to 255; write"
            f" preprocess: unit, or as it was trained: {_CHOICE}"
        ]
    if how != "auto" and (factor := factor_of(how)) is not None and scale / factor < OF_LEVELS:
        return [f"pixels are scaled twice, by preprocess: {how} and by the model itself; write preprocess: none"]
    return []


def factor_of(how: Preprocess) -> float | None:
    """Returns the factor of preprocessing for levels; None where it has none, or another for each image."""
    return how.factor if isinstance(how, ScalingSettings) else OF_PREPROCESS.get(how)


def are_alike(answers: list[Outputs]) -> bool:
    """Returns whether the first rows of all answers have the same floats, of which there are some."""
    rows = [
        np.concatenate([each[0].ravel() for each in outputs if each.dtype.kind == "f"] or [[]]) for outputs in answers
    ]
    values = np.asarray(rows, np.float64)
    largest = np.abs(values).max(initial=0)
    return bool(values.size and np.isfinite(largest) and np.ptp(values, axis=0).max() <= ALIKE * largest)
