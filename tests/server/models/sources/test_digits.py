from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scripts.digits_data import digit_images

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.models import catalog
from xlaserve.models.task import Classification

SAMPLES = Path(__file__).parents[4] / "scripts" / "samples" / "digits"
BATCH = 64
MODES = tuple(mode for mode in Mode if mode is not Mode.AUTO)


@pytest.fixture(scope="module")
def model() -> catalog.Model:
    buckets = tuple(BucketSettings(batch) for batch in (1, 4, BATCH))
    return catalog.load(ModelSettings(name="digits", source="builtin:digits", buckets=buckets, modes=MODES))


def as_served(png: bytes) -> Images:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))


def scores(model: catalog.Model, images: list[Images], mode: Mode = Mode.XLA, batch: int = BATCH) -> NDArray[Any]:
    executable = model.program.compile(mode, Bucket(batch, 32, 32)).executable
    padded = images + [images[0]] * (-len(images) % batch)
    parts = [executable(np.stack(padded[i : i + batch]))[0] for i in range(0, len(padded), batch)]
    return np.concatenate(parts)[: len(images)]


def test_digits_knows_what_it_is(model: catalog.Model) -> None:
    assert model.buckets == (Bucket(1, 32, 32), Bucket(4, 32, 32), Bucket(BATCH, 32, 32))
    assert model.task == Classification(10, tuple("0123456789"))
    assert model.weights == "built in"
    assert model.program.platform == "tensorflow"


def test_the_split_is_fixed_stratified_and_disjoint() -> None:
    train, held_out = digit_images("train"), digit_images("held_out")
    assert (len(train), len(held_out)) == (1347, 450)
    assert {image.index for image in train}.isdisjoint(image.index for image in held_out)
    assert [image.index for image in held_out[:5]] == [image.index for image in digit_images("held_out")[:5]]
    counts = np.bincount([image.label for image in held_out])
    assert counts.min() >= 43
    assert counts.max() <= 47


def test_a_scan_is_white_ink_on_black_paper() -> None:
    pixels = np.asarray(Image.open(io.BytesIO(digit_images("held_out")[0].png)))
    assert pixels.shape == (8, 8)
    assert pixels.min() == 0
    assert pixels.max() == 255
    assert pixels.mean() < 128


@pytest.mark.parametrize(
    ("side", "resample"),
    [
        (8, Image.Resampling.NEAREST),
        (32, Image.Resampling.NEAREST),
        (32, Image.Resampling.BICUBIC),
        (64, Image.Resampling.NEAREST),
        (64, Image.Resampling.BILINEAR),
    ],
)
def test_held_out_scans_of_any_size_are_read_correctly(
    model: catalog.Model, side: int, resample: Image.Resampling
) -> None:
    held_out = digit_images("held_out", side=side, resample=resample)
    read = scores(model, [as_served(image.png) for image in held_out]).argmax(axis=1)
    assert np.mean(read == [image.label for image in held_out]) >= 0.985


def test_the_samples_are_one_held_out_scan_of_each_digit_read_correctly(model: catalog.Model) -> None:
    files = sorted(SAMPLES.glob("*.png"))
    labels = [int(file.stem.split("_")[0]) for file in files]
    assert labels == list(range(10))
    held_out = {image.index: image.label for image in digit_images("held_out")}
    assert [held_out[int(file.stem.split("_")[1])] for file in files] == labels
    assert scores(model, [as_served(file.read_bytes()) for file in files]).argmax(axis=1).tolist() == labels


def test_modes_agree(model: catalog.Model) -> None:
    images = [as_served(image.png) for image in digit_images("held_out")[:BATCH]]
    xla, graph, eager = (scores(model, images, mode) for mode in (Mode.XLA, Mode.GRAPH, Mode.EAGER))
    np.testing.assert_allclose(xla, graph, atol=1e-5)
    np.testing.assert_allclose(xla, eager, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_company_in_a_batch_never_changes_a_row(model: catalog.Model, mode: Mode) -> None:
    image, *others = (as_served(image.png) for image in digit_images("held_out")[:4])
    garbage = list(np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8))
    executable = model.program.compile(mode, Bucket(4, 32, 32)).executable
    (padded,) = executable(np.stack([image] * 4))
    for mates in (others, garbage):
        (scored,) = executable(np.stack([image, *mates]))
        np.testing.assert_array_equal(scored[0], padded[0])
    np.testing.assert_allclose(padded[0], scores(model, [image], mode, 1)[0], atol=1e-5)
