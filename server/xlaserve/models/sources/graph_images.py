"""Placeholders for the images of frozen graphs that compute these, or that have no shape for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import tensorflow as tf

from xlaserve.config import Layout, ModelSettings
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import DTYPES
from xlaserve.models.sources.graph_operations import PLACEHOLDERS

START: Final = "xlaserve_pixels"
"""The name of the placeholder."""
_ROWS: Final = f"{START}_rows"
_CHANNELS: Final = (3, 1)
"""Numbers of channels that are tried where the settings have no colour."""


class Images(NamedTuple):
    """The placeholder of a graph's images."""

    shape: Any
    is_flat: bool = False
    """Whether the graph takes each image as a row of numbers."""

    def placed(self, dtype: tf.DType) -> Any:
        """Returns what a graph takes for a new placeholder in the current graph."""
        pixels = tf.compat.v1.placeholder(dtype, self.shape, name=START)
        return tf.reshape(pixels, (-1, pixels.shape[1:].num_elements()), name=_ROWS) if self.is_flat else pixels


def images(definition: Any, pixels: Any, outputs: Iterable[Any], settings: ModelSettings) -> Images | None:
    """Returns the placeholder to put in the place of the input `pixels` of a graph; None where it is one already.

    An input of an unknown number of axes gets the size and colour of the settings, flattened if the graph takes it only
    so. Raises ModelFailed where the settings have no size, or one that the graph does not take.
    """
    if pixels.shape.rank is not None or pixels.dtype.name not in DTYPES:
        return None if pixels.op.type in PLACEHOLDERS else Images(pixels.shape)
    if (size := settings.only_size) is None:
        raise ModelFailed(
            f"input_size: expected height and width of the images, as the graph has no shape for {pixels.name}; write"
            " input_size: [224, 224], with those of the images that it was trained on, flattened or not"
        )
    color = settings.color
    for channels in _CHANNELS if color is None else (color.channels,):
        sides = (channels, *size) if settings.layout is Layout.CHANNELS_FIRST else (*size, channels)
        for is_flat in (False, True):
            why = _misfit(definition, pixels, outputs, Images((1, *sides), is_flat))
            if why is None:
                return Images((None, *sides), is_flat)
    tried = color or "rgb or grey"
    raise ModelFailed(
        f"input_size: expected the size of the images that {pixels.name} of the graph takes, got {size[0]}x{size[1]} in"
        f" {tried}: {why}; write the height and width that it was trained on, and color"
    )


def cut(definition: Any, pixels: Any, outputs: Iterable[Any], images: Images) -> None:
    """Puts a placeholder of `images` in the place of a tensor, and leaves out what only that needs."""
    with tf.Graph().as_default() as graph:
        start = images.placed(pixels.dtype).op.name
    name = pixels.op.name if pixels.value_index == 0 else pixels.name
    for node in definition.node:
        node.input[:] = [start if one.removesuffix(":0") == name else one for one in node.input]
    definition.MergeFrom(graph.as_graph_def())
    nodes = {node.name: node for node in definition.node}
    needed, pending = set(), [start, *(output.op.name for output in outputs)]
    while pending:
        if (one := pending.pop()) not in needed:
            needed.add(one)
            pending += [source.removeprefix("^").partition(":")[0] for source in nodes[one].input]
    kept = [node for node in definition.node if node.name in needed]
    del definition.node[:]
    definition.node.extend(kept)


def _misfit(definition: Any, pixels: Any, outputs: Iterable[Any], images: Images) -> str | None:
    """Returns why a graph does not take a batch of one image, as far as its shapes tell; None where it does."""
    with tf.Graph().as_default() as graph:
        try:
            tf.graph_util.import_graph_def(definition, input_map={pixels.name: images.placed(pixels.dtype)}, name="")
        except ValueError as error:
            return cause(error).partition(" for '{{node")[0]  # which follows at length
        shapes = {output.name: graph.get_tensor_by_name(output.name).shape for output in outputs}
    wrong = [name for name, shape in shapes.items() if shape.rank and shape[0] not in (None, 1)]
    return f"its output {wrong[0]} has {shapes[wrong[0]][0]} rows for one image" if wrong else None
