"""Functions whose input is encoded images, as functions of pixels: the decoding is cut off their graph.

The server decodes and resizes images itself, before the program. What the graph does to pixels afterwards, such as
scaling them, stays in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.engine.causes import cause
from xlaserve.models.lowering.replay import Node, replay
from xlaserve.models.networks.any_batch import named
from xlaserve.models.sources import graph_decoding
from xlaserve.models.sources.graph_decoding import Decoding
from xlaserve.models.sources.reference_variables import ReferenceVariables
from xlaserve.programs.tf.frozen_graph import assigns_variables, own_inputs

PIXELS: Final = "pixels"
SIDE: Final = 64
"""Height and width of the images of a trial, where the model does not fix them."""
TOLERANCE: Final = 1e-4
"""Largest difference of the answers to images of the model's own size, as a share of the largest answer."""
_ARITHMETIC: Final = {
    "Add": tf.add,
    "AddV2": tf.add,
    "Sub": tf.subtract,
    "Mul": tf.multiply,
    "Div": tf.divide,
    "RealDiv": tf.divide,
}


class Cut(NamedTuple):
    """A function of pixels in the place of one of encoded images."""

    function: Any
    """Takes uint8 `[n, height, width, channels]`, and gives what the other gives."""
    resize: str
    """The operation with which the graph resized images, in words; empty where it did not."""


def cut(function: Any, variables: ReferenceVariables) -> Cut:
    """Returns a concrete function of encoded images without its decoding, and with `variables` of today.

    Raises ValueError where it has none that can be cut off, or would then answer otherwise.
    """
    if assigns_variables(function) or (decoding := graph_decoding.find(function.graph)) is None:
        raise ValueError("no decoding was found that scaling and resizing to one size alone follow")
    batch = 1 if decoding.is_single else None
    spec = tf.TensorSpec((batch, *decoding.size, decoding.channels), tf.uint8, name=PIXELS)
    try:
        of_pixels = _of_pixels(function, decoding, spec, variables)
        _compare(function, of_pixels, decoding)
    except Exception as error:  # a graph may hold anything
        raise ValueError(f"without its decoding the graph does not work: {cause(error)}") from error
    return Cut(of_pixels, decoding.resize)


def _of_pixels(function: Any, decoding: Decoding, spec: tf.TensorSpec, variables: ReferenceVariables) -> Any:
    structure = function.structured_outputs
    # Loops of TensorFlow 1 have cycles, and can only be left out before the rest is built again.
    rest = function.prune(decoding.batch, structure) if hasattr(function, "prune") else None

    def of_pixels(pixels: tf.Tensor) -> Any:
        def substitute(node: Node) -> tf.Tensor | None:
            if node.operation is decoding.batch.op:
                return _prepared(pixels, decoding)
            if node.kind == "Shape" and node.operation.inputs[0].dtype == tf.string:
                return tf.shape(pixels, node.attribute("out_type"))[:1]
            return None

        if rest is not None:
            return named(structure, replay(rest, variables.read, [_prepared(pixels, decoding)], keeps_shapes=False))
        return named(structure, replay(function, substitute, [pixels], keeps_shapes=False))

    return tf.function(of_pixels, autograph=False).get_concrete_function(spec)


def _prepared(pixels: tf.Tensor, decoding: Decoding) -> tf.Tensor:
    """Returns pixels as the graph has them once they are decoded, resized and scaled."""
    for step in decoding.steps:
        if step.number is None:
            pixels = tf.cast(pixels, step.dtype)
            continue
        number = tf.constant(step.number, step.dtype)
        values = tf.cast(pixels, step.dtype)
        compute = _ARITHMETIC[step.kind]
        pixels = compute(number, values) if step.is_number_first else compute(values, number)
    return tf.cast(pixels, decoding.batch.dtype)


def _compare(function: Any, of_pixels: Any, decoding: Decoding) -> None:
    """Raises ValueError where the two answer differently to images that need not be resized."""
    (spec,) = (one for one in tf.nest.flatten(of_pixels.structured_input_signature) if isinstance(one, tf.TensorSpec))
    count, height, width, channels = spec.shape
    shape = (count or 2, height or SIDE, width or SIDE, channels or 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    got = _values(of_pixels(tf.constant(pixels)))
    wanted = _values(_on_encoded(function, pixels, is_single=decoding.is_single))
    for name, expected in wanted.items():
        if got[name].shape != expected.shape:
            raise ValueError(f"{name} is {list(got[name].shape)} in the place of {list(expected.shape)}")
        if expected.dtype.kind not in "fiub":
            continue
        apart = np.abs(got[name].astype(np.float64) - expected).max(initial=0)
        if not apart <= TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0))):
            raise ValueError(f"{name} differs by {apart:.3g}")


def _on_encoded(function: Any, pixels: NDArray[np.uint8], *, is_single: bool) -> Any:
    """Returns a function's answers to images that are encoded as it takes them."""
    (text,) = own_inputs(function)
    encoded = tf.stack([tf.io.encode_png(image) for image in pixels])
    if is_single and text.shape.rank == 0:
        encoded = encoded[0]
    try:
        return function(encoded)
    except tf.errors.InvalidArgumentError:
        return function(tf.io.encode_base64(encoded))


def _values(outputs: Any) -> Mapping[str, NDArray[Any]]:
    return {name: value.numpy() for name, value in named(outputs, outputs).items()}
