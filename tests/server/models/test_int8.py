"""Images that models are calibrated on, as the server would decode them, and those that are left out."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xlaserve.config import BucketSettings, ModelSettings, Precision
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.images.decoder import ImageLimits
from xlaserve.models import catalog, int8
from xlaserve.models.catalog import Model
from xlaserve.models.int8 import MIN_IMAGES, ImageFolder
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.task import Detection
from xlaserve.programs.openvino.openvino_program import ConvertedGraph

LIMITS = ImageLimits(max_image_bytes=100_000, max_image_pixels=1_000_000)
SIZE = (32, 32)


@pytest.fixture(scope="module")
def model() -> Model:
    buckets = (BucketSettings(1), BucketSettings(2))
    return catalog.load(ModelSettings(name="digits", source="builtin:digits", buckets=buckets))


def save(file: Path, seed: int, mode: str = "RGB", kind: str = "PNG") -> None:
    levels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), np.uint8)
    Image.fromarray(levels).convert(mode).save(file, kind)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (folder := tmp_path / "images").mkdir()
    (folder / "class").mkdir()
    for number in range(MIN_IMAGES):
        save(folder / ("class" if number % 2 else "") / f"{number:03}.png", number)
    return folder


def test_one_image_of_five_is_held_out_and_all_are_resized_as_served(images: Path, model: Model) -> None:
    folder = ImageFolder(images, 500, model, LIMITS)
    assert (len(folder.held_out), len(folder.calibrating)) == (MIN_IMAGES // 5, MIN_IMAGES - MIN_IMAGES // 5)
    assert not {*folder.held_out} & {*folder.calibrating}
    for file, decoded in zip(folder.held_out, folder.decode(folder.held_out, SIZE), strict=True):
        with Image.open(file) as image:
            wanted = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(decoded.pixels, wanted)


def test_what_is_no_image_is_left_out_with_the_reason(images: Path, model: Model) -> None:
    (images / "notes.txt").write_text("no image")
    (images / "empty.png").touch()
    (images / "film.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * LIMITS.max_image_bytes)
    (images / ".hidden.png").write_text("hidden")
    os.mkfifo(images / "pipe.png")
    (images / "nowhere.png").symlink_to("nothing")
    (images / "itself").symlink_to(images)
    Image.new("RGB", (1001, 1000)).save(images / "wide.png")
    for mode, kind in (("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("1", "PNG"), ("P", "PNG")):
        save(images / f"a {mode}.image", 0, mode, kind)
    folder = ImageFolder(images, 500, model, LIMITS)
    assert {file.name for file in folder.skipped} == {"notes.txt", "empty.png", "film.png", "wide.png"}
    assert "expected JPEG, PNG or WebP" in folder.skipped[images / "notes.txt"]
    assert len(folder.calibrating) + len(folder.held_out) == MIN_IMAGES + 5
    assert {one.pixels.shape for one in folder.decode(folder.calibrating, SIZE)} == {(32, 32, 3)}


@pytest.mark.parametrize("count", [0, 1, MIN_IMAGES - 1])
def test_too_few_images_are_refused(count: int, model: Model, tmp_path: Path) -> None:
    for number in range(count):
        save(tmp_path / f"{number}.png", number)
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(
        ConfigError, match=rf"at least 50 images in .*, got {count} and 1 other files; notes.txt: image: "
    ):
        ImageFolder(tmp_path, 500, model, LIMITS)


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_folder_is_refused(name: str, model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--images: expected a folder, got"):
        ImageFolder(tmp_path / name, 500, model, LIMITS)


def test_of_too_many_images_as_many_are_taken_the_same_each_time(images: Path, model: Model) -> None:
    for number in range(MIN_IMAGES):
        save(images / f"x{number}.png", number)
    folder, again = (ImageFolder(images, MIN_IMAGES, model, LIMITS) for _ in range(2))
    names = [file.name for file in (*folder.held_out, *folder.calibrating)]
    assert len(names) == MIN_IMAGES
    assert MIN_IMAGES / 4 < sum(name.startswith("x") for name in names) < MIN_IMAGES * 3 / 4
    assert folder.held_out == again.held_out
    assert folder.calibrating == again.calibrating


def test_cyclic_names_and_other_files_leave_out_no_kind_of_image(images: Path, model: Model) -> None:
    for file in [*images.rglob("*.png")]:
        file.with_suffix(".json").write_text("{}")
    folder = ImageFolder(images, MIN_IMAGES, model, LIMITS)
    assert len(folder.held_out) + len(folder.calibrating) == MIN_IMAGES
    assert len({int(file.stem) % 5 for file in folder.held_out}) > 2


def test_fewer_images_than_are_needed_can_not_be_asked_for(images: Path, model: Model) -> None:
    with pytest.raises(ConfigError, match="--most-images: expected at least 50, got 49"):
        ImageFolder(images, MIN_IMAGES - 1, model, LIMITS)


def test_files_that_may_not_be_looked_at_are_left_out(
    images: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = os.stat

    def stat(path: os.PathLike[str], **options: bool) -> os.stat_result:
        if str(path).endswith("secret"):
            raise PermissionError
        return looked_at(path, **options)

    (images / "secret").touch()
    monkeypatch.setattr(os, "stat", stat)
    assert len(ImageFolder(images, 500, model, LIMITS).calibrating) == MIN_IMAGES - MIN_IMAGES // 5


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # NNCF's
@pytest.mark.skipif(importlib.util.find_spec("nncf") is None, reason="needs nncf")
def test_each_size_that_has_buckets_is_made_and_measured(images: Path, tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    pixels = keras.Input((None, None, 3))
    maps = keras.layers.Conv2D(8, 3, strides=2, activation="relu")(pixels / 255)
    scores = keras.layers.Dense(4, activation="softmax")(keras.layers.GlobalAveragePooling2D()(maps))
    keras.Model(pixels, scores).save(source := tmp_path / "small.keras")
    buckets = (BucketSettings(1, 16, 16), BucketSettings(2, 16, 16), BucketSettings(1, 16, 24))
    model = catalog.load(ModelSettings(name="small", source=str(source), buckets=buckets))
    made = list(int8.make(model, ImageFolder(images, 500, model, LIMITS)))
    assert [(one.size, one.bucket.batch) for one in made] == [((16, 16), 2), ((16, 24), 1)]
    for one in made:
        assert one.graph.is_int8
        assert one.held_out == MIN_IMAGES // 5
        assert 0.8 <= one.agreement <= 1
        assert {Precision.FLOAT32, Precision.INT8} <= one.speeds.keys()
        assert all(speed.seconds > 0 for speed in one.speeds.values())


class Detects:
    """A compiled detector of batches of one, which finds one object in some of the images."""

    def __init__(self, *finds: int) -> None:
        self._finds = finds
        self._runs = 0

    def __call__(self, pixels: Images) -> Outputs:
        count = int(self._runs in self._finds)
        self._runs += 1
        boxes, scores = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3), np.float32)
        boxes[0, :count], scores[0, :count] = (0, 0, 8, 8), 0.5
        return boxes, scores, np.where(scores > 0, 0, -1).astype(np.int32), np.array([count], np.int32)


def test_a_model_that_openvino_computes_wrongly_is_refused(images: Path, tmp_path: Path) -> None:
    pixels = keras.Input((16, 16, 3), dtype="uint8")
    twice = pixels + pixels  # 128 is 0, in OpenVINO 255
    keras.Model(pixels, keras.layers.GlobalAveragePooling2D()(twice / 255)).save(source := tmp_path / "wraps.keras")
    model = catalog.load(ModelSettings(name="wraps", source=str(source), buckets=(BucketSettings(1),)))
    with pytest.raises(ModelFailed, match="mode openvino, bucket 1x16x16: it computes something other than its model"):
        next(int8.make(model, ImageFolder(images, 500, model, LIMITS)))


def test_only_images_with_objects_say_how_well_a_detector_agrees(
    images: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {Precision.FLOAT32: Detects(2, 3), Precision.INT8: Detects(3, 5)}
    monkeypatch.setattr(int8, "_compiled", lambda graph, precision, bucket: arms[precision])
    folder, graph = ImageFolder(images, 500, model, LIMITS), ConvertedGraph(None)
    found = int8._compare(replace(model, task=Detection(2, max_detections=3)), folder, SIZE, graph, graph)
    assert [one.agreement for one in found] == [0.0, 1.0, 0.0]


def test_a_detector_that_finds_nothing_is_refused(images: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_compiled", lambda *_: Detects())
    folder, graph = ImageFolder(images, 500, model, LIMITS), ConvertedGraph(None)
    with pytest.raises(ModelFailed, match="finds no objects in the held-out images"):
        int8._compare(replace(model, task=Detection(2, max_detections=3)), folder, SIZE, graph, graph)


def test_nan_is_no_agreement(images: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_compiled", lambda *_: lambda pixels: (np.full((1, 10), np.nan, np.float32),))
    graph = ConvertedGraph(None)
    with pytest.raises(ModelFailed, match="its answers in float32 are NaN or infinite"):
        int8._compare(model, ImageFolder(images, 500, model, LIMITS), SIZE, graph, graph)
