"""Answers drawn into the image of the request. Blocking functions without state, made for a thread pool."""

from __future__ import annotations

import colorsys
import io
import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MIN_SIDE: Final = 480
"""The longer side of a picture at least: text in smaller ones can't be read."""
MAX_SIDE: Final = 1280
MAX_LABELS: Final = 100
"""Boxes that get a label; there is no room for more."""
MAX_DOT_LABELS: Final = 25
"""Keypoints up to which each gets a label; more would hide one another, and the image."""
MAX_LINES: Final = 12
"""Lines of a caption or a legend."""
_OPACITY: Final = 0.55
_PAPER, _INK, _FAINT = (255, 255, 255), (20, 20, 20), (110, 110, 110)
_GOLDEN: Final = 0.618033988749895
_BRIGHT: Final = (0.95, 0.65, 0.8)
_FAST: Final = 1

Pixels = NDArray[np.uint8]
"""RGB, `[height, width, 3]`."""
Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Line(NamedTuple):
    """A line of a caption."""

    text: str
    figure: str
    colour: Colour | None = None


class Box(NamedTuple):
    """An object."""

    corners: Sequence[float]
    """x_min, y_min, x_max, y_max as shares of the picture's width and height."""
    number: int
    """The number of its class."""
    label: Line


class Dot(NamedTuple):
    """A keypoint."""

    place: Sequence[float]
    """x and y as shares of the picture's width and height."""
    number: int
    """The number of its class."""
    label: Line


def captioned(pixels: Pixels, lines: Sequence[Line]) -> bytes:
    """Returns a PNG of the image above some lines."""
    return _png(_with_lines(_canvas(pixels), lines))


def boxed(pixels: Pixels, boxes: Sequence[Box]) -> bytes:
    """Returns a PNG of the image with boxes; the first ones lie on top."""
    picture = _canvas(pixels)
    draw, font = ImageDraw.Draw(picture), _font(picture)
    width = max(2, round(max(picture.size) / 300))
    for number, box in reversed([*enumerate(boxes)]):
        colour = colour_of(box.number)
        corners = [round(share * size) for share, size in zip(box.corners, (*picture.size, *picture.size), strict=True)]
        draw.rectangle(corners, outline=_against(colour), width=width + 2)
        draw.rectangle(corners, outline=colour, width=width)
        if number < MAX_LABELS:
            _label(picture, font, corners, box.label, colour)
    return _png(picture)


def dotted(pixels: Pixels, dots: Sequence[Dot]) -> bytes:
    """Returns a PNG of the image with dots; those far beyond its edges are left out."""
    picture = _canvas(pixels)
    draw, font = ImageDraw.Draw(picture), _font(picture)
    radius = max(3, round(max(picture.size) / 160))
    for dot in dots:
        if not all(-1 <= share <= 2 for share in dot.place):
            continue
        x, y = (round(share * size) for share, size in zip(dot.place, picture.size, strict=True))
        colour = colour_of(dot.number)
        draw.ellipse((x - radius - 1, y - radius - 1, x + radius + 1, y + radius + 1), fill=_against(colour))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        if len(dots) <= MAX_DOT_LABELS:
            _label(picture, font, (x + radius, y - radius), dot.label, colour)
    return _png(picture)


def overlaid(pixels: Pixels, classes: NDArray[np.integer], lines: Sequence[Line], clear: int | None) -> bytes:
    """Returns a PNG of the image coloured by `classes`, `[height, width]` of `pixels`, above a legend.

    The class `clear` has no colour.
    """
    shown, places = np.unique(classes, return_inverse=True)
    colours = np.array([colour_of(int(index)) for index in shown], np.float32)[places.reshape(classes.shape)]
    opacity = np.where(classes == (-1 if clear is None else clear), 0.0, _OPACITY).astype(np.float32)[..., None]
    mixed = pixels * (1 - opacity) + colours * opacity
    return _png(_with_lines(_canvas(mixed.astype(np.uint8)), lines))


@lru_cache(maxsize=4096)
def colour_of(index: int) -> Colour:
    """Returns the colour of a class: neighbours differ most."""
    red, green, blue = colorsys.hsv_to_rgb(index * _GOLDEN % 1, 0.8, _BRIGHT[index % len(_BRIGHT)])
    return round(red * 255), round(green * 255), round(blue * 255)


def _against(colour: Colour) -> Colour:
    """Returns the colour of text that can be read on a colour."""
    red, green, blue = colour
    return _INK if 0.3 * red + 0.6 * green + 0.1 * blue > 130 else _PAPER


def _canvas(pixels: Pixels) -> Image.Image:
    picture = Image.fromarray(pixels)
    scale = MIN_SIDE / max(picture.size)
    if scale <= 1:
        return picture
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _font(picture: Image.Image) -> Font:
    return ImageFont.load_default(max(13, round(max(picture.size) / 45)))


def _label(picture: Image.Image, font: Font, corners: Sequence[int], label: Line, colour: Colour) -> None:
    """Writes a label above its box, or within it where there is no room; never beyond the picture."""
    draw, size = ImageDraw.Draw(picture), picture.size
    text = f"{_shortened(draw, font, label.text, size[0] / 3)} {label.figure}"
    _, _, right, bottom = draw.textbbox((0, 0), text, font)
    width, height = math.ceil(right) + 8, math.ceil(bottom) + 6
    x = min(max(0, corners[0]), max(0, size[0] - width))
    above = corners[1] - height
    y = above if above >= 0 else min(max(0, corners[1]), max(0, size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=colour)
    draw.text((x + 4, y + 2), text, _against(colour), font)


def _shortened(draw: ImageDraw.ImageDraw, font: Font, text: str, width: float) -> str:
    """Returns `text` as one line of at most `width` pixels, its end replaced by dots where it is longer."""
    text = "".join(_plain(letter) for letter in text[:200])
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(f"{text}...", font) > width:
        text = text[:-1]
    return f"{text}..."


def _plain(letter: str) -> str:
    """Returns a letter that Pillow's own font has: without its accent, a question mark for letters of other scripts."""
    base = unicodedata.normalize("NFKD", letter)[0]
    return base if base.isascii() and base.isprintable() else "?"


def _with_lines(picture: Image.Image, lines: Sequence[Line]) -> Image.Image:
    font = _font(picture)
    row, gap = round(font.size * 1.5) if isinstance(font, ImageFont.FreeTypeFont) else 20, 10
    width = max(picture.width, MIN_SIDE)
    paper = Image.new("RGB", (width, picture.height + len(lines) * row + 2 * gap), _PAPER)
    paper.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(paper)
    for number, line in enumerate(lines):
        x, y = gap, picture.height + gap + number * row
        if line.colour:
            draw.rectangle((x, y + row // 6, x + row // 2, y + row // 6 + row // 2), fill=line.colour, outline=_FAINT)
            x += row
        figure_width = draw.textlength(line.figure, font)
        text = _shortened(draw, font, line.text, width - x - figure_width - 3 * gap)
        draw.text((x, y), text, _INK, font)
        draw.text((width - gap - figure_width, y), line.figure, _FAINT, font)
    return paper


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=_FAST)
    return file.getvalue()
