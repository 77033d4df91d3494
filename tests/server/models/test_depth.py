"""Settings that a model's depth of pixels does not go with."""

from __future__ import annotations

from typing import Any, cast

import pytest

from xlaserve.config import ModelSettings
from xlaserve.engine.program import Program
from xlaserve.errors import ModelFailed
from xlaserve.images.image_input import NO_IMAGE, ImageInput, PixelType
from xlaserve.models.network_settings import check_depth
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Classification


def check(image: ImageInput, **settings: Any) -> None:
    network = Network(cast(Program, None), (8, 9), Classification(3), "random", image=image)
    assert network.inputs[0].dtype == image.dtype
    check_depth(ModelSettings(name="m", source="fake", **settings), network)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_settings_for_levels_are_refused_for_more_depth(dtype: PixelType) -> None:
    deep = ImageInput(dtype=dtype)
    check(deep, resize={"library": "tensorflow"})
    check(ImageInput(), pixel_range="0..1", resize={"library": "opencv"})
    with pytest.raises(ModelFailed, match="pixel_range"):
        check(deep, pixel_range="0..1")
    with pytest.raises(ModelFailed, match="resize"):
        check(deep, resize={"library": "opencv"})


def test_a_depth_is_that_of_the_models_images() -> None:
    check(ImageInput(dtype="uint16"), depth=16)
    check(NO_IMAGE, depth="float")
    with pytest.raises(ModelFailed, match="depth: expected none"):
        check(ImageInput(), depth="float")


@pytest.mark.parametrize("depth", [16, "float"])
@pytest.mark.parametrize(
    ("field", "value"), [("resize", {"library": "opencv"}), ("pixel_range", "0..1"), ("equalize", True)]
)
def test_settings_for_levels_are_refused_with_a_depth_without_the_model(depth: Any, field: str, value: object) -> None:
    of_levels: dict[str, Any] = {field: value}
    for fits in (None, 8):
        ModelSettings(name="m", source="fake", depth=fits, **of_levels)
    with pytest.raises(ValueError, match=f"{field}: expected .* with depth: {depth}"):
        ModelSettings(name="m", source="fake", depth=depth, **of_levels)
