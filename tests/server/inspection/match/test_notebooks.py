"""`xlaserve match` against notebooks: pipelines written with Keras, TensorFlow, Pillow and NumPy themselves."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import yaml
from numpy.typing import NDArray
from PIL import Image
from tests.server.inspection.match.conftest import SIDE

from xlaserve.commands import subject
from xlaserve.commands.command import FAILED, Invocation
from xlaserve.commands.match import COMMAND
from xlaserve.config import ModelSettings, Settings
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.programs.tf.device import Device

Pixels = NDArray[Any]
Networks = Callable[..., Path]
SIZE = (SIDE, SIDE)
BY_PILLOW = {"resize": {"library": "pillow", "filter": "bilinear"}, "decode": "exact"}
"""The settings of `load_img` with bilinear interpolation, which are no defaults of files of Keras."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves TensorFlow as it is, which this process has configured before."""
    monkeypatch.setattr(subject, "configure", lambda settings, uses_tensorflow: Device("cpu", "CPU", 1, 1))


def load_img(path: Path) -> Pixels:
    """Keras's own way, with the filter that the server has for it."""
    loaded: Pixels = keras.utils.img_to_array(keras.utils.load_img(path, target_size=SIZE, interpolation="bilinear"))
    return loaded


def nearest(path: Path) -> Pixels:
    """`load_img` without an interpolation, and so `ImageDataGenerator`."""
    loaded: Pixels = keras.utils.img_to_array(keras.utils.load_img(path, target_size=SIZE))
    return loaded


def of_a_data_set(path: Path) -> Pixels:
    """Returns pixels as `image_dataset_from_directory` loads them."""
    pixels = tf.io.decode_image(tf.io.read_file(str(path)), channels=3, expand_animations=False)
    return np.asarray(tf.image.resize(pixels, SIZE)) / 255


def cut(path: Path) -> Pixels:
    """Returns pixels as `image_dataset_from_directory(crop_to_aspect_ratio=True)` loads them."""
    pixels = tf.io.decode_image(tf.io.read_file(str(path)), channels=3, expand_animations=False)
    return np.asarray(keras.preprocessing.image.smart_resize(pixels, SIZE)) / 255


def bicubic(path: Path) -> Pixels:
    loaded = keras.utils.load_img(path, target_size=SIZE, interpolation="bicubic")
    scaled: Pixels = keras.utils.img_to_array(loaded)[..., ::-1] / 127.5 - 1
    return scaled


def unit(path: Path) -> Pixels:
    return load_img(path) / 255


def minus_one_to_one(path: Path) -> Pixels:
    scaled: Pixels = keras.applications.mobilenet_v2.preprocess_input(load_img(path))
    return scaled


def caffe(path: Path) -> Pixels:
    scaled: Pixels = keras.applications.resnet50.preprocess_input(load_img(path))
    return scaled


def torch(path: Path) -> Pixels:
    scaled: Pixels = keras.applications.densenet.preprocess_input(load_img(path))
    return scaled


def standardized(path: Path) -> Pixels:
    return np.asarray(tf.image.per_image_standardization(load_img(path)))


def blue_first(path: Path) -> Pixels:
    """Returns pixels with their channels in the order of `cv2.imread`."""
    return load_img(path)[..., ::-1] / 255


