from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xlaserve.config import AutoBuckets, Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.config.sources import Source
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.sources import built_in, random_weights
from xlaserve.models.task import Classification

SIDE = 64
BATCH = 2
PIXELS = np.random.default_rng(0).integers(0, 256, (BATCH, SIDE, SIDE, 3), np.uint8)
SaveKeras = Callable[..., str]
TinyModel = Callable[..., Any]


def application(name: str = "MobileNet", weights: str = "random", **fields: Any) -> ModelSettings:
    fields = {"input_size": (SIDE, SIDE), "buckets": (BucketSettings(BATCH),)} | fields
    return ModelSettings(name="it", source=f"keras.applications:{name}", weights=weights, **fields)


def from_file(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(BATCH),)} | fields))


def run(model: catalog.Model, pixels: NDArray[np.uint8] = PIXELS, mode: Mode = Mode.GRAPH) -> NDArray[Any]:
    bucket = Bucket(pixels.shape[0], pixels.shape[1], pixels.shape[2])
    return model.program.compile(mode, bucket).executable(pixels)[0]


def labels_of(model: catalog.Model) -> tuple[str, ...] | None:
    assert isinstance(model.task, Classification)
    return model.task.labels


def reason(settings: ModelSettings) -> str:
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings)
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.fixture(scope="module")
def mobilenet() -> catalog.Model:
    return catalog.load(application())


def test_random_weights_are_logged_and_the_same_each_time(
    mobilenet: catalog.Model, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(7)
    expected_next = random.Random(7).random()
    model = catalog.load(application())
    assert random.random() == expected_next
    assert model.weights == "random"
    assert "model it has random weights" in caplog.text
    assert model.buckets == (Bucket(BATCH, SIDE, SIDE),)
    assert model.task == Classification(1000)
    np.testing.assert_array_equal(run(model), run(mobilenet))


def test_random_weights_and_draws_of_other_threads_are_independent() -> None:
    def seed(draws: int) -> tuple[int, list[float]]:
        with random_weights.seeded():
            drawn = [random.random() for _ in range(draws)]
            return keras.initializers.GlorotUniform().seed, drawn

    random.seed(7)
    expected = random.Random(7).random()
    (alone, _), (beside, drawn) = seed(0), seed(1)
    assert alone == beside
    assert drawn == [expected]


def test_modes_agree_and_tell_images_apart(mobilenet: catalog.Model) -> None:
    xla, graph, eager = (run(mobilenet, mode=mode) for mode in (Mode.XLA, Mode.GRAPH, Mode.EAGER))
    np.testing.assert_allclose(xla, graph, atol=1e-5)
    np.testing.assert_allclose(eager, graph, atol=1e-5)
    np.testing.assert_allclose(graph.sum(axis=1), 1, atol=1e-4)
    assert np.abs(graph[0] - graph[1]).max() > 1e-3


def test_an_application_takes_a_weights_file_and_its_familys_preprocessing(keras_file: SaveKeras) -> None:
    keras_model = keras.applications.MobileNet(weights=None, input_shape=(SIDE, SIDE, 3))
    pixels = keras.applications.mobilenet.preprocess_input(PIXELS.astype(np.float32))
    for layer in keras_model.layers:
        layer.momentum = 0.0
    keras_model(pixels, training=True)
    expected = keras_model(pixels, training=False)
    for name in ("trained.weights.h5", "trained.h5"):
        model = catalog.load(application(weights=keras_file(keras_model, name)))
        assert model.weights == name
        assert labels_of(model) is None
        np.testing.assert_allclose(run(model), expected, atol=1e-5)


@pytest.fixture
def small_application(monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel) -> list[str | None]:
    """Has a small network in place of MobileNet, and returns the weights that it is asked for."""
    asked: list[str | None] = []

    def constructor(weights: str | None, input_shape: tuple[int, int, int] = (SIDE, SIDE, 3)) -> Any:
        asked.append(weights)
        return tiny_model(*input_shape[:2], classes=1000)

    constructor.__module__ = keras.applications.MobileNet.__module__
    monkeypatch.setattr(keras.applications, "MobileNet", constructor)
    return asked


@pytest.mark.usefixtures("small_application")
def test_preprocess_overrides_the_familys() -> None:
    by_family, as_family, other = (run(catalog.load(application(preprocess=how))) for how in ("auto", "tf", "unit"))
    np.testing.assert_array_equal(by_family, as_family)
    assert np.abs(other - by_family).max() > 1e-5


def test_imagenet_weights_come_with_names(monkeypatch: pytest.MonkeyPatch, small_application: list[str | None]) -> None:
    names = tuple(f"class {i}" for i in range(1000))
    monkeypatch.setattr("xlaserve.models.class_names.imagenet", lambda: names)
    model = catalog.load(from_file("keras.applications:MobileNet"))
    assert small_application == ["imagenet"]
    assert model.weights == "imagenet"
    assert labels_of(model) == names


def test_without_a_network_imagenet_weights_fail_with_the_ways_out(tmp_path: Path) -> None:
    program = """
import os, sys, urllib.request
from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog, class_names
from xlaserve.models.sources import applications
applications.STALL_TIMEOUT_S = 0.5
for proxy in sys.argv[1:]:
    os.environ.update(dict.fromkeys(("http_proxy", "https_proxy"), f"http://{proxy}"))
    urllib.request.install_opener(urllib.request.build_opener())
    try:
        catalog.load(ModelSettings(name="it", source="keras.applications:MobileNet"))
    except ModelFailed as failure:
        print("failure:", failure)
    print("names:", class_names.imagenet(timeout_s=0.5))
"""
    unset = ("HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        proxies = ["127.0.0.1:9", f"127.0.0.1:{silent.getsockname()[1]}"]
        ran = subprocess.run(
            [sys.executable, "-c", program, *proxies],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env=environment | {"KERAS_HOME": str(tmp_path)},
        )
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("failure:", "names:"))]
    assert lines[1::2] == ["names: None"] * 2
    for failure in lines[::2]:
        assert failure.startswith("failure: weights: https://storage.googleapis.com/")
        assert "mobilenet_1_0_224_tf.h5" in failure
        assert "~/.keras/models" in failure
        assert str(tmp_path) not in failure


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (application("MobilNetv2"), "source: keras.applications has no MobilNetv2; did you mean MobileNetV2"),
        (application("Zzz"), "source: keras.applications has no Zzz; expected one of ConvNeXtBase, "),
        (application("mobilenet"), "source: keras.applications has no mobilenet; did you mean MobileNet"),
        (
            application(weights="/secret/none.h5"),
            "weights: expected imagenet, random or a file's path, found no file none.h5",
        ),
        (
            application(input_size=(8, 8)),
            "source: keras.applications:MobileNet can't be loaded: Input size must be at least 32x32",
        ),
        (
            application(buckets=(BucketSettings(1, 96, 96),)),
            "buckets: expected the model's only size, 64x64, got 96x96",
        ),
    ],
)
def test_what_an_application_cannot_do_fails_with_a_reason(settings: ModelSettings, expected: str) -> None:
    assert reason(settings).startswith(expected)


