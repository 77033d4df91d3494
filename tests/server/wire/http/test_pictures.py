"""Which requests get pictures, and of what."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from xlaserve.config import Color
from xlaserve.errors import ImageTooLarge, InvalidArgument
from xlaserve.images.frame import whole
from xlaserve.models.task import Classification, ClassSequence, Detection, ImageToImage, Keypoints, Segmentation
from xlaserve.pipeline.pipeline import Drawing, Drawn, Rendering
from xlaserve.wire.http import pictures, vision_methods
from xlaserve.wire.http.pictures import DrawnClasses, DrawnMap, DrawnObjects, MadeImage

PIXELS = np.full((40, 60, 3), 128, np.uint8)
FRAME = whole(40, 60)


@pytest.mark.parametrize(
    ("accept", "is_wanted"),
    [
        ("image/png", True),
        ("IMAGE/PNG;q=0.9, image/webp", True),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("image/png, application/json", False),
        ("image/png, */*;q=0.1", False),
        ("image/*", False),
    ],
)
def test_a_picture_is_for_who_accepts_nothing_else(accept: str, is_wanted: bool) -> None:
    assert pictures.is_wanted({"accept": accept} if accept else {}) == is_wanted


@pytest.mark.parametrize("images", [0, 2])
def test_a_picture_is_of_one_image(images: int) -> None:
    with pytest.raises(InvalidArgument, match="image: expected one, as the answer is to be image/png"):
        vision_methods._drawn(vision_methods.Likeliest(3), images)


def test_no_picture_shows_an_embedding() -> None:
    with pytest.raises(InvalidArgument, match="accept"):
        vision_methods._drawn(vision_methods.Vectors(), 1)


def drawing_of(rendering: Rendering) -> Drawing:
    drawn = vision_methods._drawn(rendering, 1)
    assert isinstance(drawn, Drawn)
    return drawn.drawing


def test_each_task_is_drawn() -> None:
    scores = np.array([[0.1, np.nan, 0.7]], np.float32)
    boxes = np.array([[[5, 5, 20, 20], [np.nan] * 4, [0, 0, 0, 0]]], np.float32)
    found = (boxes, np.array([[0.9, np.nan, 0]], np.float32), np.array([[1, 9, -1]], np.int32), np.array([2], np.int32))
    map_ = np.arange(40 * 60).reshape(1, 40, 60) % 300
    for rendering, task, outputs in (
        (vision_methods.Likeliest(9), Classification(3), (scores,)),
        (vision_methods.DetectedObjects(0.0, 0), Detection(3, max_detections=3), found),
        (vision_methods.ClassMaps(True, 9), Segmentation(300), (map_,)),
        (vision_methods.LocatedKeypoints(0.0), Keypoints(3, has_scores=True), (boxes[..., :3],)),
        (vision_methods.LocatedKeypoints(0.0), Keypoints(3), (boxes[..., :2] * 1e9,)),
        (vision_methods.Transcripts(), ClassSequence(3, steps=5), (np.full((1, 5, 3), np.nan, np.float32),)),
    ):
        png = drawing_of(rendering).drawer(task)(outputs, FRAME, PIXELS)
        assert Image.open(io.BytesIO(png)).size[0] >= 480


def test_an_image_that_a_model_makes_is_the_picture() -> None:
    rendering = vision_methods._drawn(vision_methods.MadeImages(99_999), 1)
    assert isinstance(rendering, MadeImage)
    png = rendering.renderer(ImageToImage(Color.RGB))((PIXELS[None],), FRAME)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), PIXELS)


@pytest.mark.parametrize("rendering", [vision_methods.MadeImages(20), MadeImage(20)])
def test_images_larger_than_messages_are_refused(rendering: vision_methods.MadeImages | MadeImage) -> None:
    with pytest.raises(ImageTooLarge):
        rendering.renderer(ImageToImage(Color.RGB))((PIXELS[None],), FRAME)


def test_drawings_are_told_apart() -> None:
    assert isinstance(drawing_of(vision_methods.Likeliest(1)), DrawnClasses)
    assert isinstance(drawing_of(vision_methods.DetectedObjects(0, 0)), DrawnObjects)
    assert isinstance(drawing_of(vision_methods.ClassMaps(False, 9)), DrawnMap)
