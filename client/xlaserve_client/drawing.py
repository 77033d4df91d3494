"""Drawings of detections and class maps over the image. Needs Pillow, unlike the rest of the client."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from xlaserve_client.results import ClassMap, Detections, Keypoints

_COLOURS: Final = (
    (230, 60, 50),
    (40, 150, 250),
    (250, 190, 20),
    (60, 190, 90),
    (190, 80, 220),
    (250, 130, 40),
    (20, 200, 200),
    (240, 110, 170),
)
"""Colours of the classes, which repeat; they stand out from photographs and from each other."""
_SHARE: Final = 0.55
"""Opacity of a class's colour over the image."""


def draw_boxes(image: Path, found: Detections) -> Image.Image:
    """Returns the image, upright, with a box and its label around each object."""
    drawn = _upright(image)
    pen = ImageDraw.Draw(drawn)
    thickness = max(1, round(min(drawn.size) / 150))
    for item in found.detections:
        colour = _COLOURS[item.index % len(_COLOURS)]
        box = item.box
        right, bottom = max(box.x_min, box.x_max - 1), max(box.y_min, box.y_max - 1)  # of less than a pixel too
        pen.rectangle((box.x_min, box.y_min, right, bottom), outline=colour, width=thickness)
        text = f"{item.label} {item.score:.2f}"
        left, top, end, low = pen.textbbox((box.x_min, box.y_min), text)
        at = (box.x_min, max(0.0, box.y_min - (low - box.y_min) - 2))
        pen.rectangle((at[0], at[1], at[0] + end - left + 4, at[1] + low - top + 5), fill=colour)
        pen.text((at[0] + 2, at[1]), text, fill=(255, 255, 255))
    return drawn


def draw_keypoints(image: Path, found: Keypoints) -> Image.Image:
    """Returns the image, upright, with a dot at each keypoint."""
    drawn = _upright(image)
    pen = ImageDraw.Draw(drawn)
    radius = max(2, round(min(drawn.size) / 80))
    for item in found.keypoints:
        colour = _COLOURS[item.index % len(_COLOURS)]
        pen.ellipse((item.x - radius, item.y - radius, item.x + radius, item.y + radius), fill=colour)
    return drawn


def draw_classes(image: Path, class_map: ClassMap) -> Image.Image:
    """Returns the image, upright, in the colours of its classes; class 0, usually the background, is not coloured."""
    pixels = np.asarray(_upright(image), np.float32)
    classes = class_map.classes
    colours = np.array(_COLOURS, np.float32)[(classes.astype(np.intp) - 1) % len(_COLOURS)]
    share = np.where(classes[..., np.newaxis] > 0, _SHARE, 0.0).astype(np.float32)
    return Image.fromarray((pixels * (1 - share) + colours * share).astype(np.uint8))


def _upright(image: Path) -> Image.Image:
    with Image.open(image) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")
