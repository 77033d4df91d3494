"""Graphs as TensorFlow serializes them: their nodes, and types of less than float32 that become float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
import tensorflow as tf

NARROW: Final = frozenset({tf.bfloat16, tf.float16})
_NARROW_NUMBERS: Final = frozenset(dtype.as_datatype_enum for dtype in NARROW)
_FLOAT32: Final[int] = tf.float32.as_datatype_enum


def nodes(definition: Any) -> Iterator[Any]:
    """Yields the nodes of a graph and of the functions that it calls."""
    return chain(definition.node, *(function.node_def for function in definition.library.function))


def has_narrow(function: Any) -> bool:
    """Returns whether a concrete function, or one that it calls, computes in bfloat16 or float16."""
    definition = function.graph.as_graph_def()
    return any(is_narrow(attribute) for node in nodes(definition) for attribute in node.attr.values())


def is_narrow(attribute: Any) -> bool:
    """Returns whether an attribute of a node names such a type."""
    return not _NARROW_NUMBERS.isdisjoint((attribute.type, *attribute.list.type))


def widen(attribute: Any) -> None:
    """Has an attribute of a node name float32 in the place of narrower types, and hold its numbers so."""
    match attribute.WhichOneof("value"):
        case "type":
            attribute.type = widened(attribute.type)
        case "list":
            attribute.list.type[:] = map(widened, attribute.list.type)
        case "tensor" if attribute.tensor.dtype in _NARROW_NUMBERS:
            wide = tf.make_ndarray(attribute.tensor).astype(np.float32)
            attribute.tensor.CopyFrom(tf.make_tensor_proto(wide))


def widened(number: int) -> int:
    """Returns the number of float32 for that of a narrower type, else the same."""
    return _FLOAT32 if number in _NARROW_NUMBERS else number