def test_weights_that_do_not_fit_fail_with_a_reason(
    tmp_path: Path, keras_file: SaveKeras, tiny_model: TinyModel
) -> None:
    failure = reason(application(weights=keras_file(tiny_model(), "other.h5")))
    assert failure.startswith("source: keras.applications:MobileNet can't be loaded: Layer count mismatch")
    assert str(tmp_path) not in failure


def test_a_keras_file_gets_pixels_from_0_to_255(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    keras_model = tiny_model(SIDE, SIDE)
    model = catalog.load(from_file(keras_file(keras_model)))
    assert (model.weights, model.task, model.program.platform) == ("flowers.keras", Classification(4), "tensorflow")
    np.testing.assert_allclose(run(model), keras_model(PIXELS.astype(np.float32)), atol=1e-5)


def test_a_keras_file_may_take_bytes(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    keras_model = tiny_model(SIDE, SIDE, dtype="uint8")
    source = keras_file(keras_model)
    np.testing.assert_allclose(run(catalog.load(from_file(source))), keras_model(PIXELS), atol=1e-5)
    assert reason(from_file(source, preprocess="tf")) == (
        "preprocess: the model takes uint8 pixels as they are, expected none, got tf; write preprocess: none"
    )


def test_a_model_of_any_size_takes_the_one_that_is_set(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    source = keras_file(tiny_model(None, None))
    assert reason(from_file(source)).startswith("input_size: the model takes several sizes; set it")
    assert catalog.load(from_file(source, input_size=(7, 8))).buckets == (Bucket(BATCH, 7, 8),)
    several = (BucketSettings(2, 9, 9), BucketSettings(1, 9, 9), BucketSettings(2))
    model = catalog.load(from_file(source, input_size=(7, 8), buckets=several))
    assert model.buckets == (Bucket(1, 9, 9), Bucket(2, 7, 8), Bucket(2, 9, 9))
    assert run(model, PIXELS[:, :9, :9]).shape == (BATCH, 4)


def test_plain_batch_sizes_and_auto_are_compiled_for_every_resolution(
    keras_file: SaveKeras, tiny_model: TinyModel
) -> None:
    source = keras_file(tiny_model(None, 8))
    buckets = (BucketSettings(2), BucketSettings(1, 5, 8))
    model = catalog.load(from_file(source, resolutions=((6, 8), (9, 8)), buckets=buckets))
    assert model.buckets == (Bucket(1, 5, 8), Bucket(2, 6, 8), Bucket(2, 9, 8))
    limits = AutoBuckets(max_batch=2)
    model = catalog.load(from_file(source, resolutions=((9, 8), (6, 8)), buckets="auto", auto_buckets=limits))
    assert model.buckets == (Bucket(1, 6, 8), Bucket(1, 9, 8), Bucket(2, 6, 8), Bucket(2, 9, 8))
    failure = reason(from_file(source, resolutions=((6, 8), (6, 9))))
    assert failure.startswith("resolutions: expected the model's only size, anyx8, got 6x9; ")


def test_buckets_are_sorted_and_given_once(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    buckets = (BucketSettings(4), BucketSettings(1, 6, 5), BucketSettings(1))
    assert catalog.load(from_file(keras_file(tiny_model()), buckets=buckets)).buckets == (
        Bucket(1, 6, 5),
        Bucket(4, 6, 5),
    )


def test_a_model_of_one_size_takes_no_other(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    failure = reason(from_file(keras_file(tiny_model()), input_size=(7, 5)))
    assert failure.startswith("input_size: expected the model's only size, 6x5, got 7x5; ")


def test_a_keras_file_has_its_own_weights(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    failure = reason(from_file(keras_file(tiny_model()), weights="random"))
    assert failure == "weights: flowers.keras takes none, expected no weights, got random; leave weights out"


def test_labels_are_read_and_counted(tmp_path: Path, keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    names = tmp_path / "labels.txt"
    names.write_text("rose\ndaisy\ntulip\niris\n")
    source = keras_file(tiny_model())
    assert labels_of(catalog.load(from_file(source, labels=names))) == ("rose", "daisy", "tulip", "iris")
    names.write_text("rose\n")
    assert (
        reason(from_file(source, labels=names)) == "labels: expected 4 lines, one for each class, got 1 in labels.txt"
    )


def test_a_model_of_another_kind_fails_with_what_it_is(keras_file: SaveKeras, tiny_model: TinyModel) -> None:
    vector = keras.Input((None,), name="vector")
    assert reason(from_file(keras_file(keras.Model(vector, vector * 2)))) == (
        "source: expected images, such as [None, height, width, channels], or numbers [None, ...] whose other sides "
        "are known, got vector: float32 [None, None]; export the model with these sides"
    )
    pixels = keras.Input((6, 5, 3))
    rows = keras.Model(pixels, keras.layers.Reshape((30, 3))(pixels))
    assert reason(from_file(keras_file(rows), task="classification")) == (
        "source: expected an output of scores [None, classes], got float32 [None, 30, 3]; write task: tensors, which"
        " gives it as it is"
    )
    one_image = keras.Input(batch_shape=(1, 6, 5, 3))
    single = keras.Model(one_image, keras.ops.reshape(one_image, (1, 90)))
    assert reason(from_file(keras_file(single))) == (
        "buckets: the model was made for batches of 1 only; write buckets: [1], got 2"
    )


@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet been built")
def test_a_model_that_was_never_built_fails_with_how_to_build_it(keras_file: SaveKeras) -> None:
    unbuilt = keras.Sequential([keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)])
    said = reason(from_file(keras_file(unbuilt)))
    assert said.startswith("source: expected a model that was built")
    assert "keras.Input((height, width, 3))" in said


def test_what_is_no_model_fails_with_its_name_and_not_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "text.keras"
    file.write_text("not a model")
    failure = reason(from_file(str(file)))
    assert failure.startswith("source: expected a .keras file, which is a zip archive, or a .h5 file")
    assert str(tmp_path) not in failure
    assert (
        reason(from_file(str(tmp_path / "absent.keras")))
        .partition("; ")[0]
        .endswith("got absent.keras, which does not exist")
    )
    assert (
        reason(from_file(str(tmp_path)))
        .partition("; ")[0]
        .endswith(f"got {tmp_path.name}, a folder that holds no model, or several")
    )
    assert reason(from_file("builtin:cats")).partition("; ")[0].endswith("got builtin:cats, which does not exist")
    assert reason(from_file("builtin:digit")).endswith("which does not exist; did you mean builtin:digits?")
    forms = "keras.applications:<Name>, keras_cv:<Name>, keras_hub:<Class>, kagglehub:<handle>, builtin:digits"
    assert f"expected {forms}" in reason(from_file(str(tmp_path)))


def test_without_tensorflow_a_model_fails_with_how_to_install_it() -> None:
    program = """
import sys
sys.modules["tensorflow"] = None
from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
try:
    catalog.load(ModelSettings(name="it", source="builtin:digits"))
except ModelFailed as failure:
    print(failure)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "source: builtin:digits needs tensorflow; install xlaserve[cpu] or xlaserve[gpu]\n"


@pytest.mark.parametrize("field", [{"weights": "random"}, {"preprocess": "tf"}])
def test_a_built_in_model_takes_nothing_that_it_has(field: dict[str, str]) -> None:
    (name,) = field
    assert reason(from_file("builtin:digits", **field)).startswith(f"{name}: builtin:digits takes none")


def test_the_built_in_models_are_those_that_the_settings_name() -> None:
    assert set(built_in.MODELS) == set(Source.BUILT_IN.value.names)
