"""Descriptions of frozen graphs of TensorFlow 1 (`.pb`)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import graph, keras
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.messages import parsed, unfit
from xlaserve.inspection.model_file.saved_model import FILE
from xlaserve.models.sources.graph_operations import ITERATOR, PLACEHOLDERS, WITHOUT_USE
from xlaserve_proto import model_files_pb2 as pb

SHOWN: Final = "a frozen graph"


def describe(path: Path, file: Path) -> Description:
    """Describes a frozen graph. Raises ModelFailed."""
    if file.name == FILE:
        raise ModelFailed(
            f"source: {FILE} is a part of a SavedModel; name the folder that it is in:"
            f" xlaserve inspect {file.parent if file.parent.name else file.resolve().parent}/"
        )
    found = parsed(pb.Graph(), file, SHOWN)
    if not found.node:
        raise unfit(file, SHOWN)
    placeholders = [node for node in found.node if node.op in PLACEHOLDERS]
    photos = [one for one in placeholders if not _is_scalar(one)]
    batches = [] if photos else _batches(found)
    images = photos or ([] if batches else placeholders)
    read = {name.lstrip("^").partition(":")[0] for node in found.node for name in node.input}
    ends = [node for node in found.node if node.name not in read and node.op not in WITHOUT_USE]
    taken = [one for one in photos if one.name in read] or (images or batches)[:1]
    starts = [f"{one.name}:0" for one in taken]
    return Description(
        path=path,
        format="frozen graph of TensorFlow 1",
        inputs=tuple(
            Tensor(one.name, graph.shape(one.attr["shape"].shape), graph.dtype(one.attr["dtype"].type))
            for one in images
        ),
        outputs=tuple(Tensor(one.name, None, "", graph.activation(found, one.name)) for one in ends),
        layers=keras.once(graph.noted(found)),
        parameters=graph.constants(found),
        size_bytes=file.stat().st_size,
        settings=(("input_tensor", starts if len(starts) > 1 else starts[0]),) if batches or len(images) > 1 else (),
    )


def _batches(found: pb.Graph) -> list[pb.Node]:
    """Returns the nodes that shape images of the data that a graph without placeholders was frozen with."""
    given = {node.name for node in found.node if node.op == ITERATOR}
    reads = [node for node in found.node if given & {name.partition(":")[0] for name in node.input}]
    return [node for node in reads if node.op == "Reshape"]


def _is_scalar(placeholder: pb.Node) -> bool:
    declared = graph.shape(placeholder.attr["shape"].shape)
    return declared is not None and len(declared) < 2 and "shape" in placeholder.attr
