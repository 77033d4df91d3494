"""Equalized histograms compared with OpenCV's."""

from __future__ import annotations

from functools import partial

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.server.images.encoded import LIMITS, encode

from xlaserve.config import Color, Fit, ResizeLibrary, ResizeSettings
from xlaserve.images import colors
from xlaserve.images import decoder as image_decoder
from xlaserve.images.frame import place

RANDOM = np.random.default_rng(2)


def levels(kind: str, height: int, width: int) -> NDArray[np.uint8]:
    values = {
        "noise": RANDOM.integers(0, 256, (height, width)),
        "dark": RANDOM.normal(40, 12, (height, width)),
        "two": RANDOM.integers(0, 2, (height, width)) * 90 + 20,
        "one": np.full((height, width), 77),
    }[kind]
    return np.asarray(np.clip(values, 0, 255), np.uint8)


@pytest.mark.parametrize("kind", ["noise", "dark", "two", "one"])
def test_levels_are_those_of_opencv(kind: str) -> None:
    for height, width in ((1, 1), (1, 9), (32, 32), (97, 61), (700, 900)):
        grey = levels(kind, height, width)
        got = colors.equalized(grey[:, :, np.newaxis])
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got[:, :, 0], cv2.equalizeHist(grey))


def test_an_image_is_equalized_once_it_has_the_models_size() -> None:
    grey = levels("dark", 90, 60)
    resize = ResizeSettings(library=ResizeLibrary.OPENCV)
    for fit, size in ((Fit.RESIZE, (32, 32)), (Fit.LETTERBOX, (21, 32))):
        where = partial(place, input_height=32, input_width=32, fit=fit)
        decoded = image_decoder.decode(
            encode(Image.fromarray(grey)), where, LIMITS, color=Color.GREY, resize=resize, equalize=True
        )
        wanted = cv2.equalizeHist(np.asarray(cv2.resize(grey, size), np.uint8))
        left = decoded.frame.left
        np.testing.assert_array_equal(decoded.pixels[:, left : left + size[0], 0], wanted)
        assert (decoded.pixels[:, :left] == 114).all()
