"""Networks from SavedModel folders."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.model.classifier import TensorShape, classifier
from xlaserve.model.network import Network

SIGNATURE: Final = "serving_default"


def is_saved_model(folder: Path) -> bool:
    """Says whether `folder` holds a SavedModel."""
    return bool(tf.saved_model.contains_saved_model(str(folder)))


def saved_model(folder: Path, settings: ModelSettings) -> Network:
    """Loads the signature `serving_default` of a SavedModel.

    It is run as it was exported, which in the mode eager means as a graph.
    """
    loaded = tf.saved_model.load(str(folder))
    if SIGNATURE not in loaded.signatures:
        names = ", ".join(sorted(loaded.signatures)) or "none"
        raise ModelFailed(f"source: expected a signature {SIGNATURE}, got {names}")
    signature = loaded.signatures[SIGNATURE]
    inputs, outputs = signature.structured_input_signature[1], signature.structured_outputs
    if len(inputs) != 1 or len(outputs) != 1:
        got = f"{', '.join(sorted(inputs)) or 'none'} and {', '.join(sorted(outputs)) or 'none'}"
        raise ModelFailed(f"source: expected a signature of one input and one output, got {got}")
    ((pixels_name, pixels),) = inputs.items()
    ((scores_name, scores),) = outputs.items()

    def call(images: tf.Tensor) -> tf.Tensor:
        # `loaded` owns the variables that the signature refers to weakly.
        return loaded.signatures[SIGNATURE](**{pixels_name: images})[scores_name]

    return classifier(
        call,
        pixels=_tensor_shape(pixels),
        scores=_tensor_shape(scores),
        preprocessing="none" if settings.preprocess == "auto" else settings.preprocess,
        weights=folder.name,
    )


def _tensor_shape(spec: tf.TensorSpec) -> TensorShape:
    return TensorShape(None if spec.shape.rank is None else spec.shape.as_list(), spec.dtype.name)
