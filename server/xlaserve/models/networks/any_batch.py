"""Batches of any size for models that were made for one size: a model is changed for them, and its answers compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.lowering.replay import Node, replay
from xlaserve.models.networks.heads import Raw, TensorShape
from xlaserve.programs.tf.frozen_graph import assigns_variables

Call = Callable[[tf.Tensor], Raw]

ONLY_OUTPUT: Final = "output"
"""Name of the only output of a function whose tensor has none."""
TOLERANCE: Final = 1e-4
"""Largest difference of an image's answers in batches of two sizes, as a share of the largest answer."""
SIDE: Final = 64
"""Height and width of the images of a trial, where the model does not fix them."""


def widened(function: Any, pixels: TensorShape) -> Call | None:
    """Returns a concrete function of one tensor, made for one batch size, as one that takes any; None where it can't be
    made so, or then answers otherwise.
    """
    if pixels.shape is None or function.outputs is None or assigns_variables(function):
        return None
    structure, batch = function.structured_outputs, pixels.shape[0]
    assert batch is not None

    def fixed(images: tf.Tensor) -> Raw:
        return named(structure, tf.nest.flatten(function(images)))

    def free(images: tf.Tensor) -> Raw:
        return named(structure, replay(function, partial(_reshaped, batch), [images], keeps_shapes=False))

    try:
        # A function of its own, as what is built again is so in a graph alone.
        built = tf.function(free, autograph=False).get_concrete_function(_any(pixels))
    except (TypeError, ValueError):
        return None
    return built if takes_any(fixed, built, pixels) else None


def named(structure: Any, values: Any) -> dict[str, Any]:
    """Returns the outputs of a function by their names, where its `structure` has any, else by numbers."""
    flat = tf.nest.flatten(values)
    if isinstance(structure, Mapping):
        return dict(tf.nest.pack_sequence_as(structure, flat))
    return (
        {ONLY_OUTPUT: flat[0]} if len(flat) == 1 else {f"{ONLY_OUTPUT}_{index}": one for index, one in enumerate(flat)}
    )


def takes_any(fixed: Call, free: Call, pixels: TensorShape) -> bool:
    """Returns whether `free` takes batches of any size, and answers as `fixed` does in batches of its own one."""
    assert pixels.shape is not None
    batch, *image = pixels.shape
    assert batch is not None
    try:
        function = tf.function(free, autograph=False).get_concrete_function(_any(pixels))
        outputs = tf.nest.flatten(function.structured_outputs)
        if any(output.shape.rank == 0 or (output.shape.rank and output.shape[0] is not None) for output in outputs):
            return False
        sides = [SIDE if side is None else side for side in image]
        noise = np.random.default_rng(0).uniform(0, 255 if "int" in pixels.dtype else 1, (batch + 1, *sides))
        images = tf.cast(noise, pixels.dtype)
        expected = [*_rows(fixed(images[:batch])), *_rows(fixed(images[1:]))[-1:]]
        return all(
            _are_alike(one, other)
            for size in (batch + 1, 1)
            for one, other in zip(_rows(function(images[:size])), expected[:size], strict=True)
        )
    except (tf.errors.OpError, TypeError, ValueError, KeyError):
        return False


def _any(pixels: TensorShape) -> tf.TensorSpec:
    assert pixels.shape is not None
    return tf.TensorSpec((None, *pixels.shape[1:]), pixels.dtype)


def _reshaped(batch: int, node: Node) -> tf.Tensor | None:
    """Replaces a Reshape to a constant shape that begins with `batch` by one to any number of rows."""
    if node.kind != "Reshape" or (shape := node.inputs[1].known) is None:
        return None
    images = node.inputs[0].tensor
    first, *others = shape.numpy().tolist() or [None]
    if first != batch or images.shape.rank in (None, 0) or images.shape[0] == batch:
        return None
    if images.shape.is_fully_defined() and -1 not in others and images.shape.num_elements() == math.prod(shape.numpy()):
        return None  # it is not of images
    if -1 in others:
        sides = images.shape[1:]
        if not sides.is_fully_defined():
            return None
        missing = math.prod(sides) // math.prod(side for side in others if side != -1)
        others = [missing if side == -1 else side for side in others]
    return tf.reshape(images, [-1, *others])


def _rows(outputs: Mapping[str, tf.Tensor]) -> list[list[Any]]:
    """Returns each image's outputs. Raises ValueError where an output has not as many rows as the others."""
    values = [output.numpy() for _, output in sorted(outputs.items())]
    return [list(row) for row in zip(*values, strict=True)]


def _are_alike(one: list[Any], other: list[Any]) -> bool:
    for got, wanted in zip(one, other, strict=True):
        if got.shape != wanted.shape:
            return False
        is_number = wanted.dtype.kind in "fiub"
        got, wanted = (np.asarray(each, np.float64) if is_number else each for each in (got, wanted))  # noqa: PLW2901
        limit = TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0.0))) if is_number else 0.0
        is_alike = np.allclose(got, wanted, rtol=0, atol=limit, equal_nan=True) if is_number else (got == wanted).all()
        if not is_alike:
            return False
    return True
