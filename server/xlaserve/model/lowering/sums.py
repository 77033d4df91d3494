"""Sums of many terms."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


def total(terms: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of `terms`, added in pairs, and these in pairs.

    XLA adds in the order that it is given. One after the other, each addition waits for the one before, and a processor
    for all of them before it has an exponential to do, for example.
    """
    sums = list(terms)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [*(first + second for first, second in pairs), *sums[len(sums) // 2 * 2 :]]
    return sums[0]
