"""Sums of many terms."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


def total(terms: Iterable[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of `terms`, added in pairs, and these in pairs.

    XLA adds in the order that it is given. In a chain each addition waits for the one before, and what comes after the
    sum, such as an exponential, waits for all of them.
    """
    sums = list(terms)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [*(first + second for first, second in pairs), *sums[len(sums) // 2 * 2 :]]
    return sums[0]
