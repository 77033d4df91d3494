"""Functions from inputs to outputs, and the form of them that XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import tensorflow as tf

from xlaserve.config import Bucket

Forward = Callable[..., tuple[tf.Tensor, ...]]
"""Tensors, one for each input of a model, to its outputs; the first dimension of all is the batch."""


class Lowered(NamedTuple):
    """A function in the form that XLA compiles, with its lowerings."""

    forward: Forward
    text: str
    """The lowerings and how often each was applied: `depthwise 17, stem 1`."""
    scopes: Mapping[str, str] = MappingProxyType({})
    """The lowering that made the operations of each scope, by the beginning of their names."""
    divided: Callable[[Forward, Bucket], Forward] = lambda forward, bucket: forward
    """Returns a function that computes batches of a bucket as `forward` does, in parts where that is faster."""
    failed: str | None = None
    """Why nothing is replaced, where programs with lowerings have failed."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings for users of a program that is compiled of it."""
        return () if self.failed is None else (self.failed,)

    def in_parts(self, bucket: Bucket) -> Forward:
        """Returns the function that runs batches of a bucket."""
        return self.divided(self.forward, bucket)

    def blamed(self, error: Exception) -> str:
        """Returns the lowering whose operations `error` names, or all."""
        named = [scope for scope in self.scopes if scope in str(error)]
        if named:
            return self.scopes[max(named, key=len)]
        return self.text or "batches in parts"


Lower = Callable[[Forward], Lowered]
"""Returns a concrete function with its lowerings, which computes the same."""
