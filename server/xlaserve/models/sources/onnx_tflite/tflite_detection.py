"""Detectors that end with TensorFlow Lite's own decoding and suppression, which only its runtime computes.

The operation is cut off the file. What it does, from the options in the file, is computed with the server's own
suppression: one box for each anchor, with the class of its highest score.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf
from flatbuffers import flexbuffers
from numpy.typing import NDArray

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks import detection_head
from xlaserve.models.networks.heads import Head, Raw, TensorShape
from xlaserve.models.sources import file_content
from xlaserve.models.sources.functions import Found
from xlaserve.models.sources.onnx_tflite import tflite_tables
from xlaserve.models.sources.onnx_tflite.tflite_tables import DETECTION, Table

BOXES, SCORES = "boxes", "scores"
WITHOUT: Final = "where the model is, convert it without that operation, and set box_decoding for its outputs"
"""The next step for a file whose end is not understood."""
DTYPES: Final = {0: "<f4", 1: "<f2", 3: "u1", 9: "i1"}
"""Types of anchors, by TFLite's numbers."""


class Suppression(NamedTuple):
    """The end of a detector, as its file has it."""

    anchors: NDArray[np.float32]
    """y and x of the centre, height and width, `[k, 4]`, relative to the image."""
    scales: tuple[float, float, float, float]
    """Divisors of the four offsets of a box, in the same order."""
    classes: int
    """Classes without the background, which come last in the scores."""
    score_threshold: float
    iou_threshold: float
    max_detections: int
    is_of_class: bool
    """Whether a box is suppressed only by those of its class."""

    def head(self, settings: ModelSettings) -> Head | None:
        """Returns the head for what `decoded` gives; None where the settings ask for another task.

        Thresholds that the settings don't give are the file's, where it has stricter ones.
        """
        if settings.outputs or settings.task not in ("auto", "detection"):
            return None
        of_file = {
            "iou_threshold": self.iou_threshold,
            "max_detections": self.max_detections,
            "score_threshold": max(self.score_threshold, settings.score_threshold),
        }
        unset = {name: one for name, one in of_file.items() if name not in settings.model_fields_set}
        settings = settings.model_copy(update={"bounding_box_format": "rel_yxyx", **unset})
        classes = self.classes + self._names_background(settings)
        head = detection_head.candidates(classes, settings, BOXES, SCORES, across_classes=not self.is_of_class)
        return head._replace(reason=f"it ends with {DETECTION}" if settings.task == "auto" else "")

    def decoded(self, found: Found, names: Sequence[str], settings: ModelSettings) -> Found:
        """Returns a function of boxes `[n, k, 4]`, as top, left, bottom and right relative to the image, and of scores
        `[n, k, classes]`, in the place of one of offsets and scores, which have these `names`. Raises ModelFailed."""
        of_boxes, of_scores = names
        boxes, scores = found.outputs[of_boxes], found.outputs[of_scores]
        count = len(self.anchors)
        match boxes.shape, scores.shape:
            case (batch, int(rows), int(numbers)), (_, int(others), int(columns)) if (
                rows == others == count and numbers >= 4 and columns >= self.classes
            ):
                skipped = columns - self.classes
            case _:
                raise ModelFailed(
                    f"source: expected offsets [n, {count}, 4] and scores [n, {count}, {self.classes} or more] before"
                    f" {DETECTION}, got {boxes} and {scores}; {WITHOUT}"
                )
        named = self._names_background(settings)

        def call(*given: tf.Tensor) -> Raw:
            raw = found.call(*given)
            of_classes = raw[of_scores][..., skipped:]
            # A named background is the first class.
            return {
                BOXES: self._boxes(raw[of_boxes]),
                SCORES: tf.pad(of_classes, [[0, 0], [0, 0], [1, 0]]) if named else of_classes,
            }

        outputs = {
            BOXES: TensorShape((batch, count, 4), "float32"),
            SCORES: TensorShape((batch, count, self.classes + named), scores.dtype),
        }
        return found._replace(call=call, outputs=outputs)

    def _boxes(self, offsets: tf.Tensor) -> tf.Tensor:
        moved = tf.cast(offsets[..., :4], tf.float32) / tf.constant(self.scales, tf.float32)
        centres = moved[..., :2] * self.anchors[:, 2:] + self.anchors[:, :2]
        halves = tf.exp(moved[..., 2:]) * self.anchors[:, 2:] / 2
        return tf.concat((centres - halves, centres + halves), axis=-1)

    def _names_background(self, settings: ModelSettings) -> bool:
        return class_names.has_background(settings.labels)


