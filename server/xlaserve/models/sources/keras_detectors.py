"""Detectors of KerasCV and KerasHub as networks, wherever they come from.

Decoding and suppression become part of the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.models.networks import detection_head, heads, precision
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.networks.image_tensor import image_tensor
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network, Size
from xlaserve.models.networks.network_inputs import NetworkInputs
from xlaserve.models.networks.preprocess import Preprocess
from xlaserve.models.sources import keras_models

MULTIPLE: Final = 32
"""Divisor of height and width: detectors join feature maps, the smallest with a 32nd of the input's sides."""


class Undecided(keras.layers.Layer):  # type: ignore[misc] # Keras has no types
    """Replaces the non-maximum suppression of a detector, and keeps all boxes."""

    def __init__(self, bounding_box_format: str, from_logits: bool) -> None:
        super().__init__()
        self.bounding_box_format = bounding_box_format
        self.from_logits = from_logits

    def call(self, boxes: Any, scores: Any, **_: Any) -> dict[str, Any]:
        """Returns all boxes and their probabilities."""
        return {"boxes": boxes, "scores": keras.ops.sigmoid(scores) if self.from_logits else scores}


def is_detector(model: Any) -> bool:
    """Returns whether `model` is a detector of KerasCV or KerasHub."""
    return hasattr(model, "decode_predictions") and hasattr(model, "prediction_decoder")


def detector(
    model: Any,
    settings: ModelSettings,
    *,
    preprocessing: Preprocess,
    weights: str,
    default_size: Size = (None, None),
    multiple: int = MULTIPLE,
) -> Network:
    """Returns the network of a detector of KerasCV or KerasHub; `default_size` is what it was designed for.

    Non-maximum suppression has the settings' thresholds, and goes across classes as in those libraries.
    """
    model.prediction_decoder = Undecided(model.bounding_box_format, model.prediction_decoder.from_logits)
    settings = settings.model_copy(update={"bounding_box_format": model.bounding_box_format})

    def infer(pixels: tf.Tensor) -> heads.Raw:
        decoded: heads.Raw = model.decode_predictions(precision.widen(keras_models.call(model, pixels)), pixels)
        return decoded

    (given,) = model.inputs
    image = image_tensor(TensorShape(given.shape, given.dtype), settings.color, settings.layout, settings.depth)
    inputs = NetworkInputs.of_image(image)
    head = detection_head.candidates(model.num_classes, settings, across_classes=True)
    built = keras_models.assembled(
        model, inputs.last(infer), head, settings, inputs=inputs, preprocessing=preprocessing
    )
    return replace(built, weights=weights, default_size=default_size, multiple=multiple)
