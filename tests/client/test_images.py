from __future__ import annotations

import numpy as np
import pytest

from xlaserve_client import images


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        ((8, 9), (1, 8, 9, 1)),
        ((8, 9, 1), (1, 8, 9, 1)),
        ((8, 9, 3), (1, 8, 9, 3)),
        ((8, 9, 4), (1, 8, 9, 4)),
        ((5, 28, 28), (5, 28, 28, 1)),
        ((5, 28, 28, 1), (5, 28, 28, 1)),
        ((5, 28, 27, 13), (5, 28, 27, 13)),
        ((5, 3, 28, 27), (5, 28, 27, 3)),
        ((5, 1, 28, 27), (5, 28, 27, 1)),
        ((5, 2, 2, 3), (5, 2, 2, 3)),
    ],
)
def test_pixels_get_a_batch_and_their_channels_last(shape: tuple[int, ...], sent: tuple[int, ...]) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    loaded = images.load(pixels)
    assert isinstance(loaded, np.ndarray)
    assert loaded.shape == sent
    is_first = len(shape) == len(sent) and shape != sent
    given = pixels.transpose(0, 2, 3, 1) if is_first else pixels
    np.testing.assert_array_equal(loaded, given.reshape(sent))


@pytest.mark.parametrize("shape", [(), (8,), (0, 9), (1, 2, 3, 4, 5)])
def test_arrays_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="images"):
        images.load(np.zeros(shape, np.uint8))