@contextmanager
def cut(file: Path) -> Iterator[tuple[Path, Suppression | None]]:
    """Provides a file without the operation, and what it would compute; `file` itself and None where it has none.

    The first two outputs of the other file are what the operation takes. Raises ModelFailed.
    """
    if file.suffix != ".tflite":
        yield file, None
        return
    data = file.read_bytes()
    try:
        found = _find(data)
    except (struct.error, IndexError) as error:
        raise file_content.cut_off(file) from error
    if found is None:
        yield file, None
        return
    place, graph, model = found
    operator = graph.tables(tflite_tables.OPERATORS)[place]
    try:
        suppression = _suppression(operator, graph, model)
        content = _without(data, place, graph, operator)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise ModelFailed(f"source: {DETECTION} in {file.name} is not as TensorFlow Lite's is; {WITHOUT}") from error
    with tempfile.TemporaryDirectory() as folder:
        rest = Path(folder) / file.name
        rest.write_bytes(content)
        yield rest, suppression


def _find(data: bytes) -> tuple[int, Table, Table] | None:
    """Returns the place of the operation among the operators of a graph, the graph and the model."""
    model = tflite_tables.root(data)
    names = [code.text(tflite_tables.CUSTOM_CODE) for code in model.tables(tflite_tables.OPERATOR_CODES)]
    if DETECTION not in names:
        return None
    graph = model.tables(tflite_tables.SUBGRAPHS)[0]
    for place, operator in enumerate(graph.tables(tflite_tables.OPERATORS)):
        if names[operator.number(tflite_tables.OPCODE, "I")] == DETECTION:
            return place, graph, model
    return None


def _suppression(operator: Table, graph: Table, model: Table) -> Suppression:
    _, _, of_anchors = operator.numbers(tflite_tables.TAKEN)
    options: dict[str, Any] = flexbuffers.Loads(operator.content(tflite_tables.CUSTOM_OPTIONS))
    y, x, h, w = (float(options[f"{side}_scale"]) for side in "yxhw")
    return Suppression(
        _numbers(graph.tables(tflite_tables.TENSORS)[of_anchors], model),
        (y, x, h, w),
        classes=int(options["num_classes"]),
        score_threshold=float(options["nms_score_threshold"]),
        iou_threshold=float(options["nms_iou_threshold"]),
        max_detections=int(options["max_detections"]),
        is_of_class=bool(options.get("use_regular_nms", False)),
    )


def _numbers(tensor: Table, model: Table) -> NDArray[np.float32]:
    """Returns a constant of the file, in numbers."""
    buffer = model.tables(tflite_tables.BUFFERS)[tensor.number(tflite_tables.BUFFER, "I")]
    dtype = DTYPES[tensor.number(tflite_tables.TYPE, "b")]
    shape = tensor.numbers(tflite_tables.SHAPE)
    values = np.frombuffer(buffer.content(tflite_tables.DATA), dtype).reshape(shape).astype(np.float32)
    quantization = tensor.table(tflite_tables.QUANTIZATION)
    if quantization is not None and (scale := quantization.floats(tflite_tables.SCALE)):
        values = (values - quantization.numbers(tflite_tables.ZERO_POINT, "q")[0]) * np.float32(scale[0])
    return values


def _without(data: bytes, place: int, graph: Table, operator: Table) -> bytes:
    """Returns a file without an operator of its graph, the first two inputs of which become the outputs."""
    content = bytearray(data)
    start, count = graph.vector(tflite_tables.OPERATORS)
    for later in range(place, count - 1):
        at = start + 4 * later
        (offset,) = struct.unpack_from("<I", content, at + 4)
        struct.pack_into("<I", content, at, offset + 4)  # offsets are from their own place on
    struct.pack_into("<I", content, start - 4, count - 1)
    start, _ = graph.vector(tflite_tables.OUTPUTS)
    of_boxes, of_scores, _ = operator.numbers(tflite_tables.TAKEN)
    struct.pack_into("<Iii", content, start - 4, 2, of_boxes, of_scores)
    return bytes(content)
