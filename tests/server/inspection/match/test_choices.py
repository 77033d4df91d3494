from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xlaserve.config import ModelSettings, ResizeLibrary
from xlaserve.inspection.match.choices import choices_of
from xlaserve.models import catalog


@pytest.mark.parametrize(("depth", "has_opencv"), [(8, True), (16, False), ("float", False)])
def test_only_resizings_that_the_depth_takes_are_tried(
    networks: Callable[..., Path], depth: Any, has_opencv: bool
) -> None:
    model = catalog.load(ModelSettings(name="it", source=str(networks(1)), depth=depth))
    (resize,) = [choice for choice in choices_of(model) if choice.field == "resize"]
    assert any(one.library is ResizeLibrary.OPENCV for one in resize.values) is has_opencv
    assert {one.library for one in resize.values} >= {ResizeLibrary.TENSORFLOW, ResizeLibrary.PILLOW}
