"""Answers as pictures: `Accept: image/png`. Each class is plain data: a rendering, or one for `pipeline.Drawn`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from xlaserve.engine.program import Outputs
from xlaserve.errors import InvalidArgument
from xlaserve.images import drawing
from xlaserve.images.drawing import Box, Dot, Line, Pixels
from xlaserve.images.frame import Frame
from xlaserve.images.image_output import to_png
from xlaserve.models.task import (
    Classification,
    ClassSequence,
    Detection,
    ImageToImage,
    Keypoints,
    Segmentation,
    Task,
    reading_of,
)
from xlaserve.pipeline.pipeline import Draw, Render
from xlaserve.wire.shared.objects import in_original, located, within

PNG: Final = "image/png"
BACKGROUND: Final = "background"
"""The label of a class that has no colour."""


def is_wanted(headers: Mapping[str, str]) -> bool:
    """Whether a request wants a picture: it accepts PNG, and neither JSON nor anything."""
    accepted = {kind.partition(";")[0].strip().lower() for kind in headers.get("accept", "").split(",")}
    return PNG in accepted and accepted.isdisjoint(("application/json", "application/*", "*/*"))


def check_one(images: int) -> None:
    """Raises InvalidArgument unless a picture can be made of so many images."""
    if images != 1:
        raise InvalidArgument("image", f"one, as the answer is to be {PNG}", images)


class DrawnClasses(NamedTuple):
    """The likeliest classes below the image."""

    k: int

    def drawer(self, task: Task) -> Draw:
        """Returns what draws them."""
        classification = reading_of(task, Classification)

        def draw(outputs: Outputs, frame: Frame, pixels: Pixels) -> bytes:
            (categories,) = classification.top(outputs, min(self.k, drawing.MAX_LINES))
            return drawing.captioned(pixels, [Line(one.label, f"{one.score:.4g}") for one in categories])

        return draw


class DrawnText(NamedTuple):
    """The text below the image."""

    def drawer(self, task: Task) -> Draw:
        """Returns what draws it."""
        sequence = reading_of(task, ClassSequence)

        def draw(outputs: Outputs, frame: Frame, pixels: Pixels) -> bytes:
            (found,) = sequence.transcripts(outputs)
            return drawing.captioned(pixels, [Line(found.text, f"{found.score:.4g}")])

        return draw


class DrawnObjects(NamedTuple):
    """Boxes with labels and scores."""

    min_score: float
    most: int
    """0 for all."""

    def drawer(self, task: Detection) -> Draw:
        """Returns what draws them."""

        def draw(outputs: Outputs, frame: Frame, pixels: Pixels) -> bytes:
            (objects,) = task.objects(outputs, self.min_score)
            found = in_original(objects, frame, self.most)
            shares = found.boxes / (frame.width, frame.height, frame.width, frame.height)
            rows = zip(shares.tolist(), found.classes.tolist(), found.scores.tolist(), strict=True)
            boxes = [Box(box, index, Line(task.label(index), f"{score:.2f}")) for box, index, score in rows]
            return drawing.boxed(pixels, boxes)

        return draw


class DrawnKeypoints(NamedTuple):
    """Dots with labels and scores."""

    min_score: float

    def drawer(self, task: Task) -> Draw:
        """Returns what draws them."""
        keypoints = reading_of(task, Keypoints)

        def draw(outputs: Outputs, frame: Frame, pixels: Pixels) -> bytes:
            (points,) = keypoints.points(outputs)
            found = located(keypoints, points, frame, self.min_score)
            dots = [
                Dot(
                    (one.x / frame.width, one.y / frame.height),
                    one.index,
                    Line(keypoints.label(one.index), "" if one.score is None else f"{one.score:.2f}"),
                )
                for one in found
                if math.isfinite(one.x) and math.isfinite(one.y)
            ]
            return drawing.dotted(pixels, dots)

        return draw


class DrawnMap(NamedTuple):
    """The class of each pixel as a colour, and a legend with the share of each."""

    def drawer(self, task: Task) -> Draw:
        """Returns what draws it."""
        segmentation = reading_of(task, Segmentation)
        clear = _background(segmentation)

        def draw(outputs: Outputs, frame: Frame, pixels: Pixels) -> bytes:
            classes = segmentation.map_of(outputs)
            height, width, _ = pixels.shape
            shown = replace(frame, height=height, width=width).map_to_original(classes)
            indices, counts = np.unique(shown, return_counts=True)
            most = np.argsort(-counts, kind="stable")[: drawing.MAX_LINES]
            lines = []
            for index, count in zip(indices[most].tolist(), counts[most].tolist(), strict=True):
                colour = None if index == clear else drawing.colour_of(index)
                lines.append(Line(segmentation.label(index), f"{count / shown.size:.1%}", colour))
            return drawing.overlaid(pixels, shown, lines, clear)

        return draw


class MadeImage(NamedTuple):
    """The image that a model makes."""

    max_bytes: int

    def renderer(self, task: ImageToImage) -> Render:
        """Returns what makes a PNG file of it. Raises ImageTooLarge where that is too large."""
        return within(lambda outputs, frame: to_png(outputs[0][0], task.color, frame).file, self.max_bytes)


def _background(task: Segmentation) -> int | None:
    return next((index for index in range(min(task.classes, 2)) if task.label(index).lower() == BACKGROUND), None)
