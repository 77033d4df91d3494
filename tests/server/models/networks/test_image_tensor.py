from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Color, Depth, Layout
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import ImageInput
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.networks.image_tensor import image_tensor
from xlaserve.models.networks.network_inputs import NetworkInputs


def declared(*shape: int | None, dtype: str = "float32") -> TensorShape:
    return TensorShape(shape, dtype)


@pytest.mark.parametrize(
    ("shape", "image", "size"),
    [
        ((None, 8, 9, 3), ImageInput(), (8, 9)),
        ((None, None, None, 3), ImageInput(), (None, None)),
        ((None, 8, 9, 1), ImageInput(1, Color.GREY), (8, 9)),
        ((4, 8, 9, 4), ImageInput(4, Color.RGBA), (8, 9)),
        ((None, 8, 9, 2), ImageInput(2, None), (8, 9)),
        ((None, 8, 9, 13), ImageInput(13, None), (8, 9)),
        ((None, 8, 9), ImageInput(1, Color.GREY, "NHW"), (8, 9)),
        ((None, 3, 8, 9), ImageInput(3, Color.RGB, "NCHW"), (8, 9)),
        ((None, 1, 8, 9), ImageInput(1, Color.GREY, "NCHW"), (8, 9)),
        ((None, 4, None, None), ImageInput(4, Color.RGBA, "NCHW"), (None, None)),
        ((None, 3, 9, 3), ImageInput(), (3, 9)),
        ((None, 1, 1, 64), ImageInput(64, None), (1, 1)),
        ((None, 2, 8, 9), ImageInput(9, None), (2, 8)),
    ],
)
def test_an_image_input_is_told_by_its_shape(
    shape: Any, image: ImageInput, size: tuple[int | None, int | None]
) -> None:
    found = image_tensor(declared(*shape))
    assert (found.image, found.size, found.batch, found.dtype) == (image, size, shape[0], "float32")


def test_settings_say_what_a_shape_does_not() -> None:
    assert image_tensor(declared(None, 2, 8, 9), layout=Layout.CHANNELS_FIRST).image == ImageInput(2, None, "NCHW")
    assert image_tensor(declared(None, 3, 8, 9), layout=Layout.CHANNELS_LAST).image == ImageInput(9, None)
    assert image_tensor(declared(None, 8, 9, 3), Color.BGR).image == ImageInput(3, Color.BGR)
    assert image_tensor(declared(None, None, None, None), Color.YUV).image == ImageInput(3, Color.YUV)
    assert image_tensor(declared(None, None, None, None), Color.GREY).image.channels == 1


@pytest.mark.parametrize(
    ("declares", "depth", "dtype"),
    [
        ("float32", None, "uint8"),
        ("uint8", None, "uint8"),
        ("int32", None, "uint8"),
        ("uint16", None, "uint16"),
        ("uint16", 8, "uint8"),
        ("float32", 16, "uint16"),
        ("int32", 16, "uint16"),
        ("float16", "float", "float32"),
    ],
)
def test_the_depth_is_that_of_the_settings_else_of_the_type(declares: str, depth: Depth | None, dtype: str) -> None:
    assert image_tensor(declared(None, 8, 9, 3, dtype=declares), depth=depth).image.dtype == dtype


@pytest.mark.parametrize(
    ("declares", "color", "depth"),
    [("uint8", None, 16), ("uint8", None, "float"), ("int32", None, "float"), ("float32", Color.YUV, 16)],
)
def test_a_depth_that_the_input_cannot_hold_is_refused(declares: str, color: Color | None, depth: Depth) -> None:
    with pytest.raises(ModelFailed, match="depth: expected 8"):
        image_tensor(declared(None, 8, 9, 3, dtype=declares), color, depth=depth)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "uint8", "uint16", "int32"])
def test_pixels_may_be_of_many_types(dtype: str) -> None:
    assert image_tensor(declared(None, 8, 9, 3, dtype=dtype)).takes_levels == ("int" in dtype)


@pytest.mark.parametrize(
    ("given", "settings", "field"),
    [
        (declared(None, 784), {}, "source"),
        (declared(None, 8, 9, 3, dtype="string"), {}, "source"),
        (declared(None, 8, 9, 3, 1), {}, "source"),
        (TensorShape(None, "float32"), {}, "source"),
        (declared(None, None, None, None), {}, "color"),
        (declared(None, 8, 9, 3), {"color": Color.GREY}, "color"),
        (declared(None, 8, 9, 5), {"color": Color.RGB}, "color"),
        (declared(None, 8, 9), {"layout": Layout.CHANNELS_FIRST}, "layout"),
    ],
)
def test_other_inputs_are_refused_with_the_setting_to_change(
    given: TensorShape, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ModelFailed) as refused:
        image_tensor(given, **settings)
    assert str(refused.value).partition(":")[0] == field


@pytest.mark.parametrize(
    ("shape", "layout", "other"),
    [
        ((None, 224, 398, 3), Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST),
        ((None, 3, 224, 398), Layout.CHANNELS_LAST, Layout.CHANNELS_FIRST),
    ],
)
def test_a_layout_that_takes_a_side_for_the_channels_is_refused(
    shape: tuple[int | None, ...], layout: Layout, other: Layout
) -> None:
    with pytest.raises(ModelFailed) as refused:
        image_tensor(declared(*shape), layout=layout)
    said = str(refused.value)
    assert said.startswith("layout: ")
    assert str(list(shape)) in said
    assert f"write layout: {other}" in said


def test_an_input_of_encoded_images_is_refused_with_another_export() -> None:
    with pytest.raises(ModelFailed) as refused:
        image_tensor(declared(None, dtype="string"))
    assert "tf.TensorSpec(" in str(refused.value)


@pytest.mark.parametrize("shape", [(None, 3, 4, 6), (None, 1, 8, 6), (None, 4, 6), (None, 4, 6, 2)])
def test_a_network_is_called_with_pixels_as_it_declares_them(shape: Any) -> None:
    pixels = image_tensor(declared(*shape), layout=Layout.CHANNELS_FIRST if shape[1] == 3 else None)
    height, width = (side or 0 for side in pixels.size)
    images = np.random.default_rng(0).random((2, height, width, pixels.image.channels), np.float32)
    found = NetworkInputs.of_image(pixels).last(lambda values: {"same": values})(tf.constant(images))["same"]
    is_first = pixels.image.axes == "NCHW"
    np.testing.assert_array_equal(found, np.moveaxis(images, -1, 1) if is_first else images.reshape((2, *shape[1:])))


@pytest.mark.parametrize(
    ("given", "output", "is_first"),
    [
        ((None, 8, 6, 3), (None, 2, 8, 6), True),
        ((None, 8, 6, 3), (None, 8, 6, 2), False),
        ((None, 8, 6, 3), (None, 2, 4, 3), False),
        ((None, 8, 8, 3), (None, 8, 8, 8), False),
        ((None, None, None, 3), (None, 2, None, None), False),
        ((None, 3, 8, 6), (None, 2, 4, 3), True),
        ((None, 3, 8, 6), (None, 10), False),
    ],
)
def test_maps_have_their_channels_first_as_the_input_has_or_by_their_sides(
    given: Any, output: Any, is_first: bool
) -> None:
    assert image_tensor(declared(*given)).gives_first(declared(*output)) is is_first
