"""Defaults of fit, resize and decode in the configuration that is shown."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from xlaserve import config
from xlaserve.commands.image_defaults import commented
from xlaserve.config import BucketSettings, Fit, ModelSettings, Settings
from xlaserve.models import catalog
from xlaserve.models.networks import preparation
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources.stated_preparation import stated


def comments(**fields: Any) -> dict[str, str]:
    """The comments of a model among two others, which have all three fields."""
    said = {"source": "builtin:noop", "fit": "pad", "resize": {"library": "pillow"}, "decode": "exact"}
    models = [{**said, "name": "first"}, {"name": "model", **fields}, {**said, "name": "last"}]
    settings = Settings.model_validate({"models": models})
    text = config.dump(settings)
    shown = commented(text, settings.models)
    assert yaml.safe_load(shown) == yaml.safe_load(text)
    lines = [line.partition("  # ") for line in shown.splitlines()]
    return {line.strip().removesuffix(": null"): comment for line, _, comment in lines if comment}


def saved(path: Path, name: str = "scores") -> str:
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3, name=name)]
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
        keras.Sequential(layers).save(path)
    return str(path)


def test_a_kind_of_source_tells_what_images_get(tmp_path: Path) -> None:
    found = comments(source=saved(tmp_path / "it.keras"))
    assert found["fit"] == "letterbox for detection, segmentation, keypoints, image, else resize"
    assert found["resize"].startswith("tensorflow bilinear, not antialiased, as Keras's")
    assert found["decode"].split(",")[0] in ("tensorflow", "exact")
    published = comments(source="keras.applications:ResNet50")
    assert (published["fit"].split(",")[0], published["resize"].split(",")[0]) == ("center_crop", "pillow bilinear")
    own = comments(source="keras.applications:ResNet50", weights="random")
    assert own["resize"].startswith("tensorflow bilinear")


@pytest.mark.parametrize(("task", "fit"), [("detection", "letterbox"), ("classification", "resize")])
def test_a_task_that_is_set_tells_the_fit(tmp_path: Path, task: str, fit: str) -> None:
    assert comments(source=saved(tmp_path / "it.keras"), task=task)["fit"] == f"{fit}, as is usual for {task}"


def test_fields_that_are_set_have_no_comment(tmp_path: Path) -> None:
    found = comments(source=saved(tmp_path / "it.keras"), fit="pad", resize={"library": "pillow"}, decode="fast")
    assert found == {}


def test_what_only_loading_tells_is_said_to_be_known_later(tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    for fields in (
        {"source": str(folder)},
        {"source": "keras_hub:ResNetImageClassifier", "weights": "resnet_50_imagenet"},
    ):
        found = comments(**fields)
        assert {*found} == {"fit", "resize", "decode"}
        assert all(comment.startswith("known once the model is loaded") for comment in found.values())


@pytest.mark.parametrize("source", ["keras", "builtin:digits", "keras_cv:ResNet18", "keras.applications:MobileNet"])
def test_what_is_told_is_what_a_loaded_model_has(tmp_path: Path, source: str) -> None:
    weights = None if source in ("keras", "builtin:digits") else "random"
    path = saved(tmp_path / "it.keras") if source == "keras" else source
    settings = ModelSettings(name="it", source=path, weights=weights, buckets=(BucketSettings(1),))
    assert catalog.load(settings).preparation == stated(settings)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_file_of_teachable_machine_is_told_by_what_is_in_it(tmp_path: Path, suffix: str) -> None:
    source = saved(tmp_path / f"it{suffix}", "dense_Dense1")
    found = comments(source=source)
    assert [found[name].split(",")[0] for name in ("fit", "resize", "decode")] == ["crop", "pillow lanczos", "exact"]
    assert all("Teachable Machine" in comment for comment in found.values())
    settings = ModelSettings(name="it", source=source, buckets=(BucketSettings(1),))
    assert catalog.load(settings).preparation == stated(settings) == preparation.TEACHABLE_MACHINE


def test_the_image_converter_of_a_preset_or_a_file_of_kerashub_is_told(tmp_path: Path) -> None:
    import keras_hub

    converter = keras_hub.layers.ResNetImageConverter(
        image_size=(32, 32), interpolation="bicubic", antialias=True, crop_to_aspect_ratio=False
    )
    backbone = keras_hub.models.ResNetBackbone([64], [3], [64], [1], [1], "basic_block", image_shape=(32, 32, 3))
    task = keras_hub.models.ResNetImageClassifier(
        backbone, 3, preprocessor=keras_hub.models.ResNetImageClassifierPreprocessor(image_converter=converter)
    )
    with warnings.catch_warnings():  # as in `saved`
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
        task.save(tmp_path / "it.keras")
        task.save_to_preset(str(tmp_path / "preset"))
    for fields in (
        {"source": str(tmp_path / "it.keras")},
        {"source": "keras_hub:ResNetImageClassifier", "weights": str(tmp_path / "preset")},
    ):
        found = comments(**fields)
        assert found["resize"].startswith("tensorflow bicubic, antialiased, as the preset's image converter")
        assert found["fit"].startswith("letterbox for detection")
        settings = ModelSettings.model_validate({"name": "it", "buckets": [1], **fields})
        assert catalog.load(settings).preparation == stated(settings)


@pytest.mark.parametrize("content", [b"", b"no model", b"PK\x03\x04 cut off", b"\x89HDF\r\n\x1a\n"])
def test_of_a_file_that_can_not_be_read_nothing_is_told(tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "it.keras").write_bytes(content)
    assert comments(source=str(file))["resize"].startswith("known once the model is loaded")
    (tmp_path / "image_converter.json").write_bytes(content)
    found = comments(source="keras_hub:ResNetImageClassifier", weights=str(tmp_path))
    assert found["resize"].startswith("known once the model is loaded")


def test_a_crop_is_not_for_answers_to_every_pixel() -> None:
    assert preparation.fit_of(Fit.LETTERBOX, Fit.CENTER_CROP) is Fit.LETTERBOX
    assert preparation.fit_of(Fit.RESIZE, Fit.CENTER_CROP) is Fit.CENTER_CROP
    assert preparation.fit_of(Fit.LETTERBOX, Fit.RESIZE) is Fit.RESIZE
    assert preparation.fit_of(Fit.RESIZE, None) is Fit.RESIZE


def test_the_configuration_is_shown_without_tensorflow() -> None:
    code = (
        "import sys; from xlaserve.cli import main; import contextlib\n"
        "sys.argv = ['xlaserve', 'config', '--show', '--models', '[{name: a, source: keras_cv:ResNet18}]']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "tensorflow bilinear" in shown.stdout
