"""Heads, the part of a compiled program that follows the network: they turn its outputs into those of a task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import ModelSettings, OutputRole
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import COLORS
from xlaserve.models import class_names
from xlaserve.models.output_facts import OUTPUT_NAMES, TO_LEVELS
from xlaserve.models.task import (
    DATATYPES,
    Classification,
    Embedding,
    ImageToImage,
    Regression,
    Segmentation,
    Task,
    Tensors,
    TensorSpec,
)

Raw = Mapping[str, tf.Tensor]
"""A network's outputs by their names."""
Finish = Callable[[Raw, tf.Tensor], tuple[tf.Tensor, ...]]
"""Maps a network's outputs, and the images `[n, height, width, channels]` that it was given, to outputs of the task."""

AS_TENSORS: Final = "write task: tensors, which gives it as it is"
"""The next step for an output that a task can't read."""
_HALF: Final = ("float16", "bfloat16")
"""Types that are given as float32, as the protocol has no lists of them."""
_BY_NAME: Final = {dtype.name: datatype for dtype, datatype in DATATYPES.items()}


class TensorShape(NamedTuple):
    """A tensor of a model as the model declares it."""

    shape: Sequence[int | None] | None
    """None is an unknown rank, or an unknown size."""
    dtype: str

    @property
    def of_any_batch(self) -> TensorShape:
        """This shape with a first dimension of any size."""
        return self if self.shape is None else TensorShape((None, *self.shape[1:]), self.dtype)

    @property
    def of_one_image(self) -> TensorShape:
        """This shape with a first dimension of 1 before it."""
        return self if self.shape is None else TensorShape((1, *self.shape), self.dtype)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype} of unknown rank"
        return f"{self.dtype} [{', '.join(str(side) for side in self.shape)}]"


class Sampled(NamedTuple):
    """Some images, and what a network gives for them."""

    size: tuple[int, int]
    """Height and width of the images."""
    outputs: Mapping[str, NDArray[Any]]


Probe = Callable[[], Sampled | None]
"""Runs the network on some images; None where it can't."""


class Head(NamedTuple):
    """A task, and the function that computes its outputs."""

    task: Task
    finish: Finish
    reason: str = ""
    """Why `auto` chose the task; empty where the settings name it."""


def pick(
    outputs: Mapping[str, TensorShape],
    settings: ModelSettings,
    role: OutputRole,
    fitting: Collection[str] | None = None,
) -> tuple[str, TensorShape]:
    """Returns the output that is to be `role`, the name of an output of the task: the one that the settings name, else
    of those that are `fitting`, by default all, one of a usual name or the only one. Raises ModelFailed."""
    known = "; ".join(f"{name}: {shape}" for name, shape in sorted(outputs.items()))
    name = dict(settings.output_names).get(role)
    if name is not None and name not in outputs:
        raise ModelFailed(f"output_names: expected {role} to be one of {known}, got {name}; {_naming(role, outputs)}")
    if name is None:
        fitting = outputs if fitting is None else fitting
        found = [name for name in OUTPUT_NAMES.get(role, (role,)) if name in fitting] or list(fitting)
        if len(found) != 1:
            raise ModelFailed(
                f"output_names: expected the name of the output to take for {role}, of {known};"
                f" {_naming(role, fitting or outputs)}, or task: tensors for all"
            )
        (name,) = found
    return name, outputs[name]


def _naming(role: OutputRole, outputs: Collection[str]) -> str:
    return f"write output_names: {{{role}: {min(outputs)}}}"


