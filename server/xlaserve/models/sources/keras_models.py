"""Networks from Keras models, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from xlaserve.config import Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import lowering
from xlaserve.models.networks import any_batch, heads, precision, reading
from xlaserve.models.networks.assemble import assemble, probe
from xlaserve.models.networks.heads import Head, TensorShape
from xlaserve.models.networks.image_tensor import Call
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network, Size
from xlaserve.models.networks.network_inputs import NetworkInputs, network_inputs
from xlaserve.models.networks.preprocess import Preprocess


def network(
    model: Any,
    settings: ModelSettings,
    *,
    preprocessing: Preprocess,
    weights: str,
    default_size: Size = (None, None),
    multiple: int = 1,
) -> Network:
    """Returns the network of a Keras model; XLA runs it lowered where the settings and the device say so.

    Raises ModelFailed where the model's inputs or outputs are not those of a task.
    """
    declared = _inputs(model)

    def infer(*values: tf.Tensor) -> heads.Raw:
        raw: heads.Raw = precision.widen(named_outputs(model, call(model, *values)))
        return raw

    inputs = network_inputs(declared, settings)
    if inputs.batch is not None and any_batch.takes_any(infer, infer, [*declared.values()]):
        declared = {name: each.of_any_batch for name, each in declared.items()}
        inputs = network_inputs(declared, settings)
    infer_last = inputs.last(infer)
    outputs = _outputs(model, declared)
    head = reading.choose(
        outputs, settings, lambda: probe(infer_last, inputs, preprocessing, settings), inputs.gives_first
    )
    built = assembled(model, infer_last, head, settings, inputs=inputs, preprocessing=preprocessing)
    return replace(built, weights=weights, default_size=default_size, multiple=multiple)


def assembled(
    model: Any,
    infer: Call,
    head: Head,
    settings: ModelSettings,
    *,
    inputs: NetworkInputs,
    preprocessing: Preprocess,
) -> Network:
    """Returns the network of a Keras model, in the precision and with the lowerings of the settings.

    `infer` calls the model with its inputs, the channels of images last, and returns its outputs as the head takes
    them.
    """
    precision.narrow(model, settings.precision)
    lower = lowering.for_settings(settings)
    built = assemble(
        infer,
        head,
        inputs=inputs,
        preprocessing=preprocessing,
        lower=lower,
        openvino_precision=settings.precision_in(Mode.OPENVINO),
        calibration=settings.calibration,
    )
    return precision.with_reference(built, model, settings.precision)


def call(model: Any, *inputs: tf.Tensor, training: bool = False) -> Any:
    """Calls a model with its inputs, in its own structure of them, such as a mapping."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        (pixels,) = inputs
        return model(pixels, training=training)
    return model(keras.tree.pack_sequence_as(structure, inputs), training=training)


def named_outputs(model: Any, outputs: Any) -> Mapping[str, Any]:
    """Returns the outputs of a model, tensors or symbols of them, by their names."""
    if isinstance(outputs, Mapping):
        return outputs
    values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    names = getattr(model, "output_names", None) or [f"output_{index}" for index in range(len(values))]
    return dict(zip(names, values, strict=True))


def features(classifier: Any) -> Any:
    """Returns the model that ends before a classifier's own head: where its feature maps are averaged or, without such
    a place, before its last layer, which averages them if it takes maps. Its output is `[n, dimensions]`."""
    averages = [layer for layer in classifier.layers if isinstance(layer, keras.layers.GlobalAveragePooling2D)]
    values = averages[-1].output if averages else classifier.layers[-1].input
    if not averages and len(values.shape) == 4:
        values = keras.layers.GlobalAveragePooling2D()(values)
    return keras.Model(classifier.input, keras.layers.Flatten(name="embedding")(values))


def _inputs(model: Any) -> dict[str, TensorShape]:
    """Returns the inputs of a model, in the order of its structure of them, by their names. Raises ModelFailed."""
    if inputs := list(getattr(model, "inputs", None) or ()):
        structure = getattr(model, "_inputs_struct", None)
        names = [each.name for each in inputs]
        if isinstance(structure, Mapping) and len(structure) == len(inputs):
            names = keras.tree.flatten({name: name for name in structure})
        return {name: TensorShape(each.shape, each.dtype) for name, each in zip(names, inputs, strict=True)}
    # A model with a `call` of its own knows the shape that it was built with.
    shape = (model.get_build_config() or {}).get("input_shape")
    if shape is None:
        raise ModelFailed(
            "source: expected a model that was built, got one that has seen no input; begin it with"
            " keras.Input((height, width, 3)), or call it on images once, before model.save(...)"
        )
    if not isinstance(shape, (list, tuple)) or not all(side is None or isinstance(side, int) for side in shape):
        raise ModelFailed(
            f"source: expected a model of one input [n, height, width, channels], got {shape}; where the"
            ' model is, export it: model.export("folder")'
        )
    return {"input": TensorShape((None, *shape[1:]), "float32")}


def _outputs(model: Any, inputs: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
    if isinstance(model, keras.Sequential) or not getattr(model, "inputs", None):
        # Called, not asked: what a Sequential says of its outputs are tensors alone, without the names that they have
        # where its last layer gives a mapping.
        symbols = call(model, *(keras.Input(batch_shape=one.shape, dtype=one.dtype) for one in inputs.values()))
    else:
        symbols = model.output
    return {name: TensorShape(symbol.shape, symbol.dtype) for name, symbol in named_outputs(model, symbols).items()}
