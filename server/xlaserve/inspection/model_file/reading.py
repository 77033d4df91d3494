"""The task that the outputs in a model file suggest, and the lines of configuration that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from xlaserve.images.image_input import COLORS
from xlaserve.inspection.model_file.description import Tensor
from xlaserve.inspection.model_file.image_input import ImageInput
from xlaserve.models import raw_boxes
from xlaserve.models.output_facts import IMAGE_CHANNELS, MOST_CLASSES, OUTPUT_NAMES
from xlaserve.models.raw_boxes import RawBoxes

PROBABILITIES: Final = ("softmax", "sigmoid")
IMAGE_ACTIVATIONS: Final = ("sigmoid", "tanh", "relu", "linear", "")
"""Activations of outputs that may be images; empty where none is known."""
LARGEST_FACTOR: Final = 8
"""Factor of the sides of images that a network enlarges: beyond it, outputs are something else."""
BOX: Final = 4
"""Numbers of a box, which may have gone through a sigmoid as probabilities have."""
LABELS: Final = "labels"


class Line(NamedTuple):
    """A field of a model's configuration."""

    field: str
    value: object
    comment: str = ""
    is_open: bool = False
    """Whether it is a question, which stands in a comment."""


class Reading(NamedTuple):
    """The task that outputs suggest, and its lines of configuration."""

    task: str
    lines: tuple[Line, ...] = ()


def read(  # noqa: PLR0911 - one each
    outputs: Sequence[Tensor], image: ImageInput | None, labels: str, *, is_tflite: bool = False
) -> Reading:
    """Returns the task that outputs suggest; `labels` is the name of a file for the classes' names, `is_tflite` whether
    the model's is a TFLite file."""
    if not outputs or all(one.shape is None for one in outputs):
        return Reading("told when it is loaded")
    named = {one.name: one.shape for one in outputs}
    has_boxes = any((named.get(name) or ())[2:] == (4,) for name in OUTPUT_NAMES["boxes"])
    if has_boxes and named.keys() & set(OUTPUT_NAMES["scores"]):
        line = Line("bounding_box_format", "rel_yxyx", "or xyxy and others: as the model gives boxes", True)
        names = Line(LABELS, labels, "the names of the classes, one a line; `background` first where it is one", True)
        return Reading("detection", (line, names))
    if (raw := raw_boxes.suggested(named, _size(image), is_tflite=is_tflite)) is not None:
        return _raw_boxes(raw, outputs, labels)
    if len(outputs) > 1:
        return _several(outputs)
    (output,) = outputs
    match output.shape:
        case (_, int(classes)) if classes > 1:
            return _vector(output, classes, labels)
        case (_, 1) | (_,):
            return _number(output)
        case (batch, int(channels), *sides) if image is not None and _factor(sides, image):
            found = _of_pixels(replace(output, shape=(batch, *sides, channels)), channels, image, labels)
            return found._replace(task=f"{found.task}, channels first")
        case (_, _, _, 1):
            return _of_pixels(output, 1, image, labels)
        case (_, _, int(classes)) if output.activation == "softmax" and classes > 1:
            return _sequence(classes, labels)
        case (_, int(count), 2 | 3) | (_, 1, int(count), 2 | 3):
            return _points(count)
        case (_, _, _, int(channels)):
            return _of_pixels(output, channels, image, labels)
    return Reading("tensors: the model's own outputs")


def suppressed(labels: str) -> Reading:
    """Returns the reading of a detector that ends with TensorFlow Lite's own suppression."""
    names = Line(LABELS, labels, "the names of the classes, one a line, with or without ??? first", True)
    return Reading("detection; the server decodes and suppresses boxes as the file says", (names,))


def _size(image: ImageInput | None) -> tuple[int, int] | None:
    if image is None or image.height is None or image.width is None:
        return None
    return image.height, image.width


def _raw_boxes(raw: RawBoxes, outputs: Sequence[Tensor], labels: str) -> Reading:
    lines = [Line("box_decoding", raw.setting, raw.comment, not raw.is_certain)]
    if raw.preprocess:
        lines.append(Line("preprocess", raw.preprocess, "as in its family", not raw.is_certain))
    if raw.output_names is not None:
        lines.append(Line("output_names", raw.output_names, "which is which", True))
    lines.append(Line(LABELS, labels, "the names of the classes, without the background, one a line", True))
    count = "1 output" if len(outputs) == 1 else f"{len(outputs)} outputs"
    shown = "detection" if raw.is_certain else f"tensors: {count}"
    return Reading(f"{shown}, boxes before suppression", tuple(lines))


def _vector(output: Tensor, classes: int, labels: str) -> Reading:
    named = Line(LABELS, labels, f"the names of the {classes} classes, one a line", True)
    if output.activation == "softmax":
        return Reading(f"classification of {classes} classes", (named,))
    if output.activation == "sigmoid":
        numbers = Line(
            "task", "regression", "if these are numbers, as of a box; tensors gives them by their name", True
        )
        shown = f"classification of {classes} classes, each with a probability of its own"
        return Reading(f"{shown}, or a box", (numbers, named)) if classes == BOX else Reading(shown, (named,))
    if output.activation == "linear":
        logits = Line("activation", "softmax", "its scores are no probabilities; keep them with none", True)
        return Reading(f"classification of {classes} classes, or an embedding or numbers", (named, logits))
    embedding = Line("task", "embedding", "if these are no scores of classes", True)
    return Reading(f"classification of {classes} classes, or an embedding", (named, embedding))


