"""Descriptions of SavedModel folders."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from xlaserve.config import ModelSettings, versions
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import WITHOUT_FUNCTION
from xlaserve.inspection.model_file import graph, keras, keras_layers
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.messages import parsed, unfit
from xlaserve.models.sources import file_content
from xlaserve.models.sources.graph_operations import DECODERS
from xlaserve_proto import model_files_pb2 as pb
from xlaserve_proto import tensorflow_messages_pb2 as tensorflow

FILE: Final = "saved_model.pb"
METADATA: Final = "keras_metadata.pb"
DEFAULT: Final = "serving_default"
SERVING: Final = "serve"
INITIALIZER: Final = "__saved_model_init_op"
"""A signature that is none of the model's."""
CALL: Final = "__call__"
"""A model's own function."""
ONLY_OUTPUT: Final = "output"
SIGNATURES: Final = "signatures"
"""The name of the object that has a model's signatures as functions."""
SHOWN: Final = "the graph of a SavedModel"
_KERAS: Final = re.compile(r"_tf_keras_(?!metric)")
"""Beginning of the identifiers of Keras 2's layers and models."""


def version(folder: Path) -> Path:
    """Returns the model that a folder has for serving: itself, its only model, or that of its latest version.

    Raises ModelFailed.
    """
    try:
        (settings,) = versions.expanded([ModelSettings(name="model", source=str(folder))])
    except ValueError as error:
        raise ModelFailed(str(error)) from error
    return Path(settings.source)


def describe(path: Path, folder: Path) -> Description:
    """Describes a SavedModel. Raises ModelFailed."""
    meta = _serving(folder)
    if any(one.HasField("variable") for one in meta.object_graph_def.nodes) and not file_content.has_variables(folder):
        raise file_content.without_variables(folder)
    functions = {name: one for name, one in meta.signature_def.items() if name != INITIALIZER}
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    model, layers = _keras(meta.object_graph_def, folder)
    network = keras.network(model) if model is not None else None
    name, inputs, outputs = _signature(meta, functions) if functions else _function(meta)
    if network is not None and len(network.outputs) == len(outputs) == 1 and not outputs[0].activation:
        (output,) = outputs
        outputs = (Tensor(output.name, output.shape, output.dtype, network.outputs[0].activation),)
    keras_version = str((model or {}).get("keras_version", ""))
    written = [f"TensorFlow {meta.meta_info_def.tensorflow_version}", f"Keras {keras_version}" if keras_version else ""]
    return Description(
        path=path,
        format="SavedModel" if folder == path else f"SavedModel {folder.relative_to(path)}/ of a folder",
        written_by=", ".join(filter(None, written)),
        inputs=inputs,
        outputs=outputs,
        layers=keras.once(
            [*(keras_layers.title(one) for one in layers if keras_layers.is_noted(one)), *graph.noted(meta.graph_def)]
        ),
        scaling=keras.once(keras_layers.title(one) for one in layers if one["class_name"] in keras_layers.SCALING),
        family=network.family if network is not None else "",
        parameters=_parameters(meta, name),
        size_bytes=size,
        refusal="" if inputs or functions else f"source: {WITHOUT_FUNCTION}",
        settings=_settings(
            name, signatures=functions.keys(), functions=[one for one, _ in _functions(meta.object_graph_def)]
        ),
        notes=(f"signatures: {', '.join(sorted(functions))}",) if len(functions) > 1 else (),
    )


def _serving(folder: Path) -> pb.MetaGraph:
    if not (folder / FILE).is_file():
        inside = ", ".join(sorted(one.name for one in folder.iterdir())[:4]) or "nothing"
        raise ModelFailed(
            f"source: expected a SavedModel, which has {FILE}, numbered folders of such, or one model, got the folder"
            f' {folder.name} of {inside}; where the model is, write one: model.export("{folder.name}")'
        )
    graphs = parsed(pb.SavedModel(), folder / FILE, SHOWN).meta_graphs
    if not graphs:
        raise unfit(folder / FILE, SHOWN)
    serving = [one for one in graphs if SERVING in one.meta_info_def.tags] or [*graphs]
    return min(serving, key=lambda one: len(one.meta_info_def.tags))


