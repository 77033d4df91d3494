"""Networks from SavedModel folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.saved_model import revived_types

from xlaserve.config import Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import lowering
from xlaserve.models.networks import heads
from xlaserve.models.networks.assemble import Call, assemble, check_pixels
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.networks.network import Network

DEFAULT_SIGNATURE: Final = "serving_default"
ONLY_OUTPUT: Final = "output"
"""Name of the only output of a callable whose tensor has none."""
OPTIMIZER: Final = "optimizer"
"""Keras 2's name of the type of its optimizers in a SavedModel."""


class Optimizer(tf.Module):  # type: ignore[misc]
    """Replaces an optimizer that was saved with a model, as TensorFlow can't load it; its values are not loaded."""

    def add_slot(self, var: tf.Variable, slot_name: str, initializer: str = "zeros") -> tf.Variable:
        """Returns a variable in the place of one that is as large as `var`."""
        return tf.Variable(tf.zeros((), var.dtype), trainable=False)

    def _create_or_restore_slot_variable(self, slot_variable_position: Any, slot_name: str, variable: object) -> None:
        """Leaves the values in the file, and has TensorFlow not warn of each."""
        slot_variable_position.checkpoint.expect_partial = True


def is_saved_model(folder: Path) -> bool:
    """Returns whether `folder` holds a SavedModel."""
    return bool(tf.saved_model.contains_saved_model(str(folder)))


def saved_model(folder: Path, settings: ModelSettings) -> Network:
    """Loads a signature of a SavedModel or, where it has none, the function that it is itself.

    The function runs as it was exported: in the mode eager too, as a graph. Raises ModelFailed.
    """
    _know_optimizers()
    loaded = tf.saved_model.load(str(folder))
    if loaded.signatures or settings.signature is not None:
        call, pixels, outputs = _signature(loaded, settings.signature)
    else:
        call, pixels, outputs = _callable(loaded)
    shapes = {name: _tensor_shape(spec) for name, spec in outputs.items()}
    return network(call, _tensor_shape(pixels), shapes, settings, weights=folder.name)


def _know_optimizers() -> None:
    """Has TensorFlow load SavedModels of Keras 2 that hold an optimizer and its slots: without Keras 2 it can't."""
    if OPTIMIZER not in revived_types.registered_identifiers():
        version = revived_types.VersionedTypeRegistration(
            lambda proto: Optimizer(), version=1, min_producer_version=1, min_consumer_version=1
        )
        revived_types.register_revived_type(OPTIMIZER, lambda one: isinstance(one, Optimizer), [version])


def network(
    call: Call, pixels: TensorShape, outputs: Mapping[str, TensorShape], settings: ModelSettings, *, weights: str
) -> Network:
    """Returns the network of an exported function of one image input. Raises ModelFailed."""
    check_pixels(pixels)
    return assemble(
        call,
        heads.choose(outputs, settings),
        pixels=pixels,
        preprocessing="none" if settings.preprocess == "auto" else settings.preprocess,
        weights=weights,
        lower=lowering.for_settings(settings),
        openvino_precision=settings.precision_in(Mode.OPENVINO),
        calibration=settings.calibration,
    )


Found = tuple[Call, tf.TensorSpec, Mapping[str, tf.TensorSpec]]
"""The function, the specification of its input, and those of its outputs by name."""


def _signature(loaded: Any, wanted: str | None) -> Found:
    names = sorted(loaded.signatures)
    name = wanted or (names[0] if len(names) == 1 else DEFAULT_SIGNATURE)
    if name not in names:
        known = ", ".join(names) or "none"
        raise ModelFailed(
            f"signature: expected one of {known}, got {wanted or f'nothing named and no {DEFAULT_SIGNATURE}'}"
        )
    inputs = loaded.signatures[name].structured_input_signature[1]
    if len(inputs) != 1:
        known = ", ".join(sorted(inputs)) or "none"
        raise ModelFailed(f"source: expected a signature of one input, the image, but {name} takes {known}")
    ((pixels_name, pixels),) = inputs.items()

    def call(images: tf.Tensor) -> heads.Raw:
        # `loaded` owns the variables that the signature refers to weakly.
        answer: heads.Raw = loaded.signatures[name](**{pixels_name: images})
        return answer

    return call, pixels, loaded.signatures[name].structured_outputs


def _callable(loaded: Any) -> Found:
    """Finds a traced function of a module without signatures, for inference on one image input."""
    for function in getattr(vars(loaded).get("__call__"), "concrete_functions", ()):
        flat = tf.nest.flatten(function.structured_input_signature)
        tensors = [value for value in flat if isinstance(value, tf.TensorSpec)]
        # Other arguments were fixed when the function was traced; True can only be `training`.
        if len(tensors) != 1 or any(value is True for value in flat):
            continue

        def call(images: tf.Tensor, function: Any = function) -> heads.Raw:
            assert loaded is not None  # it owns the variables that the function refers to weakly
            return _named(function.structured_outputs, function(images))

        return call, tensors[0], _named(function.structured_outputs, function.structured_outputs)
    raise ModelFailed("source: expected a signature, or a function of one image input, got a SavedModel of neither")


def _named(structure: Any, values: Any) -> dict[str, Any]:
    """Returns outputs by name, where they have any."""
    if isinstance(structure, Mapping):
        return dict(values)
    flat = tf.nest.flatten(values)
    return (
        {ONLY_OUTPUT: flat[0]} if len(flat) == 1 else {f"{ONLY_OUTPUT}_{index}": one for index, one in enumerate(flat)}
    )


def _tensor_shape(spec: tf.TensorSpec) -> TensorShape:
    return TensorShape(None if spec.shape.rank is None else spec.shape.as_list(), spec.dtype.name)
