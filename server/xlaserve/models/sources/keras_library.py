"""Building of models that KerasCV and KerasHub share: Keras models that a table describes, built offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import preprocess
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import UNKNOWN, Preparation, of_image_converter
from xlaserve.models.networks.preprocess import Preprocess, Scaling
from xlaserve.models.sources import keras_detectors, keras_models, random_weights


def check_task(settings: ModelSettings, tasks: Sequence[str]) -> None:
    """Raises ModelFailed where the settings ask for none of `tasks`."""
    if settings.task not in ("auto", *tasks):
        raise ModelFailed(
            f"task: expected {' or '.join(tasks)} for {settings.source}, got {settings.task}; write task: {tasks[0]}"
        )


def input_size(settings: ModelSettings, side: int, multiple: int) -> tuple[int, int]:
    """Returns the height and width to build for: those of the settings, or `side`. Raises ModelFailed."""
    size = settings.input_size or (side, side)
    if any(length % multiple for length in size):
        sides = ", ".join(str(-(-length // multiple) * multiple) for length in size)
        raise ModelFailed(
            f"input_size: expected multiples of {multiple}, got {size[0]}x{size[1]}; write input_size: [{sides}]"
        )
    return size


def give_weights(model: Any, weights: str, size: tuple[int, int], how: Preprocess) -> str:
    """Settles random weights on images of `size`, or loads a file of weights. Returns their name."""
    if weights == "random":
        random_weights.settle(
            model, size, lambda pixels: keras_models.call(model, preprocess.apply(pixels, how), training=True)
        )
        return weights
    model.load_weights(weights)
    return Path(weights).name


def image_converter(model: Any) -> Any:
    """Returns the layer of a task of KerasHub that scales and resizes images; None where a model has none."""
    return getattr(getattr(model, "preprocessor", None), "image_converter", None)


def own_preprocess(model: Any) -> Preprocess:
    """Returns the preprocessing of pixels in a task of KerasHub; `none` where a model has no preprocessor.

    Resizing is not part of it.
    """
    if (converter := image_converter(model)) is None:
        return "none"

    def channels(value: Any) -> tuple[float, ...]:
        return tuple(np.broadcast_to(value, max(3, np.size(value))).tolist())

    return Scaling(
        channels(1.0 if converter.scale is None else converter.scale),
        channels(0.0 if converter.offset is None else converter.offset),
    )


def own_preparation(model: Any) -> Preparation:
    """Returns how a task of KerasHub resizes images; without a reason where it does not."""
    if (converter := image_converter(model)) is None or converter.image_size is None:
        return UNKNOWN
    return of_image_converter(
        converter.interpolation, antialias=converter.antialias, crops=converter.crop_to_aspect_ratio
    )


def network(
    model: Any,
    settings: ModelSettings,
    *,
    preprocessing: Preprocess,
    weights: str,
    size: tuple[int, int],
    multiple: int,
) -> Network:
    """Returns the network of a model whose own input size is `size`. Raises ModelFailed.

    `multiple` concerns models that take several sizes.
    """
    (pixels,) = model.inputs
    if None not in pixels.shape[1:3]:
        multiple = 1
    if keras_detectors.is_detector(model):
        return keras_detectors.detector(
            model, settings, preprocessing=preprocessing, weights=weights, default_size=size, multiple=multiple
        )
    if settings.task == "embedding":
        model = keras_models.features(model)
    return keras_models.network(
        model, settings, preprocessing=preprocessing, weights=weights, default_size=size, multiple=multiple
    )