def _signature(
    meta: pb.MetaGraph, signatures: dict[str, tensorflow.SignatureDef]
) -> tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]:
    name = DEFAULT if DEFAULT in signatures else min(signatures)
    if _takes_text(signatures[name]) and DECODERS.isdisjoint(graph.noted(meta.graph_def)):
        name = next((one for one in sorted(signatures) if not _takes_text(signatures[one])), name)
    chosen = signatures[name]
    return (
        name,
        tuple(_tensor(key, one) for key, one in sorted(chosen.inputs.items())),
        tuple(
            _tensor(key, one, graph.activation(meta.graph_def, one.name)) for key, one in sorted(chosen.outputs.items())
        ),
    )


def _takes_text(signature: tensorflow.SignatureDef) -> bool:
    return any(graph.dtype(one.dtype) == "string" for one in signature.inputs.values())


def _tensor(name: str, info: tensorflow.TensorInfo, activation: str = "") -> Tensor:
    return Tensor(name, graph.shape(info.tensor_shape), graph.dtype(info.dtype), activation)


def _settings(name: str, *, signatures: Collection[str], functions: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Returns the setting that names a signature or function, where the server does not choose it by itself."""
    if signatures:
        return () if name == DEFAULT or len(signatures) == 1 else (("signature", name),)
    return () if name == CALL or len(functions) < 2 else (("function", name),)


def _function(meta: pb.MetaGraph) -> tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the first function of one input, its inputs and outputs; the model's own comes first."""
    found = list(_functions(meta.object_graph_def))
    for name, function in found:
        inputs = [one for _, one in _specs(function.canonicalized_input_signature, "")]
        if len(inputs) == 1:
            given = _specs(function.output_signature, "")
            outputs = [Tensor(key or ONLY_OUTPUT, one.shape, one.dtype) for key, one in given]
            return name, tuple(inputs), tuple(outputs)
    return "", (), ()


def _functions(objects: pb.ObjectGraph, owner: int = 0) -> Iterator[tuple[str, pb.ConcreteFunction]]:
    """Yields the functions of an object, the model by default; the one that it is itself, or that calls it, first."""
    if not objects.nodes:
        return
    root = objects.nodes[owner]
    if bare := root.bare_concrete_function.concrete_function_name:
        yield CALL, objects.concrete_functions[bare]
    for child in sorted(root.children, key=lambda one: (one.local_name != CALL, one.local_name)):
        one = objects.nodes[child.node_id]
        names = [*one.function.concrete_functions[:1], one.bare_concrete_function.concrete_function_name]
        if used := next(filter(None, names), None):
            yield child.local_name, objects.concrete_functions[used]


def _specs(structure: pb.Structure, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a structure, with the keys and numbers that lead to each."""
    if structure.HasField("tensor_spec_value"):
        spec = structure.tensor_spec_value
        yield name, Tensor(spec.name or name, graph.shape(spec.shape), graph.dtype(spec.dtype))
    for items in (structure.list_value.values, structure.tuple_value.values):
        for index, item in enumerate(items):
            yield from _specs(item, f"{name or ONLY_OUTPUT}_{index}")
    for key, item in sorted(structure.dict_value.fields.items()):
        yield from _specs(item, key)


def _keras(objects: pb.ObjectGraph, folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Returns Keras 2's description of a model, where it has one, and the layers in it."""
    texts = [(one.user_object.identifier, one.user_object.metadata) for one in objects.nodes]
    if (folder / METADATA).is_file():
        nodes = parsed(pb.KerasMetadata(), folder / METADATA, "the metadata of Keras 2").nodes
        texts = [(one.identifier, one.metadata) for one in sorted(nodes, key=lambda one: one.node_id)]
    found = [_json(text) for identifier, text in texts if _KERAS.match(identifier) and text]
    described = [keras_layers.plain(one) for one in found if isinstance(one.get("class_name"), str)]
    if not described:
        return None, []
    model, *layers = described
    return model, layers


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _parameters(meta: pb.MetaGraph, name: str) -> int | None:
    """Returns how many numbers the variables of a signature or function have; of one without variables, the constants.

    None for TensorFlow 1.
    """
    objects = meta.object_graph_def
    if not objects.nodes:
        return None
    holder = next((one.node_id for one in objects.nodes[0].children if one.local_name == SIGNATURES), 0)
    function = dict(_functions(objects, holder if name in meta.signature_def else 0)).get(name)
    bound = [objects.nodes[index] for index in set(function.bound_inputs)] if function is not None else []
    sizes = (math.prod(dim.size for dim in one.variable.shape.dim) for one in bound if one.HasField("variable"))
    return sum(sizes) or graph.constants(meta.graph_def)
