"""The scans that `builtin:digits` is trained and tested on, as the PNG files that a client would send.

They are scikit-learn's bundled digits: 1,797 handwritten digits, scanned and reduced to 8 x 8 pixels of 17 levels of
ink. As an image the paper is black and the ink white, so that level 16 becomes 255.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SEED: Final = 2024
HELD_OUT: Final = 0.25
SCAN_SIDE: Final = 8

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class DigitImage:
    """One scan."""

    index: int
    """Its place in scikit-learn's data."""
    label: int
    """The digit, 0 to 9."""
    png: bytes
    """The scan as an encoded greyscale image."""


def digit_images(
    split: Split, *, side: int = SCAN_SIDE, resample: Image.Resampling = Image.Resampling.NEAREST
) -> list[DigitImage]:
    """Returns the scans of one side of the split, in the order of the data; needs scikit-learn.

    The split is fixed and stratified: a quarter is held out. `side` enlarges the images, to `side` x `side` pixels.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 - only training and tests have scikit-learn
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    levels, labels = load_digits(return_X_y=True)
    pixels = np.rint(levels.reshape(-1, SCAN_SIDE, SCAN_SIDE) * (255 / 16)).astype(np.uint8)
    parts = train_test_split(np.arange(len(labels)), test_size=HELD_OUT, stratify=labels, random_state=SEED)
    chosen = sorted(parts[0 if split == "train" else 1].tolist())
    return [DigitImage(i, int(labels[i]), _png(pixels[i], side, resample)) for i in chosen]


def _png(pixels: NDArray[np.uint8], side: int, resample: Image.Resampling) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), resample).save(buffer, "PNG")
    return buffer.getvalue()