def letterboxed(path: Path, border: int = 114) -> Pixels:
    with Image.open(path) as image:
        rgb = image.convert("RGB")
        share = min(SIDE / rgb.height, SIDE / rgb.width)
        height, width = round(rgb.height * share), round(rgb.width * share)
        canvas = Image.new("RGB", SIZE, (border, border, border))
        small = rgb.resize((width, height), Image.Resampling.BILINEAR)
        canvas.paste(small, ((SIDE - width) // 2, (SIDE - height) // 2))
    return np.asarray(canvas, np.float32)


def padded(path: Path) -> Pixels:
    """Returns pixels of `tf.image.resize_with_pad`, in whole levels."""
    return letterboxed(path, border=0) / 255


def inverted(path: Path) -> Pixels:
    return 1 - grey(path)


def of_cifar(path: Path) -> Pixels:
    scaled: Pixels = (unit(path) - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.247, 0.2435, 0.2616])
    return scaled


def grey(path: Path) -> Pixels:
    loaded = keras.utils.load_img(path, color_mode="grayscale", target_size=SIZE, interpolation="bilinear")
    scaled: Pixels = keras.utils.img_to_array(loaded) / 255
    return scaled


def predicted(network: Path, photos: Path, pipeline: Callable[[Path], Pixels]) -> tuple[list[str], Pixels]:
    names = sorted(path.name for path in photos.iterdir())
    outputs: Pixels = keras.saving.load_model(network).predict(
        np.stack([pipeline(photos / name) for name in names]), verbose=0
    )
    return names, outputs


def match(
    network: Path | str, photos: Path, file: Path | None, capsys: pytest.CaptureFixture[str], **settings: Any
) -> tuple[int, str, Any]:
    """Runs the command; returns its status, what it says in comments, and the model's fields that it prints."""
    own = argparse.Namespace(
        **{"model": str(network), "images": photos, "expected": file, "limit": 0.01, "bucket": None, "timeout": 60.0}
        | settings
    )
    configured = settings.get("configured", Settings())
    status = COMMAND.run(Invocation(own, configured, lambda: configured))
    text = capsys.readouterr().out
    said = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    return status, said, (yaml.safe_load(text) or {"models": [None]})["models"][0]


@pytest.mark.parametrize(
    ("pipeline", "channels", "fields"),
    [
        (load_img, 3, {"preprocess": "none"}),
        (unit, 3, {"preprocess": "unit"}),
        (minus_one_to_one, 3, {"preprocess": "tf"}),
        (caffe, 3, {"preprocess": "caffe"}),
        (torch, 3, {"preprocess": "torch"}),
        (standardized, 3, {"preprocess": "standardize"}),
        (blue_first, 3, {"preprocess": "unit", "color": "bgr"}),
        (letterboxed, 3, {"preprocess": "none", "fit": "letterbox"}),
        (padded, 3, {"preprocess": "unit", "fit": "letterbox", "border": 0}),
        (grey, 1, {"preprocess": "unit"}),
        (inverted, 1, {"preprocess": {"divisor": 255.0, "mean": 1.0, "deviation": -1.0}}),
        (
            of_cifar,
            3,
            {
                "preprocess": {
                    "divisor": 255.0,
                    "mean": [0.4914, 0.4822, 0.4465],
                    "deviation": [0.247, 0.2435, 0.2616],
                }
            },
        ),
        (nearest, 3, {"preprocess": "none", "resize": {"library": "pillow", "filter": "nearest"}}),
        (
            bicubic,
            3,
            {"preprocess": "tf", "color": "bgr", "resize": {"library": "pillow", "filter": "bicubic"}},
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_settings_of_a_notebook_are_found(  # noqa: PLR0917 - cases and fixtures
    networks: Networks,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pipeline: Callable[[Path], Pixels],
    channels: int,
    fields: dict[str, Any],
) -> None:
    network = networks(channels)
    names, scores = predicted(network, photos, pipeline)
    photos = copytree(photos, tmp_path / "photos")
    np.savez(photos / "predictions.npz", files=names, scores=scores)
    status, said, model = match(network, photos, None, capsys)
    assert (status, "exactly" in said) == (0, True)
    assert model == {
        "name": model["name"],
        "source": str(network),
        **BY_PILLOW,
        **fields,
        "examples": {"folder": str(photos)},
    }
    assert ModelSettings.model_validate(model)


@pytest.mark.parametrize(
    ("pipeline", "fields"),
    [(of_a_data_set, {}), (cut, {"fit": "crop"})],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_data_set_is_met_up_to_the_fractions_of_levels(  # noqa: PLR0917 - cases and fixtures
    networks: Networks,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pipeline: Callable[[Path], Pixels],
    fields: dict[str, str],
) -> None:
    names, scores = predicted(networks(), photos, pipeline)
    np.savez(tmp_path / "predictions.npz", files=names, scores=scores)
    status, said, model = match(networks(), photos, tmp_path / "predictions.npz", capsys)
    assert (status, "nearly" in said) == (0, True)
    assert {name: model.get(name) for name in ("preprocess", "resize", "fit", "decode")} == {
        "preprocess": "unit",
        "resize": None,  # the default of files that Keras has saved
        "fit": None,
        "decode": None,
        **fields,
    }


def test_probabilities_that_the_notebook_made_of_logits_are_found(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = networks(activation=None)
    names, logits = predicted(network, photos, unit)
    np.savez(tmp_path / "a.npz", files=names, scores=tf.nn.softmax(logits))
    status, _, model = match(network, photos, tmp_path / "a.npz", capsys)
    assert (status, model["preprocess"], model["activation"]) == (0, "unit", "softmax")


def test_one_probability_of_two_classes_is_found_in_a_table(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = networks(classes=1, activation="sigmoid")
    names, scores = predicted(network, photos, unit)
    lines = [f"{name},{score:.9g}" for name, (score,) in zip(names, scores, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["file,dog", *lines]))
    models = (ModelSettings(name="dogs", source=str(network), task="classification"),)
    status, _, model = match("dogs", photos, tmp_path / "a.csv", capsys, configured=Settings(models=models))
    assert (status, model["name"], model["preprocess"]) == (0, "dogs", "unit")


def test_settings_that_the_images_leave_open_are_named(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, unit)
    square = [row for row, name in enumerate(names) if name in ("2.png", "3.jpg")]
    np.savez(tmp_path / "a.npz", files=np.array(names)[square], scores=scores[square])
    _, said, model = match(networks(), photos, tmp_path / "a.npz", capsys)
    assert "undecided: fit, as resize, crop, letterbox, pad give the same for these images" in said
    assert "fit" not in model, "the model's own stays"


def test_another_order_of_the_outputs_is_noticed(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, blue_first)
    np.savez(tmp_path / "a.npz", files=names, scores=np.roll(scores, 1, axis=0))
    status, said, model = match(networks(), photos, tmp_path / "a.npz", capsys)
    assert (status, model) == (FAILED, None)
    assert "with preprocess unit, color bgr" in said
    assert "another order" in said


def test_images_that_alone_differ_are_named_with_what_is_special(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in photos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photos / "0.jpg") as image:
        image.save(tmp_path / "0.jpg", exif=exif, quality=95)
    names, scores = predicted(networks(), tmp_path, unit)
    np.savez(tmp_path / "predictions.npz", files=names, scores=scores)
    status, said, _ = match(networks(), tmp_path, tmp_path / "predictions.npz", capsys)
    assert status == FAILED
    assert f"1 of {len(names)} images differ, the others are right: 0.jpg" in said
    assert "0.jpg: turned by its EXIF data" in said


def test_outputs_of_another_network_match_nothing(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=names, scores=np.random.default_rng(0).dirichlet(np.ones(5), len(names)))
    status, said, model = match(networks(), photos, tmp_path / "a.npz", capsys)
    assert (status, model) == (FAILED, None)
    assert "nothing that was tried comes near" in said
    assert said.count("# nearest: ") == 5


def test_settings_that_are_nearly_right_are_printed_with_how_far_they_are(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, unit)
    np.savez(tmp_path / "a.npz", files=names, scores=scores + 0.003 * np.ptp(scores, axis=0).max())
    status, said, model = match(networks(), photos, tmp_path / "a.npz", capsys)
    assert (status, model["preprocess"], "nearly" in said) == (0, "unit", True)
    status, said, model = match(networks(), photos, tmp_path / "a.npz", capsys, limit=0.0002)
    assert (status, model) == (FAILED, None)


def test_outputs_outside_the_folder_are_to_be_copied_for_examples(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, unit)
    photos, file = copytree(photos, tmp_path / "photos"), tmp_path / "a.npz"
    np.savez(file, files=names, scores=scores)
    status, said, model = match(networks(), photos, file, capsys)
    assert (status, "examples" in model) == (0, False)
    assert f"cp {file} {photos}/predictions.npz" in said
    (photos / "predictions.npz").write_bytes(file.read_bytes())
    _, said, model = match(networks(), photos, photos / "predictions.npz", capsys)
    assert (model["examples"], "cp " in said) == ({"folder": str(photos)}, False)


def test_a_difference_beyond_the_default_is_allowed_where_it_is_printed(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, unit)
    photos = copytree(photos, tmp_path / "photos")
    np.savez(photos / "predictions.npz", files=names, scores=scores + 0.02 * scores.max())
    status, _, model = match(networks(), photos, None, capsys, limit=0.05)
    assert (status, model["examples"]) == (0, {"folder": str(photos), "max_difference": 0.05})
    status, _, model = match(networks(), photos, None, capsys)
    assert (status, model) == (FAILED, None)


def test_fields_of_a_configured_model_are_kept_where_they_are_right(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, scores = predicted(networks(), photos, blue_first)
    photos = copytree(photos, tmp_path / "photos")
    np.savez(photos / "predictions.npz", files=names, scores=scores)
    own = {
        "name": "net",
        "source": str(networks()),
        "labels": [*"abcde"],
        "preprocess": "unit",
        "color": "rgb",
        "fit": "center_crop",
        "shorter_side": 32,
        "buckets": [2],
        "examples": {"folder": "others", "min_agreement": 0.9},
    }
    configured = Settings.model_validate({"models": [own]})
    status, _, model = match("net", photos, None, capsys, configured=configured)
    found = {"color": "bgr", "fit": "resize", "examples": {"folder": str(photos), "min_agreement": 0.9}, **BY_PILLOW}
    assert status == 0
    assert model == {**{name: value for name, value in own.items() if name != "shorter_side"}, **found}
    assert ModelSettings.model_validate(model)


def test_one_image_tells_too_little_and_is_refused(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *_ = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=[name], scores=np.full((1, 5), 0.2))
    with pytest.raises(ModelFailed, match="expected outputs for several images"):
        match(networks(), photos, tmp_path / "a.npz", capsys)


def test_equal_outputs_tell_nothing_and_are_refused(
    networks: Networks, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=names, scores=np.full((len(names), 5), 0.2))
    with pytest.raises(ModelFailed, match="the same for all images"):
        match(networks(), photos, tmp_path / "a.npz", capsys)


def test_a_network_that_is_random_is_refused(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Module(tf.Module):
        @tf.function(autograph=False)
        def give(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"scores": tf.reduce_mean(photo, axis=(1, 2)) * tf.random.uniform((1, 3))}

    module = Module()
    spec = tf.TensorSpec((None, SIDE, SIDE, 3), tf.float32, name="photo")
    tf.saved_model.save(module, str(tmp_path / "random"), signatures=module.give.get_concrete_function(spec))
    names = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=names, scores=np.random.default_rng(0).random((len(names), 3)))
    with pytest.raises(ModelFailed, match="differently each time"):
        match(tmp_path / "random", photos, tmp_path / "a.npz", capsys)


@pytest.mark.parametrize(("count", "fields"), [(2, {}), (1, {"layout": "none"})])
def test_a_model_of_other_inputs_than_one_image_is_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, fields: dict[str, Any]
) -> None:
    pixels = [keras.Input((*SIZE, 3), name=f"photo{number}") for number in range(count)]
    flat = [keras.layers.Flatten()(each) for each in pixels]
    outputs = keras.layers.Dense(5)(flat[0] if count == 1 else keras.layers.Concatenate()(flat))
    with warnings.catch_warnings():
        # Where it saves them, Keras hands its variables to NumPy 2 in the way of NumPy 1.
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
        keras.Model(pixels, outputs).save(tmp_path / "other.keras")
    models = (ModelSettings(name="other", source=str(tmp_path / "other.keras"), **fields),)
    names = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=names, scores=np.random.default_rng(0).random((len(names), 5)))
    with pytest.raises(ModelFailed, match="one image, got other inputs: photo0"):
        match("other", photos, tmp_path / "a.npz", capsys, configured=Settings(models=models))


def test_random_weights_are_refused(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = (ModelSettings(name="m", source="keras.applications:MobileNetV2", weights="random", input_size=(32, 32)),)
    names = sorted(path.name for path in photos.iterdir())
    np.savez(tmp_path / "a.npz", files=names, scores=np.random.default_rng(0).random((len(names), 1000)))
    with pytest.raises(ConfigError, match="random weights"):
        match("m", photos, tmp_path / "a.npz", capsys, configured=Settings(models=models))


def test_what_is_no_folder_is_refused(networks: Networks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="expected a folder of images"):
        match(networks(), tmp_path / "none", tmp_path / "a.npz", capsys)
