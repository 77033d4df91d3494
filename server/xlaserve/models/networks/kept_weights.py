"""Weights in the compile cache: records that are named by their contents, and that all programs of a model share."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import tensorflow as tf

from xlaserve.programs.cache.records import Record, RecordError, RecordFolder

WEIGHTS: Final = "weights"


class KeptWeights:
    """Reads and writes the weights of a model's programs in `folder`. Several threads may call it."""

    def __init__(self, folder: RecordFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[tf.Tensor, ...]] = {}

    def keep(self, weights: tuple[tf.Tensor, ...]) -> str:
        """Writes `weights` where they are not kept yet; returns the name of their record."""
        arrays = [weight.numpy() for weight in weights]
        contents = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        kinds = [(weight.dtype.name, array.shape) for weight, array in zip(weights, arrays, strict=True)]
        name = _name_of(kinds, contents)
        with self._lock:
            if name not in self._loaded:
                blobs = {str(index): content for index, content in enumerate(contents)}
                self._folder.write(name, {"arrays": kinds}, blobs)
                self._loaded[name] = weights
        return name

    def read(self, name: str) -> tuple[tf.Tensor, ...] | None:
        """Returns the weights of a record, which all programs share; None where it is missing or damaged."""
        with self._lock:
            if name not in self._loaded:
                if (weights := self._folder.read(name, partial(_parse, name))) is None:
                    return None
                self._loaded[name] = weights
            return self._loaded[name]

    def clear(self) -> None:
        """Drops the weights that were read or written; the executables have their own references."""
        self._loaded.clear()


def _parse(name: str, record: Record) -> tuple[tf.Tensor, ...]:
    kinds = record.header["arrays"]
    contents = [record.blobs[str(index)] for index in range(len(kinds))]
    if _name_of(kinds, contents) != name:
        raise RecordError("its name is not that of its contents")
    return tuple(
        tf.constant(np.frombuffer(content, tf.as_dtype(dtype).as_numpy_dtype).reshape(shape))
        for content, (dtype, shape) in zip(contents, kinds, strict=True)
    )


def _name_of(kinds: object, contents: Sequence[memoryview]) -> str:
    """Returns a name for weights that others don't share; `kinds`, of JSON's types, are their types and shapes."""
    sha256 = hashlib.sha256(json.dumps(kinds).encode())
    for content in contents:
        sha256.update(content)
    return f"{WEIGHTS}-{sha256.hexdigest()[:24]}"
