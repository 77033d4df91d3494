from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.task import Classification

SETTINGS = ModelSettings(name="noop", source="builtin:noop", buckets=(BucketSettings(3), BucketSettings(1)))


@pytest.mark.parametrize("mode", list(Mode))
def test_each_row_answers_with_the_first_bytes_of_its_image(mode: Mode) -> None:
    model = catalog.load(SETTINGS)
    images = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), np.uint8)
    compilation = model.program.compile(mode, Bucket(3, 224, 224))
    (scores,) = compilation.executable(images)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, images.reshape(3, -1)[:, :1000])
    assert scores.flags.owndata
    assert (compilation.trace_s, compilation.compile_s) == (0, 0)


def test_noop_knows_what_it_is() -> None:
    model = catalog.load(SETTINGS)
    assert model.buckets == (Bucket(1, 224, 224), Bucket(3, 224, 224))
    assert isinstance(model.task, Classification)
    assert model.task.classes == 1000
    assert model.task.labels is None
    assert model.weights == "built in"
    assert model.program.platform == "numpy"


def test_another_shape_raises() -> None:
    executable = catalog.load(SETTINGS).program.compile(Mode.XLA, Bucket(1, 224, 224)).executable
    with pytest.raises(ValueError, match=r"expected uint8 \(1, 224, 224, 3\), got uint8 \(2, 224, 224, 3\)"):
        executable(np.zeros((2, 224, 224, 3), np.uint8))


def test_another_size_is_refused() -> None:
    with pytest.raises(ModelFailed, match="buckets: expected the model's only size, 224x224, got 32x32"):
        catalog.load(SETTINGS.model_copy(update={"buckets": (BucketSettings(1, 32, 32),)}))


def test_noop_never_imports_tensorflow() -> None:
    program = """
import sys
import numpy as np
from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.models import catalog
model = catalog.load(ModelSettings(name="noop", source="builtin:noop"))
model.program.compile(Mode.XLA, Bucket(1, 224, 224)).executable(np.zeros((1, 224, 224, 3), np.uint8))
print([name for name in ("tensorflow", "keras") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"
