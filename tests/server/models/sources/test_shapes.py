from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts.shapes_data import HELD_OUT_SEED, LABELS, scene

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Executable, Outputs, Program
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.sources import shapes
from xlaserve.models.task import Detection, Segmentation

BATCH = 4
MODES = (Mode.XLA, Mode.GRAPH, Mode.EAGER)
DATA = Path(shapes.__file__).parent / "data"
MEGABYTE = 1_000_000


def load(name: str) -> catalog.Model:
    buckets = tuple(map(BucketSettings, (1, BATCH)))
    return catalog.load(ModelSettings(name=name, source=f"builtin:shapes-{name}", buckets=buckets, modes=MODES))


@pytest.fixture(scope="module")
def detector() -> catalog.Model:
    return load("detector")


@pytest.fixture(scope="module")
def segmenter() -> catalog.Model:
    return load("segmenter")


@pytest.fixture(scope="module")
def images() -> Images:
    side = shapes.SIDE
    return np.stack([scene(HELD_OUT_SEED, number, height=side, width=side).pixels for number in range(BATCH)])


@cache
def executable(program: Program, mode: Mode) -> Executable:
    return program.compile(mode, Bucket(BATCH, shapes.SIDE, shapes.SIDE)).executable


def run(model: catalog.Model, images: Images, mode: Mode) -> Outputs:
    program: Any = model.program  # a Program need not be hashable; this one is
    return executable(program, mode)(images)


def test_they_know_what_they_are(detector: catalog.Model, segmenter: catalog.Model) -> None:
    assert isinstance(detector.task, Detection)
    assert detector.task.labels == LABELS
    assert segmenter.task == Segmentation(4, ("background", *LABELS))
    for model in (detector, segmenter):
        assert model.weights == "built in"
        assert model.buckets == (Bucket(1, 128, 128), Bucket(BATCH, 128, 128))


@pytest.mark.parametrize("file", [shapes.DETECTOR_WEIGHTS, shapes.SEGMENTER_WEIGHTS])
def test_weights_stay_small(file: str) -> None:
    assert (DATA / file).stat().st_size < 2 * MEGABYTE


def test_a_detector_gives_the_same_objects_in_every_mode(detector: catalog.Model, images: Images) -> None:
    expected = run(detector, images, Mode.EAGER)
    for mode in (Mode.XLA, Mode.GRAPH):
        boxes, scores, classes, count = run(detector, images, mode)
        np.testing.assert_array_equal(count, expected[3])
        np.testing.assert_array_equal(classes, expected[2])
        np.testing.assert_allclose(scores, expected[1], atol=1e-4)
        np.testing.assert_allclose(boxes, expected[0], atol=1e-2)
    assert (expected[3] > 0).all()


def test_a_segmenter_gives_the_same_map_in_every_mode(segmenter: catalog.Model, images: Images) -> None:
    """Pixels whose two likeliest classes are all but equal may go either way."""
    (expected,) = run(segmenter, images, Mode.EAGER)
    assert expected.shape == (BATCH, 128, 128)
    assert expected.dtype == np.uint8
    for mode in (Mode.XLA, Mode.GRAPH):
        (classes,) = run(segmenter, images, mode)
        assert (classes != expected).mean() < 1e-4


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_company_in_a_batch_never_changes_a_row(
    detector: catalog.Model, segmenter: catalog.Model, images: Images, mode: Mode
) -> None:
    garbage = np.random.default_rng(0).integers(0, 256, images.shape, np.uint8)
    garbage[0] = images[0]
    for model in (detector, segmenter):
        for in_batch, among_garbage in zip(run(model, images, mode), run(model, garbage, mode), strict=True):
            np.testing.assert_array_equal(in_batch[0], among_garbage[0])


def test_a_name_for_the_only_output_is_refused_where_there_are_several() -> None:
    settings = ModelSettings(name="shapes", source="builtin:shapes-detector", output_name="probs")
    with pytest.raises(ModelFailed, match=r"output_name: expected none, as the model has several outputs \(boxes, "):
        catalog.load(settings)
