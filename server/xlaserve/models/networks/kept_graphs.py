"""Records of the compile cache for modes that have one graph for all buckets of a size: the graph, with its weights.

The executables that such a mode makes of the graph, one for each bucket, are made again at each start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import tensorflow as tf

from xlaserve.config import Bucket, Mode, Precision
from xlaserve.engine.program import Executable
from xlaserve.programs.cache.records import Record
from xlaserve.programs.openvino.openvino_program import ConvertedGraph, Shapes, UntranslatableGraphError
from xlaserve.programs.tf.frozen_graph import FrozenFunction, FrozenGraph
from xlaserve.programs.tf.openvino_graph import check_openvino, in_openvino
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

Graph = TypeVar("Graph")
Prepare = Callable[[Shapes], Executable]
"""Makes the executable for inputs of these shapes, whose first run may compile."""


class Contents(NamedTuple):
    """The contents of a record to write: a header of JSON types, and bytes by name."""

    header: Mapping[str, object]
    blobs: Mapping[str, bytes]


class GraphKind(NamedTuple, Generic[Graph]):
    """Functions that make, write, read and start the graphs of a mode."""

    check: Callable[[], object]
    """Raises ModelFailed where this installation or device lacks the mode."""
    make: Callable[[TensorFlowProgram, Bucket], Graph]
    """Makes the graph for images of the size of a bucket. Raises UnfreezableError where it can't be kept."""
    write: Callable[[Graph], Contents]
    read: Callable[[Record], Graph]
    """Returns the graph that was written. Raises any exception where the record holds something else."""
    start: Callable[[Graph, Precision], Prepare]
    """Returns the maker of executables. Raises ModelFailed where OpenVINO has no translation of the model."""


def _write_frozen(frozen: FrozenFunction) -> Contents:
    header = {"inputs": frozen.inputs, "outputs": frozen.outputs}
    return Contents(header, {"graph": frozen.definition.SerializeToString()})


def _read_frozen(record: Record) -> FrozenFunction:
    definition = tf.compat.v1.GraphDef.FromString(bytes(record.blobs["graph"]))
    return FrozenFunction(definition, tuple(record.header["inputs"]), tuple(record.header["outputs"]))


def _start_frozen(frozen: FrozenFunction, _: Precision) -> Prepare:
    graph = FrozenGraph(frozen)
    return lambda shapes: graph


Conversion = ConvertedGraph | UntranslatableGraphError
"""A converted graph, or the failure to convert one, which is kept as well: it takes as long to find out."""


def _convert(program: TensorFlowProgram, bucket: Bucket) -> Conversion:
    try:
        return program.converted(bucket)
    except UntranslatableGraphError as error:
        return error


def _write_conversion(conversion: Conversion) -> Contents:
    if isinstance(conversion, UntranslatableGraphError):
        return Contents({"unknown": conversion.operations}, {})
    operations, weights = conversion.to_bytes()
    return Contents({"is_int8": conversion.is_int8}, {"operations": operations, "weights": weights})


def _read_conversion(record: Record) -> Conversion:
    if "unknown" in record.header:
        return UntranslatableGraphError(record.header["unknown"])
    operations, weights = (record.blobs[name] for name in ("operations", "weights"))
    return ConvertedGraph.from_bytes(operations, weights, is_int8=record.header["is_int8"])


def _start_conversion(conversion: Conversion, precision: Precision) -> Prepare:
    if isinstance(conversion, UntranslatableGraphError):
        raise conversion
    return partial(in_openvino, conversion, precision)


KINDS: Final[Mapping[Mode, GraphKind[Any]]] = {
    Mode.GRAPH: GraphKind(lambda: None, TensorFlowProgram.frozen, _write_frozen, _read_frozen, _start_frozen),
    Mode.OPENVINO: GraphKind(check_openvino, _convert, _write_conversion, _read_conversion, _start_conversion),
}
