"""A verifier of a model of few lines, for tests of what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs
from xlaserve.engine.warmup.verify import Verified, Verifier
from xlaserve.models.task import Classification

SIDE = 12


BUCKETS = tuple(Bucket(batch, SIDE, SIDE) for batch in (1, 2, 3, 4, 8, 16, 20))


WEIGHTS = np.random.default_rng(1).normal(size=(SIDE * SIDE * 3, 5))


def scores(images: Images) -> Outputs:
    """A model whose rows do not depend on each other."""
    return ((images.reshape(len(images), -1) / 255 @ WEIGHTS).astype(np.float32),)


def centred(images: Images) -> Outputs:
    """A model whose rows do."""
    (rows,) = scores(images)
    return (rows - rows.mean(axis=0),)


def summed(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows + 0.1 * rows.sum(axis=0),)


def by_place(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows * np.arange(1, len(rows) + 1, dtype=np.float32)[:, np.newaxis],)


def by_size(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (rows * np.float32(len(rows)),)


def rolled(images: Images) -> Outputs:
    (rows,) = scores(images)
    return (np.roll(rows, 1, axis=0),)


def doubled(images: Images) -> Outputs:
    return (scores(images)[0] * 2,)


def zero(images: Images) -> Outputs:
    return (scores(images)[0] * 0,)


def dark(images: Images) -> Any:
    return images.mean(axis=(1, 2, 3)) < 20


def bright(images: Images) -> Any:
    return images.min(axis=(1, 2, 3)) > 250


def plain(images: Images) -> Any:
    return images.std(axis=(1, 2)).max(axis=1) < 1


Chosen = Callable[[Images], Any]


class Checked:
    """A verifier, and its inputs and warnings."""

    def __init__(self, reference: Callable[[Images], Outputs] | None = scores, **settings: object) -> None:
        self.warnings: list[str] = []
        self.asked: list[int] = []

        def asked(images: Images) -> Outputs:
            self.asked.append(len(images))
            assert reference is not None
            return reference(images)

        given = {"task": Classification(5), "buckets": BUCKETS, **settings}
        self.verifier = Verifier(reference=reference and asked, warn=self.warnings.append, **given)  # type: ignore[arg-type]

    def __call__(self, run: Executable, bucket: Bucket, mode: Mode = Mode.XLA) -> Verified:
        compilation = Compilation(run, 0.0, 0.0)
        _, verified = self.verifier.verify(
            mode, bucket, compilation, lambda: pytest.fail("nothing is to be made again")
        )
        return verified
