"""Batches two images at a time, in a loop of the program.

XLA computes each operation for all images of a batch before the next one. What lies between two operations is then too
large for the processor's caches, and is written to memory and read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_dynamic_update_slice

from xlaserve.config import Bucket
from xlaserve.programs.tf.definitions import nodes
from xlaserve.programs.tf.frozen_graph import has_xla

IMAGES: Final = 2
"""With one image at a time, operations that read many weights read them too often."""
PIXELS: Final = IMAGES * 224 * 224
"""Pixels of a part: of smaller images, a part has more."""


def are_possible(function: Any) -> bool:
    """Returns whether a concrete function of tensors can be called for a part of a batch.

    It can't where it was made for batches of one size, where it has outputs whose shapes are not known, and where
    operations of XLA's own, or functions that it is to compile, may be for one size.
    """
    shapes = [output.shape for output in function.outputs]
    has_rows = all(shape.rank and shape[0] is None and shape[1:].is_fully_defined() for shape in shapes)
    return has_rows and not has_xla(function) and not any(map(_has_one_size, nodes(function.graph.as_graph_def())))


def _has_one_size(node: Any) -> bool:
    """Returns whether an operation only takes as many rows as it says."""
    sides: Sequence[Any] = node.attr["shape"].shape.dim if node.op == "EnsureShape" else ()
    return bool(sides) and sides[0].size >= 0


def size(bucket: Bucket) -> int:
    """Returns how many images to compute at a time: all where the batch can't be divided into parts of such a size."""
    if not bucket.height:
        return bucket.batch  # a model without images
    most = max(IMAGES, PIXELS // (bucket.height * bucket.width))
    part = max(images for images in range(1, most + 1) if bucket.batch % images == 0)
    return part if 2 * part > most else bucket.batch


def divided(function: Any, bucket: Bucket) -> Any:
    """Returns a function that computes batches of a bucket as `function` does, a part after the other.

    `function` may not read variables: XLA copies those that a loop reads, in a form that StableHLO does not have.
    """
    images = size(bucket)
    if images >= bucket.batch:
        return function

    def forward(*inputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
        def compute(start: tf.Tensor, *outputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            part = [tf.slice(each, (start, *[0] * (each.shape.rank - 1)), (images, *each.shape[1:])) for each in inputs]
            placed = [
                xla_dynamic_update_slice(output, rows, [start, *[0] * (rows.shape.rank - 1)])
                for output, rows in zip(outputs, function(*part), strict=True)
            ]
            return start + images, *placed

        blank = [tf.zeros((bucket.batch, *output.shape[1:]), output.dtype) for output in function.outputs]
        _, *outputs = tf.while_loop(lambda start, *_: start < bucket.batch, compute, (0, *blank))
        return tuple(outputs)

    return forward
