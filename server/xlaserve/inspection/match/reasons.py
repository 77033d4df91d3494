"""Possible reasons why no settings give the expected answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve.engine.program import Outputs
from xlaserve.images.orientation import orientation
from xlaserve.inspection.match.answers import Answers
from xlaserve.inspection.match.choices import Changes
from xlaserve.inspection.match.search import Found
from xlaserve.models.example_files import Examples
from xlaserve.models.examples import Compared
from xlaserve.models.task import Detection, Task

CLOSE: Final = 0.1
"""The largest difference of answers that other resizing makes, as a rule."""
MOST_ORDERED: Final = 20
"""Images of which the order is looked at."""
_MOST_NUMBERS: Final = 1 << 16
_MAX_NAMED: Final = 4


def other_order(answers: Answers, candidates: Iterable[Changes]) -> Changes | None:
    """Returns settings with which the answers are the expected ones, but those of other images; None without such.

    As where a data set was shuffled after its names were listed.
    """
    task, rows = answers.model.task, tuple(range(min(len(answers.examples), MOST_ORDERED)))
    if isinstance(task, Detection) or len(rows) < 2:
        return None
    wanted = _flat(task, answers.wanted(rows))
    if wanted is None:
        return None
    largest = float(np.abs(wanted).max()) or 1.0
    for changes in candidates:
        got = _flat(task, answers.of(changes, rows))
        assert got is not None
        apart = np.stack([np.abs(got - row).max(axis=1) for row in wanted]) / largest
        nearest = apart.argmin(axis=1)
        is_close = apart.min(axis=1) <= CLOSE * np.median(apart)
        is_order = len(set(nearest.tolist())) == len(rows) and bool(np.any(nearest != np.arange(len(rows))))
        if is_order and bool(np.all(is_close)):
            return changes
    return None


def reasons(best: Found, examples: Examples, most: float) -> Iterator[str]:
    """Yields what the nearest answers may mean, where they are further off than `most`."""
    compared = best.compared
    off = np.flatnonzero(~(compared.apart <= most))
    if 0 < len(off) <= len(examples) / 2:
        yield f"{len(off)} of {len(examples)} images differ, the others are right: {_named(examples, off)}"
        yield from _facts(examples, off)
        return
    yield _of_all(compared)


def _of_all(compared: Compared) -> str:
    difference = compared.difference
    if difference.largest <= CLOSE and difference.agreement in (None, 1.0):
        return (
            "the answers differ a little for most images: the pixels are nearly the same, such as resized by another"
            " library or filter, cut otherwise, or stored as JPEG once more"
        )
    return (
        "nothing that was tried comes near: perhaps the outputs are those of other weights, of another layer than the"
        " last, of other images or of training mode (dropout, augmentation); or the notebook scaled by a mean and"
        " deviation of its own, which match tries where the configured model has them, such as"
        " preprocess: {mean: 127, deviation: 128}; or it cut or padded images without resizing them, which no fit does"
    )


def _facts(examples: Examples, rows: NDArray[np.intp]) -> Iterator[str]:
    """Yields what libraries read in different ways, where it is in one of these images."""
    turned, clear, deep, inked = [], [], [], []
    for row in rows.tolist():
        try:
            with Image.open(examples.path(row)) as image:
                if orientation(image.info) > 1:
                    turned.append(row)
                if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                    clear.append(row)
                if image.mode.startswith(("I", "F")):
                    deep.append(row)
                if image.mode in ("CMYK", "YCCK"):
                    inked.append(row)
        except (OSError, ValueError, Image.DecompressionBombError):
            continue
    jpegs = {row for row in range(len(examples)) if examples.names[row].lower().endswith((".jpg", ".jpeg"))}
    if jpegs == set(rows.tolist()) and not turned:
        yield "these are all JPEG files: another decoder, such as tf.io.decode_jpeg, gives other levels"
    for found, fact in (
        (turned, "turned by its EXIF data, which Keras's load_img and tf.io.decode_jpeg leave as it is"),
        (clear, "transparent: the server drops that, and does not blend it"),
        (deep, "of 16 bits: see the setting grey16"),
        (inked, "in CMYK, which libraries convert in several ways"),
    ):
        if found:
            yield f"{_named(examples, found)}: {fact}"


def _flat(task: Task, outputs: Outputs) -> NDArray[np.float64] | None:
    flat = np.concatenate(
        [output.reshape(len(output), -1).astype(np.float64) for output in task.comparable(outputs)], 1
    )
    return flat if flat.shape[1] <= _MOST_NUMBERS else None


def _named(examples: Examples, rows: Sequence[int] | NDArray[np.intp]) -> str:
    names = [examples.names[row] for row in rows]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"
