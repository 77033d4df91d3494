"""Networks from frozen graphs: `.pb` files of TensorFlow 1, whose variables are constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tensorflow as tf
from google.protobuf.message import DecodeError

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import functions, graph_decoding, graph_images, saved_model
from xlaserve.models.sources.graph_operations import ITERATOR, PLACEHOLDERS, WITHOUT_USE

VARIABLES: Final = frozenset({"VarHandleOp", "Variable", "VariableV2"})
FOR_INFERENCE: Final[Mapping[tuple[str, str], object]] = {
    **{(name, "bool"): False for name in ("phase_train", "is_training", "is_train", "training")},
    **{(name, "bool"): False for name in ("learning_phase", "keras_learning_phase")},
    **{(name, "float32"): 1.0 for name in ("keep_prob", "dropout_keep_prob")},
}
"""Values for inference of scalars that a graph may ask for, by the end of their names and their types."""
MOST_SHOWN: Final = 8
IMAGES_WITHOUT_CHANNELS: Final = 3
"""Axes of the images of the fewest."""


def graph_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a frozen graph, and finds its inputs and its outputs, unless the settings name them.

    Raises ModelFailed, or what TensorFlow raises.
    """
    definition = _read(file)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, name="")
    inputs = _inputs(graph, settings.input_tensor)
    outputs = _outputs(
        graph, inputs, [*(name for _, name in settings.output_names), *(name for name, _ in settings.outputs)]
    )
    constants = _constants(graph, inputs, outputs.values())
    starts = [tensor.name for tensor in inputs]
    if len(inputs) == 1 and (images := graph_images.images(definition, inputs[0], outputs.values(), settings)):
        graph_images.cut(definition, inputs[0], outputs.values(), images)
        starts = [f"{graph_images.START}:0"]

    def imported() -> None:
        values = {name: tf.constant(value) for name, value in constants.items()}
        tf.graph_util.import_graph_def(definition, input_map=values, name="")

    wrapped = tf.compat.v1.wrap_function(imported, [])
    tensors = {name: wrapped.graph.as_graph_element(tensor.name) for name, tensor in outputs.items()}
    function = wrapped.prune([*map(wrapped.graph.as_graph_element, starts)], tensors)
    return saved_model.of_function(functions.found(wrapped, function, file.name), settings, weights=file.name)


def _read(file: Path) -> Any:
    definition = tf.compat.v1.GraphDef()
    try:
        definition.ParseFromString(file.read_bytes())
    except DecodeError:
        definition.Clear()
    if definition.node:
        return definition
    if file.name == "saved_model.pb":
        raise ModelFailed(
            "source: saved_model.pb is a part of a SavedModel; name the folder that it is in, with the folder"
            f" variables: source: {file.resolve().parent.name}/"
        )
    raise ModelFailed(
        f"source: expected a frozen graph, got {file.name} of {file.stat().st_size:,} bytes, which is none; where the"
        f' model is, write one: tf.io.write_graph(graph_def, ".", "{file.name}", as_text=False)'
    )


def _inputs(graph: Any, wanted: str | tuple[str, ...] | None) -> list[Any]:
    if isinstance(wanted, str):
        return [_tensor(graph, wanted, "input_tensor")]
    if wanted is not None:
        found = [_tensor(graph, name, "input_tensor") for name in dict.fromkeys(wanted)]
        if computed := [tensor for tensor in found if tensor.op.type not in PLACEHOLDERS and len(found) > 1]:
            raise ModelFailed(
                f"input_tensor: expected several placeholders, got {_shown(computed)}, which are computed; write"
                f" input_tensor: [{', '.join(tensor.name for tensor in placeholders(graph))}]"
            )
        return found
    return [_only_input(graph)]


def placeholders(graph: Any) -> list[Any]:
    """Returns the tensors that are given to a graph."""
    return [operation.outputs[0] for operation in graph.get_operations() if operation.type in PLACEHOLDERS]


