"""The scenes that `builtin:shapes-detector` and `builtin:shapes-segmenter` are trained and tested on: circles, squares
and triangles on clutter, drawn by a seed, with the truth about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

LABELS: Final = ("circle", "square", "triangle")
TRAIN_SEED: Final = 1
HELD_OUT_SEED: Final = 2
"""No scene of one seed is among the other's."""

MAX_SHAPES: Final = 5
_SHARPER: Final = 2
"""How many times larger scenes are drawn and then shrunk, which smooths their edges."""
_CORNERS: Final = {"square": 4, "triangle": 3}


class Shape(NamedTuple):
    """One shape of a scene."""

    label: int
    """Its place in LABELS."""
    x_min: float
    y_min: float
    x_max: float
    y_max: float


@dataclass(frozen=True, slots=True)
class Scene:
    """An image and the truth about it, in its pixels."""

    pixels: NDArray[np.uint8]
    """RGB, `[height, width, 3]`."""
    shapes: tuple[Shape, ...]
    classes: NDArray[np.uint8]
    """`[height, width]`: 0 for the background, else 1 more than the place of the shape's label in LABELS."""


def scene(seed: int, number: int, *, height: int, width: int) -> Scene:
    """Draws the scene of a seed, a number and a size: the same each time, by the same versions of Pillow and NumPy."""
    rng = np.random.default_rng((seed, number, height, width))
    image = _clutter(rng, height * _SHARPER, width * _SHARPER)
    classes = Image.new("L", (width, height))
    draw, draw_classes = ImageDraw.Draw(image), ImageDraw.Draw(classes)
    shapes: list[Shape] = []
    wanted = rng.integers(1, MAX_SHAPES + 1)
    for _ in range(4 * wanted):  # some find no room
        label = int(rng.integers(len(LABELS)))
        radius = rng.uniform(0.09, 0.24) * min(height, width)
        middle = rng.uniform(radius, np.array([width, height]) - radius)
        outline = _outline(label, middle, radius, rng.uniform(0, 2 * np.pi))
        shape = Shape(label, *outline.min(axis=0).tolist(), *outline.max(axis=0).tolist())
        if any(_touch(shape, other) for other in shapes):
            continue
        colour = _colour_unlike(image, outline * _SHARPER, rng)
        draw.polygon([tuple(corner) for corner in (outline * _SHARPER - 0.5).tolist()], fill=colour)
        draw_classes.polygon([tuple(corner) for corner in (outline - 0.5).tolist()], fill=label + 1)
        shapes.append(shape)
        if len(shapes) == wanted:
            break
    smooth = np.asarray(image.resize((width, height), Image.Resampling.BOX), np.float32)
    noisy = smooth + rng.normal(0, rng.uniform(0, 8), smooth.shape)
    return Scene(np.clip(noisy, 0, 255).astype(np.uint8), tuple(shapes), np.array(classes))


def _clutter(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Returns patches of colour with strokes, rings and crosses over them, none of them filled."""
    coarse = rng.integers(40, 216, (*rng.integers(2, 5, 2), 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    size = min(height, width)
    for _ in range(rng.integers(6, 18)):
        x, y, x_to, y_to = (rng.uniform(-0.1, 1.1, 4) * (width, height, width, height)).tolist()
        colour = tuple(rng.integers(0, 256, 3).tolist())
        thickness = max(1, round(rng.uniform(0.005, 0.025) * size))
        reach = rng.uniform(0.03, 0.2) * size
        match rng.integers(3):
            case 0:
                draw.line((x, y, x_to, y_to), fill=colour, width=thickness)
            case 1:
                draw.ellipse((x - reach, y - reach, x + reach, y + reach), outline=colour, width=thickness)
            case 2:
                draw.line((x - reach, y, x + reach, y), fill=colour, width=thickness)
                draw.line((x, y - reach, x, y + reach), fill=colour, width=thickness)
    return image


def _outline(label: int, middle: NDArray[np.float64], radius: float, turn: float) -> NDArray[np.float64]:
    corners = _CORNERS.get(LABELS[label], 48)
    angles = turn + 2 * np.pi * np.arange(corners) / corners
    return middle + radius * np.column_stack([np.cos(angles), np.sin(angles)])


def _touch(one: Shape, other: Shape) -> bool:
    return one.x_min < other.x_max and other.x_min < one.x_max and one.y_min < other.y_max and other.y_min < one.y_max


def _colour_unlike(image: Image.Image, outline: NDArray[np.float64], rng: np.random.Generator) -> tuple[int, ...]:
    """Returns a colour that can be told from what is under the outline."""
    places = np.clip(outline.astype(int), 0, np.array(image.size) - 1)
    around = np.array([image.getpixel((x, y)) for x, y in places.tolist()], np.float64).mean(axis=0)
    while True:
        colour = rng.integers(0, 256, 3)
        if np.abs(colour - around).sum() > 150:
            return tuple(colour.tolist())
