"""Verifiers of models, and the differences that they find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.engine.warmup.difference import MAX_RELATIVE
from xlaserve.models import verification
from xlaserve.models.catalog import Model
from xlaserve.models.sources.noop import NoopProgram
from xlaserve.models.task import Embedding


def test_a_model_that_is_narrow_by_itself_is_narrow_in_each_mode() -> None:
    settings = ModelSettings(name="a", source="builtin:noop", modes=[Mode.XLA, Mode.GRAPH])
    model = Model(NoopProgram(), (8, 8), Embedding(3), "none", settings=settings, buckets=(Bucket(1, 8, 8),))
    assert verification.narrow(model, has_tf32=False) == {}
    mixed = replace(model, is_narrow=True)
    assert verification.narrow(mixed, has_tf32=False) == {Mode.XLA: MAX_RELATIVE, Mode.GRAPH: MAX_RELATIVE}


def test_another_reference_takes_each_image_of_a_new_resolution_alone() -> None:
    """No batch has more pixels than the largest bucket, of which one image of a new resolution may have as many."""
    asked: list[int] = []

    def means(images: Images) -> Outputs:
        return (images.mean(axis=(1, 2)).astype(np.float32),)

    def any_size(images: Images) -> Outputs:
        asked.append(len(images))
        return means(images)

    settings = ModelSettings(name="a", source="builtin:noop", buckets=(16,))
    model = Model(
        NoopProgram(), (8, 8), Embedding(3), "none", reference=means, settings=settings, buckets=(Bucket(16, 8, 8),)
    )
    verifier = verification.verifier(model, has_tf32=False, warn=print, reference=any_size)
    verifier.verify(
        Mode.XLA, Bucket(1, 32, 32), Compilation(means, 0.0, 0.0), again=lambda: Compilation(means, 0.0, 0.0)
    )
    assert set(asked) == {1}
