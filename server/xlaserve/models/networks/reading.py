"""The choice of a network's task: from the settings or, with `auto`, by the outputs' names, shapes and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, assert_never

import numpy as np
import tensorflow as tf

from xlaserve.config import BoxDecoding, ModelSettings, OutputRole, TaskName
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names, raw_boxes
from xlaserve.models.networks import box_decoding, detection_head, heads, keypoint_head, sequence_head
from xlaserve.models.networks.heads import Finish, Head, Probe, TensorShape
from xlaserve.models.networks.image_tensor import channels_last, maps_last
from xlaserve.models.output_facts import IMAGE_CHANNELS, MOST_CLASSES, OUTPUT_NAMES
from xlaserve.models.raw_boxes import RawBoxes
from xlaserve.models.scores import are_probabilities
from xlaserve.models.task import Reading, Tensors, WithClasses

IsFirst = Callable[[TensorShape], bool]
"""Whether an output, if it is maps, is `[n, channels, height, width]`."""

MakeHead = Callable[[Mapping[str, TensorShape], ModelSettings], Head]
"""Makes the head of one task."""

IMAGE_HINT: Final = "task: image reads it so"
_OF_ROLES: Final[Mapping[OutputRole, TaskName]] = {
    "embedding": "embedding",
    "class_map": "segmentation",
    "boxes": "detection",
    "image": "image",
    "keypoints": "keypoints",
}
"""Roles of outputs that only one task has."""


_OF_SETTINGS: Final[Mapping[str, TaskName]] = {
    "values": "regression",
    "blank": "sequence",
    "keypoint_format": "keypoints",
    "box_decoding": "detection",
    "output_range": "image",
}
"""Settings that only one task has."""


class _Found(NamedTuple):
    """The task of outputs, and the reason for it."""

    task: TaskName
    reason: str


def choose(
    outputs: Mapping[str, TensorShape],
    settings: ModelSettings,
    probe: Probe = lambda: None,
    is_first: IsFirst = lambda _: False,
) -> Head:
    """Returns the head for the task of the settings or, with `auto`, of the network's outputs.

    `probe` is only called where names and shapes leave open what a map is, how many sides an output has, or the form of
    a detector's boxes. `is_first` is whether an output, if it is maps, has its channels first
    (`ImageTensor.gives_first`). Raises ModelFailed where the outputs are not what the settings' task needs; with
    `auto`, outputs that are of no task are tensors.
    """
    outputs = _of_known_rank(outputs, probe)
    if settings.outputs:
        return _with_readings(outputs, settings, is_first)
    if settings.task != "auto":
        return _head(settings.task, outputs, settings, is_first, probe)
    found = _recognise(outputs, settings, probe, is_first)
    return _head(found.task, outputs, settings, is_first, probe)._replace(reason=found.reason)


def _head(  # noqa: PLR0911 - one each
    task: TaskName,
    outputs: Mapping[str, TensorShape],
    settings: ModelSettings,
    is_first: IsFirst,
    probe: Probe = lambda: None,
) -> Head:
    match task:
        case "classification":
            return heads.classification(outputs, settings)
        case "detection":
            return _detection(outputs, settings, is_first, probe)
        case "segmentation":
            return _of_pixels(heads.segmentation, outputs, settings, is_first)
        case "embedding":
            return heads.embedding(outputs, settings)
        case "regression":
            return heads.regression(outputs, settings)
        case "sequence":
            return sequence_head.sequence(outputs, settings)
        case "keypoints":
            return _of_pixels(
                keypoint_head.keypoints, outputs, settings, lambda one: is_first(one) and keypoint_head.are_maps(one)
            )
        case "image":
            return _of_pixels(heads.image, outputs, settings, is_first)
        case "tensors":
            return heads.tensors(outputs, settings)
        case _:
            assert_never(task)


def _detection(outputs: Mapping[str, TensorShape], settings: ModelSettings, is_first: IsFirst, probe: Probe) -> Head:
    """Returns the head for boxes that are ready, or decoded as the settings say or the outputs show."""
    decoding = settings.box_decoding
    if decoding is None and (raw := _raw_boxes(outputs)) is not None and raw.is_certain:
        decoding = BoxDecoding.model_validate(raw.setting)
    if decoding is None:
        return detection_head.detection(outputs, settings)
    make: MakeHead = partial(box_decoding.decoded, decoding=decoding, probe=probe)
    return _of_pixels(make, outputs, settings, lambda one: is_first(one) and box_decoding.are_maps(one))


def _raw_boxes(outputs: Mapping[str, TensorShape]) -> RawBoxes | None:
    return raw_boxes.suggested({name: output.shape for name, output in outputs.items()})


def _of_pixels(make: MakeHead, outputs: Mapping[str, TensorShape], settings: ModelSettings, is_first: IsFirst) -> Head:
    """Returns the head for maps or images, whether their channels come first or last."""
    first = {name for name, output in outputs.items() if is_first(output)}
    last = {name: channels_last(output) if name in first else output for name, output in outputs.items()}
    head = make(last, settings)

    def finish(raw: heads.Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return head.finish({name: maps_last(maps) if name in first else maps for name, maps in raw.items()}, images)

    return head._replace(finish=finish)


def _with_readings(outputs: Mapping[str, TensorShape], settings: ModelSettings, is_first: IsFirst) -> Head:
    """Returns the head that gives all outputs, and reads those for which the settings say how."""
    plain = heads.tensors(outputs, settings)
    assert isinstance(plain.task, Tensors)
    specs = list(plain.task.outputs)
    readings: list[Reading] = []
    finishes: dict[int, Finish] = {}
    places = {spec.name: place for place, spec in enumerate(specs)}
    for name, own in settings.outputs:
        if name not in places:
            raise ModelFailed(
                f"outputs: expected names of {', '.join(places)}, got {name}; write outputs: {{{min(places)}: {{task:"
                f" {own.task}}}}}"
            )
        place = places[name]
        given = {field: getattr(own, field) for field in type(own).model_fields}
        head = _head(own.task, {name: outputs[name]}, settings.model_copy(update={**given, "outputs": ()}), is_first)
        task = head.task
        assert isinstance(task, Reading)
        if own.labels is not None:
            if not isinstance(task, WithClasses):
                raise ModelFailed(
                    f"outputs.{name}.labels: {own.task} has no classes, expected no labels; leave its labels out"
                )
            task = task.labelled(class_names.of_task(own.labels, task))
        specs[place] = task.outputs[0]._replace(name=name)
        readings.append(replace(task, at=place))
        finishes[place] = head.finish

    def finish(raw: heads.Raw, images: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = list(plain.finish(raw, images))
        for place, read in finishes.items():
            (values[place],) = read(raw, images)
        return tuple(values)

    return Head(Tensors(tuple(specs), tuple(readings)), finish)


def _of_known_rank(outputs: Mapping[str, TensorShape], probe: Probe) -> Mapping[str, TensorShape]:
    """Returns the outputs, those of unknown rank with the sides that they have for a sample."""
    if all(output.shape is not None for output in outputs.values()) or (sampled := probe()) is None:
        return outputs
    return {
        name: output._replace(shape=(None, *sampled.outputs[name].shape[1:])) if output.shape is None else output
        for name, output in outputs.items()
    }


def _recognise(outputs: Mapping[str, TensorShape], settings: ModelSettings, probe: Probe, is_first: IsFirst) -> _Found:
    """Returns the task by the settings or the names of outputs, else by the shape of the only output."""
    roles = dict(settings.output_names)
    for role, task in _OF_ROLES.items():
        if role in roles:
            return _Found(task, f"output_names names the {role}")
    for field, task in _OF_SETTINGS.items():
        if getattr(settings, field):
            return _Found(task, f"the settings say its {field}")
    has_scores = "scores" in roles or any(name in outputs for name in OUTPUT_NAMES["scores"])
    for name in OUTPUT_NAMES["boxes"]:
        if name in outputs and has_scores and (shape := outputs[name].shape) is not None and list(shape[2:]) == [4]:
            return _Found("detection", f"it has outputs for scores and {name}: {outputs[name]}")
    if len(outputs) > 1 and not has_scores:
        return _of_several(outputs)
    return _of_shape(*heads.pick(outputs, settings, "scores"), settings, probe, is_first)


def _of_several(outputs: Mapping[str, TensorShape]) -> _Found:
    """Returns the task of several outputs that have no names of a task."""
    known = "; ".join(f"{name}: {shape}" for name, shape in sorted(outputs.items()))
    raw = _raw_boxes(outputs)
    if raw is not None and raw.is_certain:
        return _Found("detection", f"it has the outputs of {raw.setting}: {known}")
    hint = "" if raw is None else " (box_decoding may read them as boxes)"
    return _Found("tensors", f"it has several outputs, none of which is named for a task: {known}{hint}")


def _of_shape(name: str, output: TensorShape, settings: ModelSettings, probe: Probe, is_first: IsFirst) -> _Found:
    """Returns the task of an only output, by its shape."""
    shown = f"{name}: {output}"
    is_of_two = settings.labels is not None and len(class_names.named(settings.labels)) == 2
    match channels_last(output).shape if is_first(output) else output.shape:
        case (_, 1) | (_,) if is_of_two:
            return _Found("classification", f"{shown} is one number, and the settings name two classes")
        case (_, _, _, 1) if is_of_two:
            return _Found("segmentation", f"{shown} is one number for each pixel, and the settings name two classes")
        case (_, int(classes)) if classes > 1:
            return _Found("classification", f"{shown} may be scores of {classes} classes")
        case (_, _, _, int(classes)) if classes > 1 and "float" in output.dtype:
            return _of_maps(shown, name, classes, settings, probe, is_first=is_first(output))
        case (_, _, _, 1 | 3 | 4):
            return _Found("tensors", f"{shown} may be a map, or an image ({IMAGE_HINT})")
    return _Found("tensors", f"{shown} is of no task for certain")


def _of_maps(shown: str, name: str, channels: int, settings: ModelSettings, probe: Probe, *, is_first: bool) -> _Found:
    """Returns the task of maps `[n, height, width, channels]`, or `[n, channels, height, width]` with `is_first`:
    segmentation for class scores, tensors for anything else, such as features."""
    if settings.labels is not None or settings.classes == channels:
        return _Found("segmentation", f"the settings say which classes {shown} has")
    if "softmax" in name.lower() or name in (*OUTPUT_NAMES["scores"], dict(settings.output_names).get("scores")):
        return _Found("segmentation", f"{shown} is named for scores")
    if (sampled := probe()) is not None:
        maps = np.moveaxis(sampled.outputs[name], 1, -1) if is_first else sampled.outputs[name]
        if are_probabilities(maps):
            return _Found("segmentation", f"the numbers of each pixel of {shown} are probabilities")
        if maps.shape[1:3] == sampled.size and channels not in IMAGE_CHANNELS and channels <= MOST_CLASSES:
            return _Found("segmentation", f"{shown} has {channels} numbers for each pixel of the input")
    hint = f" ({IMAGE_HINT})" if channels in (3, 4) else ""
    return _Found("tensors", f"{shown} may be class scores, features or an image{hint}")
