"""Narrower types for what a Keras model computes.

Mixed and not pure: the variables stay float32, which costs memory and no time, since programs hold or fold what they
cast once, while batch normalization's statistics keep their digits. What scales pixels and what gives the outputs
computes in float32 as well, as Keras advises for a softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from xlaserve.config import Precision
from xlaserve.engine.program import Outputs
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network

_SCALES_PIXELS = (keras.layers.Rescaling, keras.layers.Normalization)


def narrow(model: Any, precision: Precision) -> None:
    """Makes the Keras `model` compute in `precision` from now on, regardless of how it was built or saved."""
    if precision is Precision.FLOAT32:
        return
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    last = {id(tensor._keras_history.operation) for tensor in outputs}
    for layer in model._flatten_layers():
        if not isinstance(layer, _SCALES_PIXELS) and id(layer) not in last:
            layer.dtype_policy = f"mixed_{precision}"


def with_reference(network: Network, model: Any, precision: Precision) -> Network:
    """Returns the network of the Keras `model` that `narrow` was called for, with a reference in float32.

    That is the same model, which computes in float32 meanwhile: no second set of weights, but nobody else may call it.
    """
    run = network.reference
    if precision is Precision.FLOAT32 or run is None:
        return network

    def reference(*rows: NDArray[Any]) -> Outputs:
        layers = list(model._flatten_layers())
        policies = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer.dtype_policy = "float32"
            return run(*rows)
        finally:
            for layer, policy in zip(layers, policies, strict=True):
                layer.dtype_policy = policy

    return replace(network, reference=reference)


def widen(outputs: Any) -> Any:
    """Returns outputs with narrow floats as float32: boxes and scores are computed with nothing less."""
    return keras.tree.map_structure(
        lambda output: keras.ops.cast(output, "float32") if "float16" in str(output.dtype) else output, outputs
    )
