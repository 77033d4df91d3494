"""Where models come from: a source in the configuration becomes a `Model`."""

from __future__ import annotations

from dataclasses import dataclass

from xlaserve.config import Bucket, ModelSettings
from xlaserve.engine.program import Program
from xlaserve.model.task import Classification


@dataclass(frozen=True)
class Model:
    """A loaded model, not yet compiled."""

    settings: ModelSettings
    program: Program
    buckets: tuple[Bucket, ...]
    """The configured buckets with the model's own height and width filled in, sorted."""
    task: Classification
    weights: str
    """Where the weights came from: `imagenet`, `random`, `built in`, or the name of a file."""


def load(settings: ModelSettings) -> Model:
    """Builds the model and its weights; blocks. Raises ModelFailed with the reason and the way out."""
    raise NotImplementedError