def _only_input(graph: Any) -> Any:
    given = placeholders(graph)
    images = [one for one in given if one.shape.rank is None or one.shape.rank > 1]
    images = images or graph_decoding.encoded(graph)
    if len(images) == 1:
        return images[0]
    known = images or _batches(graph) or given
    remedy = f"write input_tensor: {known[0].name}" if known else "xlaserve inspect prints the graph's tensors"
    raise ModelFailed(
        f"input_tensor: expected the name of the tensor that takes the images, one of {_shown(known)}; {remedy}"
    )


def _batches(graph: Any) -> list[Any]:
    """Returns the tensors of images that a graph without placeholders makes of its own data."""
    given = [output for one in graph.get_operations() if one.type == ITERATOR for output in one.outputs]
    made = [output for one in given for consumer in one.consumers() for output in consumer.outputs]
    return [one for one in (*given, *made) if (one.shape.rank or 0) >= IMAGES_WITHOUT_CHANNELS]


def _outputs(graph: Any, inputs: list[Any], wanted: list[str]) -> dict[str, Any]:
    """Returns the outputs by name: those that are wanted, else all that depend on the inputs and that nothing reads."""
    if wanted:
        return {name: _tensor(graph, name, "output_names") for name in wanted}
    found = {}
    for operation in _after(inputs):
        if operation.type not in WITHOUT_USE and not any(output.consumers() for output in operation.outputs):
            for output in operation.outputs:
                found[operation.name if output.value_index == 0 else output.name] = output
    if not found:
        known = ", ".join(tensor.name for tensor in placeholders(inputs[0].graph))
        raise ModelFailed(
            f"input_tensor: expected a tensor that outputs depend on, got {_shown(inputs)}; the placeholders are"
            f" {known}"
        )
    return found


def _after(inputs: list[Any]) -> list[Any]:
    """Returns the operations that depend on any of the tensors, in the graph's order."""
    found, pending = set(), [consumer for tensor in inputs for consumer in tensor.consumers()]
    while pending:
        operation = pending.pop()
        if operation not in found:
            found.add(operation)
            pending += [consumer for output in operation.outputs for consumer in output.consumers()]
    return [operation for operation in inputs[0].graph.get_operations() if operation in found]


def _constants(graph: Any, inputs: list[Any], outputs: Iterable[Any]) -> dict[str, object]:
    """Returns values for what the outputs need besides the inputs. Raises ModelFailed where one is not known."""
    starts = {tensor.op for tensor in inputs}
    needed, pending = set(), [output.op for output in outputs]
    while pending:
        operation = pending.pop()
        if operation not in needed and operation not in starts:
            needed.add(operation)
            pending += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    if variable := next((one.name for one in needed if one.type in VARIABLES), None):
        raise ModelFailed(
            f"source: expected a frozen graph, whose weights are constants, but {variable} is a variable; freeze it:"
            " tf.compat.v1.graph_util.convert_variables_to_constants(session, graph_def, [OUTPUT])"
        )
    others = [one.outputs[0] for one in graph.get_operations() if one in needed and one.type in PLACEHOLDERS]
    keys = {tensor.name: (tensor.op.name.rpartition("/")[2], tensor.dtype.name) for tensor in others}
    if left := [tensor for tensor in others if keys[tensor.name] not in FOR_INFERENCE]:
        raise ModelFailed(
            f"input_tensor: expected all inputs of the graph, but it also takes {_shown(left)}; write input_tensor:"
            f" [{', '.join(tensor.name for tensor in (*inputs, *left))}], or freeze it with constants in their place"
        )
    return {name: FOR_INFERENCE[key] for name, key in keys.items()}


def _tensor(graph: Any, name: str, field: str) -> Any:
    try:
        return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError):
        last = [operation.outputs[0] for operation in graph.get_operations() if operation.outputs][-MOST_SHOWN:]
        raise ModelFailed(
            f"{field}: expected the name of a tensor of the graph, such as {_shown(last)}, got {name}; the file's"
            " inputs and outputs are what xlaserve inspect prints of it"
        ) from None


def _shown(tensors: list[Any]) -> str:
    shown = [f"{one.name}: {one.dtype.name} {one.shape}" for one in tensors[:MOST_SHOWN]]
    return "; ".join(shown) + ("; ..." if len(tensors) > MOST_SHOWN else "") or "none"
