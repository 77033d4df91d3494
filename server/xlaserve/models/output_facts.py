"""Names and sizes by which the task of outputs is told, of models that are loaded and of files that are described."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from xlaserve.config import OutputRange, OutputRole

OUTPUT_NAMES: Final[Mapping[OutputRole, tuple[str, ...]]] = {
    "boxes": ("boxes", "detection_boxes"),
    "scores": ("scores", "detection_scores"),
    "classes": ("classes", "detection_classes"),
    "count": ("count", "num_detections"),
}
"""Names that models give each output; the longer ones are those of TensorFlow's Object Detection API."""
IMAGE_CHANNELS: Final = range(2, 5)
"""Numbers of channels that images have, or pairs of colours: as many classes are told by other facts alone."""
MOST_CLASSES: Final = 256
"""Channels of a map beyond which they are taken for features."""
TO_LEVELS: Final[Mapping[OutputRange, tuple[float, float]]] = {
    "0..1": (255.0, 0.0),
    "-1..1": (127.5, 127.5),
    "0..255": (1.0, 0.0),
}
"""A factor for the values of images that models give, and an offset that is added after it, for levels to 255."""

Shape = Sequence[int | None] | None
"""The sides of a tensor; None for a side that is open, or for all where not even their number is known."""


def lacks_images(output: Shape, inputs: Collection[Shape]) -> bool:
    """Returns whether an output has no axis for images, as its model was made for one and left that axis out."""
    is_of_one = bool(inputs) and all(shape and shape[0] == 1 for shape in inputs)
    return is_of_one and output is not None and [*output[:1]] not in ([None], [1])
