from __future__ import annotations

from typing import Any, cast

import pytest

from xlaserve.config import Color, Fit, ModelSettings
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification, Detection, Embedding, ImageToImage, Segmentation, Task


@pytest.mark.parametrize(
    ("task", "configured", "used"),
    [
        (Classification(3), None, Fit.RESIZE),
        (Embedding(3), None, Fit.RESIZE),
        (Detection(3, max_detections=5), None, Fit.LETTERBOX),
        (Segmentation(3), None, Fit.LETTERBOX),
        (ImageToImage(Color.RGB), None, Fit.LETTERBOX),
        (Classification(3), Fit.PAD, Fit.PAD),
        (Detection(3, max_detections=5), Fit.RESIZE, Fit.RESIZE),
    ],
)
def test_images_are_fitted_as_configured_or_as_suits_the_task(task: Task, configured: Fit | None, used: Fit) -> None:
    settings = ModelSettings(name="m", source="fake", fit=configured)
    assert Model(cast(Any, None), (None, None), task, "random", settings=settings, buckets=()).fit is used