def tensors(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head that gives all outputs as they are, floats of 16 bits as float32.

    Raises ModelFailed for outputs that are no numbers, or of unknown rank or none.
    """
    if settings.output_names:
        raise ModelFailed(
            "output_names: expected none with task: tensors, which keeps the model's own names, got some; leave"
            " output_names out"
        )
    task = Tensors(tuple(_spec(name, output) for name, output in outputs.items()))
    dtypes = {name: "float32" if output.dtype in _HALF else output.dtype for name, output in outputs.items()}

    def finish(raw: Raw, _: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(tf.cast(raw[name], dtype) for name, dtype in dtypes.items())

    return Head(task, finish)


def _spec(name: str, output: TensorShape) -> TensorSpec:
    """Returns an output as metadata shows it."""
    datatype = _BY_NAME.get("float32" if output.dtype in _HALF else output.dtype)
    if datatype is None:
        numbers = ", ".join(_BY_NAME)
        raise ModelFailed(
            f"source: expected outputs of numbers ({numbers}), got {name}: {output}; export the model without it,"
            " or read one of the others alone: task: classification, output_names: {scores: OUTPUT}"
        )
    if not output.shape:
        raise ModelFailed(
            f"source: expected outputs [n, ...] with a row for each image, got {name}: {output}; export the model"
            " without it, or read one of the others alone: task: classification, output_names: {scores: OUTPUT}"
        )
    return TensorSpec(name, datatype, (-1, *(-1 if side is None else side for side in output.shape[1:])))


def classification(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for scores `[n, classes]`, or the probability of the second of two classes `[n, 1]` or `[n]`.

    Raises ModelFailed for other outputs, as the other heads do.
    """
    name, scores = pick(outputs, settings, "scores")
    match scores.shape:
        case (_, 1) | (_,):
            task = Classification(2, threshold=settings.threshold)
            return Head(task, lambda raw, _: (_both_classes(activated(raw[name], settings)),))
        case (_, int(classes)):
            return Head(Classification(classes), lambda raw, _: (activated(raw[name], settings),))
    raise ModelFailed(f"source: expected an output of scores [None, classes], got {scores}; {AS_TENSORS}")


def activated(scores: tf.Tensor, settings: ModelSettings) -> tf.Tensor:
    """Returns scores as float32, after the function that the settings apply to them."""
    scores = tf.cast(scores, tf.float32)
    match settings.activation:
        case "softmax":
            return tf.nn.softmax(scores)
        case "sigmoid":
            return tf.sigmoid(scores)
        case "none" | None:
            return scores


def _both_classes(scores: tf.Tensor) -> tf.Tensor:
    """Returns the scores `[n, 2]` of both classes from those of the second, `[n, 1]` or `[n]`."""
    second = tf.reshape(scores, (-1, 1))
    return tf.concat((1.0 - second, second), axis=1)


def regression(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for numbers `[n, count]`, or `[n]`."""
    name, numbers = pick(outputs, settings, "values")
    match numbers.shape:
        case (_,):
            count = 1
        case (_, int(count)):
            pass
        case _:
            raise ModelFailed(f"source: expected an output of numbers [None, count], got {numbers}; {AS_TENSORS}")
    if settings.values and len(settings.values) != count:
        raise ModelFailed(
            f"values: expected {count}, one for each number of {name}, got {len(settings.values)}; leave values out, or"
            " write as many: {name: unit, ...}"
        )
    task = Regression(count, settings.values)
    return Head(task, lambda raw, _: (tf.reshape(tf.cast(raw[name], tf.float32), (-1, count)),))


def embedding(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for vectors `[n, dimensions]`."""
    name, vectors = pick(outputs, settings, "embedding")
    match vectors.shape:
        case (_, int(dimensions)):
            return Head(Embedding(dimensions), lambda raw, _: (tf.cast(raw[name], tf.float32),))
    raise ModelFailed(f"source: expected an output of vectors [None, dimensions], got {vectors}; {AS_TENSORS}")


def image(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for images `[n, height, width, channels]` of 1, 3 or 4 channels, or grey `[n, height, width]`.

    Their values become levels from 0 to 255: scaled from the settings' `output_range`, rounded, halves to even numbers,
    and clipped. NaN becomes 0.
    """
    name, values = pick(outputs, settings, "image")
    match values.shape:
        case (_, height, width, int(channels)) if channels in COLORS:
            pass
        case (_, height, width):
            channels = 1
        case _:
            raise ModelFailed(
                f"source: expected an output of images [None, height, width, 1, 3 or 4], got {values}; {AS_TENSORS}"
            )
    is_float = "float" in values.dtype
    if not is_float and "int" not in values.dtype:
        raise ModelFailed(f"source: expected images of numbers, got {name}: {values}; {AS_TENSORS}")
    if not is_float and settings.output_range not in (None, "0..255"):
        raise ModelFailed(
            f"output_range: expected 0..255 for {name}: {values}, got {settings.output_range}; leave output_range out"
        )
    scale, offset = TO_LEVELS[(settings.output_range or "0..1") if is_float else "0..255"]
    size = (-1, -1) if height is None or width is None else (height, width)
    color = settings.color if settings.color and settings.color.channels == channels else COLORS[channels]

    def finish(raw: Raw, _: tf.Tensor) -> tuple[tf.Tensor, ...]:
        levels = tf.round(tf.cast(raw[name], tf.float32) * scale + offset)
        levels = tf.where(tf.math.is_nan(levels), 0.0, tf.clip_by_value(levels, 0.0, 255.0))
        return (tf.cast(levels if levels.shape.rank == 4 else levels[..., tf.newaxis], tf.uint8),)

    return Head(ImageToImage(color, size), finish)


def segmentation(outputs: Mapping[str, TensorShape], settings: ModelSettings) -> Head:
    """Returns the head for scores `[n, height, width, classes]`, for probabilities of the second of two classes
    `[n, height, width, 1]` or `[n, height, width]`, or for classes as whole numbers `[n, height, width]`."""
    name, maps = pick(outputs, settings, "class_map")
    match maps.shape:
        case (_, _, _, 1):
            return _masks(name, settings)
        case (_, _, _) if "float" in maps.dtype:
            return _masks(name, settings)
        case (_, _, _, int(classes)) if classes > 1:
            task = Segmentation(classes)
            return Head(task, lambda raw, images: (_class_map(task, raw[name], images),))
        case (_, _, _) if "int" in maps.dtype:
            task = Segmentation(classes_of(settings))
            return Head(task, lambda raw, _: (tf.cast(raw[name], _map_dtype(task)),))
    raise ModelFailed(
        "source: expected an output of scores [None, height, width, classes], "
        f"or of whole numbers [None, height, width], got {maps}; {AS_TENSORS}"
    )


def _masks(name: str, settings: ModelSettings) -> Head:
    """Returns the head for probabilities that a pixel is of the second class; those of fewer pixels are enlarged."""
    task = Segmentation(2)

    def finish(raw: Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        maps = activated(raw[name], settings)
        maps = _enlarged(maps if maps.shape.rank == 4 else maps[..., tf.newaxis], images)
        return (tf.cast(maps[..., 0] >= settings.threshold, _map_dtype(task)),)

    return Head(task, finish)


def _map_dtype(task: Segmentation) -> tf.DType:
    return {"UINT8": tf.uint8, "INT32": tf.int32}[task.outputs[0].datatype]


def _class_map(task: Segmentation, maps: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns the likeliest class of each pixel of the images; scores of fewer pixels are enlarged."""
    maps = _enlarged(tf.cast(maps, tf.float32), images)
    return tf.cast(tf.argmax(maps, axis=-1, output_type=tf.int32), _map_dtype(task))


def _enlarged(maps: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Returns maps of the images' size."""
    return maps if maps.shape[1:3] == images.shape[1:3] else tf.image.resize(maps, images.shape[1:3])


def classes_of(settings: ModelSettings) -> int:
    """Returns how many classes there are, where the outputs don't show it. Raises ModelFailed."""
    if (known := known_classes(settings)) is not None:
        return known
    raise ModelFailed(
        "classes: expected how many there are, as the outputs don't show it, got nothing; write classes: 2, or"
        " labels, with their names"
    )


def known_classes(settings: ModelSettings) -> int | None:
    """Returns how many classes the settings say there are; None where they don't."""
    if settings.classes is not None:
        return settings.classes
    return None if settings.labels is None else len(class_names.named(settings.labels))
