"""Makes a SavedModel of a file that Keras 2 reads: the process that `keras2` starts."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras

from xlaserve.models.sources.keras2 import FAILED, NOT_IMPORTED
from xlaserve.models.sources.keras_config import REPLACED

Outputs = dict[str, tf.Tensor]


def main(file: str, folder: str, options: Mapping[str, Any]) -> None:
    """Writes the model in `file` to `folder`, with its own names of inputs and outputs. Raises what Keras 2 raises."""
    custom_objects = {name: _import(name, path) for name, path in options["custom_objects"].items()}
    safe_mode = options["safe_mode"]
    tf_keras.backend.set_learning_phase(0)  # layers that are told nothing of training infer
    if not safe_mode:
        tf_keras.config.enable_unsafe_deserialization()
    if Path(file).suffix == ".keras":
        model = tf_keras.models.load_model(file, custom_objects, compile=False, safe_mode=safe_mode)
    else:
        model = tf_keras.models.load_model(file, custom_objects, compile=False)
    model.trainable = False
    root = tf.Module()
    root.variables_of_model = model.variables
    tf.saved_model.save(root, folder, signatures={"serving_default": _function(model)})


def _import(name: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        field = f"custom_objects.{name.removeprefix(REPLACED)}"
        raise ImportError(f"{field}: {path} {NOT_IMPORTED}: {error}") from error


def _function(model: Any) -> Any:
    """Returns the model's concrete function for any batch or, where its layers were made for one, for that one."""
    inputs = list(model.inputs)
    names = list(model.input_names)

    def traced(batch: int | None) -> Any:
        specs = [
            tf.TensorSpec([batch, *tensor.shape[1:]], tensor.dtype, name=name)
            for name, tensor in zip(names, inputs, strict=True)
        ]
        return tf.function(_call(model, names), autograph=False).get_concrete_function(*specs)

    fixed = inputs[0].shape[0]
    if fixed is None:
        return traced(None)
    try:
        function = traced(None)
        is_free = all(
            output.shape.rank and output.shape[0] is None for output in tf.nest.flatten(function.structured_outputs)
        )
    except (TypeError, ValueError):
        is_free = False
    return function if is_free else traced(fixed)


def _call(model: Any, names: list[str]) -> Callable[..., Outputs]:
    def call(*tensors: tf.Tensor) -> Outputs:
        structure: Any = tensors[0] if len(tensors) == 1 else list(tensors)
        if isinstance(model.input, Mapping):
            structure = dict(zip(names, tensors, strict=True))
        outputs = model(structure, training=False)
        if isinstance(outputs, Mapping):
            return dict(outputs)
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        return dict(zip(model.output_names, values, strict=True))

    return call


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    except Exception as error:  # of any library
        sys.exit(f"{FAILED}{json.dumps(str(error) or type(error).__name__)}")
