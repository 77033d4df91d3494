"""Batches of any size for models that were made for one size: a model is changed for them, and its answers compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.models.lowering.replay import Node, replay
from xlaserve.models.networks.heads import Raw, TensorShape
from xlaserve.programs.tf.frozen_graph import assigns_variables

Call = Callable[..., Raw]
"""Maps the inputs of a network, in its own order, to its outputs."""

ONLY_OUTPUT: Final = "output"
"""Name of the only output of a function whose tensor has none."""
TOLERANCE: Final = 1e-4
"""Largest difference of an image's answers in batches of two sizes, as a share of the largest answer."""
SIDE: Final = 64
"""Height and width of the images of a trial, where the model does not fix them."""


def widened(function: Any, fixed: Call, inputs: Sequence[TensorShape]) -> Call | None:
    """Returns a concrete function, made for one batch size, as one that takes any; None where it was not made for one,
    can't be made so, or then answers otherwise. `fixed` calls it with its inputs.
    """
    if (batch := only_batch(inputs)) is None or function.outputs is None or assigns_variables(function):
        return None
    structure = function.structured_outputs

    def free(*values: tf.Tensor) -> Raw:
        return named(structure, replay(function, partial(_reshaped, batch), values, keeps_shapes=False))

    try:
        # A function of its own, as what is built again is so in a graph alone.
        built = tf.function(free, autograph=False).get_concrete_function(*map(_any, inputs))
    except (TypeError, ValueError):
        return None
    return built if takes_any(fixed, built, inputs) else None


def only_batch(inputs: Sequence[TensorShape]) -> int | None:
    """Returns the batch size that inputs are made for; None where they take any, or differ in it."""
    if not all(each.shape for each in inputs):
        return None
    batches = {each.shape[0] for each in inputs if each.shape} - {None}
    return next(iter(batches)) if len(batches) == 1 else None


def named(structure: Any, values: Any) -> dict[str, Any]:
    """Returns the outputs of a function by their names, where its `structure` has any, else by numbers."""
    flat = tf.nest.flatten(values)
    if isinstance(structure, Mapping):
        return dict(tf.nest.pack_sequence_as(structure, flat))
    return (
        {ONLY_OUTPUT: flat[0]} if len(flat) == 1 else {f"{ONLY_OUTPUT}_{index}": one for index, one in enumerate(flat)}
    )


def takes_any(fixed: Call, free: Call, inputs: Sequence[TensorShape]) -> bool:
    """Returns whether `free` takes batches of any size, and answers as `fixed` does in batches of the only one that the
    inputs are made for."""
    if (batch := only_batch(inputs)) is None:
        return False
    try:
        function = tf.function(free, autograph=False).get_concrete_function(*map(_any, inputs))
        outputs = tf.nest.flatten(function.structured_outputs)
        if any(output.shape.rank == 0 or (output.shape.rank and output.shape[0] is not None) for output in outputs):
            return False
        values = [_noise(each, batch + 1, seed) for seed, each in enumerate(inputs)]

        def rows(call: Call, chosen: slice) -> list[list[Any]]:
            return _rows(call(*(each[chosen] for each in values)))

        expected = [*rows(fixed, slice(batch)), *rows(fixed, slice(1, None))[-1:]]
        return all(
            _are_alike(one, other)
            for size in (batch + 1, 1)
            for one, other in zip(rows(function, slice(size)), expected[:size], strict=True)
        )
    except (tf.errors.OpError, TypeError, ValueError, KeyError):
        return False


def _noise(declared: TensorShape, rows: int, seed: int) -> tf.Tensor:
    """Returns random values of an input: pixels where whole numbers may be such, else numbers from 0 to 1."""
    assert declared.shape is not None
    sides = [SIDE if side is None else side for side in declared.shape[1:]]
    highest = 255 if "int" in declared.dtype and len(sides) > 1 else 1
    return tf.cast(np.random.default_rng(seed).uniform(0, highest, (rows, *sides)), declared.dtype)


def _any(declared: TensorShape) -> tf.TensorSpec:
    assert declared.shape is not None
    return tf.TensorSpec((None, *declared.shape[1:]), declared.dtype)


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
