"""A window's positions over padded images, as slices of them, and sums of what lies there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import tensorflow as tf

from xlaserve.models.lowering.materialize import materialized

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Positions of windows of `shape` on images of `size`; rows first, then columns."""

    size: Pair
    shape: Pair
    strides: Pair = (1, 1)
    dilations: Pair = (1, 1)
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0))
    """Pixels above and below, and to the left and the right, of the images."""

    @property
    def output(self) -> Pair:
        """Height and width of what is computed from the windows."""
        return self._along(0), self._along(1)

    @property
    def padding(self) -> list[Pair]:
        """Padding of images `[n, height, width, channels]`, pixels before and after each axis."""
        return [(0, 0), *self.pads, (0, 0)]

    def shifted(self, images: tf.Tensor, fill: float = 0.0) -> Iterator[tuple[int, int, tf.Tensor]]:
        """Yields for each position in the window its row, column, and what lies there of `images` in all windows.

        `images` are `[n, height, width, channels]`, and are padded with `fill`.
        """
        return self.shifted_over(self.padded(images, fill))

    def padded(self, images: tf.Tensor, fill: float = 0.0) -> tf.Tensor:
        """Returns `images` with `fill` around them, as far as the windows reach, computed once."""
        return materialized(tf.pad(images, self.padding, constant_values=fill))

    def shifted_over(self, padded: tf.Tensor) -> Iterator[tuple[int, int, tf.Tensor]]:
        """Yields the values of `shifted` for images that are padded already, or some channels of them."""
        high, wide = self.output
        for row, column in product(range(self.shape[0]), range(self.shape[1])):
            top, start = row * self.dilations[0], column * self.dilations[1]
            rows = slice(top, top + (high - 1) * self.strides[0] + 1, self.strides[0])
            columns = slice(start, start + (wide - 1) * self.strides[1] + 1, self.strides[1])
            yield row, column, padded[:, rows, columns]

    def _along(self, side: int) -> int:
        extent = 1 + (self.shape[side] - 1) * self.dilations[side]
        return (self.size[side] + sum(self.pads[side]) - extent) // self.strides[side] + 1


def same(size: int, extent: int, stride: int) -> Pair:
    """Returns the pixels before and after a side of `size` with which each `stride`-th pixel has a window."""
    padding = max(0, (-(-size // stride) - 1) * stride + extent - size)
    return padding // 2, padding - padding // 2


def total(terms: Iterable[Any]) -> tf.Tensor:
    """Returns the sum of `terms`, added in pairs, and these in pairs.

    XLA adds in the order that it is given. In a chain each addition waits for the one before, and what comes after the
    sum, such as an exponential, waits for all of them.
    """
    sums = list(terms)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [*(first + second for first, second in pairs), *sums[len(sums) // 2 * 2 :]]
    return sums[0]