def _number(output: Tensor) -> Reading:
    if output.activation == "sigmoid":
        both = Line(LABELS, ["first", "second"], "the classes below and from 0.5 on", True)
        return Reading("classification of two classes: the probability of the second", (both,))
    number = Line("task", "regression", "or classification, with two labels", True)
    return Reading("tensors: one number for each image", (number,))


def _of_pixels(  # noqa: PLR0911 - one each
    output: Tensor, channels: int, image: ImageInput | None, labels: str
) -> Reading:
    """Returns what an output with `channels` numbers in each place suggests, the channels last."""
    of_two = Line(LABELS, ["background", "object"], "if its numbers are a mask: below and from 0.5 on", True)
    if channels == 1:
        lines = (of_two, *_as_image(output, image, "if it is a grey image"))
        return Reading(f"tensors: one {_kind(output)} for each pixel", lines)
    named = Line(LABELS, labels, f"the names of the {channels} classes, one a line", True)
    if output.activation == "softmax":
        return Reading(f"segmentation of {channels} classes", (named,))
    sides = output.shape[1:3] if output.shape is not None else ()
    factor = None if image is None else _factor(sides, image)
    if factor is not None and factor > 1 and (lines := _as_image(output, image, "if it is one")):
        return Reading(f"tensors: an image, or a map, of {channels} channels, enlarged {factor} times", lines)
    if channels > MOST_CLASSES or factor != 1:
        return Reading(f"tensors: features of {channels} channels")
    if channels not in IMAGE_CHANNELS:
        return Reading(f"segmentation of {channels} classes", (named,))
    if lines := _as_image(output, image, "or segmentation, if its channels are classes; with their labels"):
        return Reading(f"tensors: an image, or a map, of {channels} channels", lines)
    classes = ["background", "object"] if channels == 2 else labels
    line = Line(LABELS, classes, "if its channels are classes, of which each pixel has the likeliest", True)
    return Reading(f"tensors: a map of {channels} channels", (line,))


def _sequence(classes: int, labels: str) -> Reading:
    blank = Line("blank", "last", "or first: the class of CTC that stands for none; none without CTC", True)
    named = Line(LABELS, labels, f"the names of the {classes - 1} classes without the blank, one a line", True)
    return Reading(f"tensors: {classes} probabilities in each step", (Line("task", "sequence", "", True), blank, named))


def _points(count: int) -> Reading:
    line = Line("keypoint_format", "rel_xy", "if these are keypoints; or xy in pixels, rel_yx, yx", True)
    return Reading(f"tensors: {count} rows of numbers, perhaps keypoints", (line,))


def _as_image(output: Tensor, image: ImageInput | None, comment: str) -> tuple[Line, ...]:
    """Returns the lines that read an output as an image; none where it is unlikely to be one."""
    if image is None or output.shape is None or output.activation not in IMAGE_ACTIVATIONS:
        return ()
    _, *sides, channels = output.shape
    if _factor(sides, image) is None or channels not in COLORS:
        return ()
    line = Line("task", "image", comment, True)
    if output.activation == "tanh":
        return line, Line("output_range", "-1..1", "the values of black and white in it", True)
    return (line,)


def _factor(sides: Sequence[int | None], image: ImageInput) -> int | None:
    """Returns how many times an output is as high and as wide as the input, whose sides may both be open; None where
    these are no whole number."""
    given = [image.height, image.width]
    if [*sides] == given:
        return 1
    factors = {
        divmod(side, own) if side is not None and own is not None else None
        for side, own in zip(sides, given, strict=False)
    }
    match [*factors]:
        case [(int(factor), 0)] if len(sides) == len(given) and 1 < factor <= LARGEST_FACTOR:
            return factor
    return None


def _several(outputs: Sequence[Tensor]) -> Reading:
    tasks = {one.name: task for one in outputs if (task := _head(one))}
    boxes = [one.name for one in outputs if _may_be_box(one)]
    either = f"; {', '.join(boxes)} as classification, if it is not a box but classes" if boxes else ""
    line = Line("outputs", tasks, f"what each is, with your labels{either}", True)
    return Reading(f"tensors: {len(outputs)} outputs", (line,) if tasks else ())


def _head(output: Tensor) -> dict[str, object]:
    match output.shape:
        case _ if "float" not in (output.dtype or "float32"):  # such as the index of the likeliest class
            return {}
        case (_, 1) | (_,):
            is_class = output.activation == "sigmoid"
            return {"task": "classification", "labels": ["first", "second"]} if is_class else {"task": "regression"}
        case _ if _may_be_box(output):
            return {"task": "regression"}
        case (_, int()) if output.activation in PROBABILITIES:
            return {"task": "classification"}
        case (_, int()):
            return {"task": "embedding"}
    return {}


def _may_be_box(output: Tensor) -> bool:
    return output.activation == "sigmoid" and output.shape is not None and output.shape[1:] == (BOX,)


def _kind(output: Tensor) -> str:
    return "probability" if output.activation == "sigmoid" else "number"
