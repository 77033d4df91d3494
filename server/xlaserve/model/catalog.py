"""Where models come from: a source in the configuration becomes a `Model`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from xlaserve.config import Bucket, BucketSettings, Fit, ModelSettings
from xlaserve.engine.program import AnySize, Program
from xlaserve.errors import ModelFailed
from xlaserve.model import labels, noop
from xlaserve.model.network import Network, Size
from xlaserve.model.task import Classification, Detection, Embedding, Segmentation, Task

APPLICATIONS: Final = "keras.applications:"
BUILT_IN: Final = "builtin:"
DIGITS: Final = "builtin:digits"
NOOP: Final = "builtin:noop"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A loaded model, not yet compiled."""

    settings: ModelSettings
    program: Program
    buckets: tuple[Bucket, ...]
    """The configured buckets with the model's own height and width filled in, sorted. With `buckets: auto` all the
    candidates, until warm-up has chosen from them."""
    task: Task
    weights: str
    """Where the weights came from: `imagenet`, `random`, `built in`, or the name of a file."""
    lowerings: str = ""
    """Which lowerings XLA runs it with, and in how many layers each: `depthwise 17`. Empty where there are none."""
    size: Size = (None, None)
    """What the network takes, whatever is configured."""

    @property
    def fit(self) -> Fit:
        """How encoded images come to have the model's size."""
        shows_places = isinstance(self.task, (Detection, Segmentation))
        return self.settings.fit or (Fit.LETTERBOX if shows_places else Fit.RESIZE)


def uses_tensorflow(settings: ModelSettings) -> bool:
    """Returns whether loading the model imports TensorFlow, which must then be configured first."""
    return settings.source != NOOP


Cached = Callable[[ModelSettings, Callable[[], Network]], Network]
"""Gives the network of a model from the compile cache, or calls what builds it."""


def load(settings: ModelSettings, cached: Cached = lambda settings, build: build()) -> Model:
    """Builds the model and its weights; blocks. Raises ModelFailed with the reason and the way out."""
    try:
        network = cached(settings, partial(_network, settings))
        buckets = _buckets(settings, network.size)
        _check_unmatched(settings, network)
        task = _labelled(network.task, settings)
    except ModelFailed:
        raise
    except Exception as error:
        raise ModelFailed(_explain(settings, error)) from error
    if network.weights == "random":
        _log.warning("model %s has random weights: its answers mean nothing", settings.name)
    return Model(settings, network.program, buckets, task, network.weights, network.lowerings, network.size)


def _network(settings: ModelSettings) -> Network:
    source = settings.source
    if not source.startswith(APPLICATIONS):
        _refuse(settings, "weights")
    if source.startswith(BUILT_IN):
        _refuse(settings, "preprocess")
    if source == NOOP:
        return Network(noop.NoopProgram(), (noop.SIDE, noop.SIDE), Classification(noop.CLASSES), "built in")

    # TensorFlow takes seconds to import, and builtin:noop does without it.
    from xlaserve.model import keras_models, saved_model  # noqa: PLC0415

    if source == DIGITS:
        return keras_models.builtin_digits(settings)
    if source.startswith(APPLICATIONS):
        return keras_models.application(source.removeprefix(APPLICATIONS), settings)
    path = Path(source)
    if path.suffix == ".keras" and path.is_file():
        return keras_models.keras_file(path, settings)
    if saved_model.is_saved_model(path):
        return saved_model.saved_model(path, settings)
    raise ModelFailed(
        f"source: expected keras.applications:<Name>, {DIGITS}, {NOOP}, a .keras file or a SavedModel folder, "
        f"got {_name(source)}{'' if path.exists() else ', which does not exist'}"
    )


def _labelled(task: Task, settings: ModelSettings) -> Task:
    """Returns the task with the configured names, where there are any, instead of the source's own."""
    if settings.labels is None:
        return task
    if isinstance(task, Embedding):
        raise ModelFailed(f"labels: an embedding has no classes, expected no labels, got {settings.labels.name}")
    return task.labelled(labels.from_file(settings.labels, task.classes))


def _refuse(settings: ModelSettings, field: str) -> None:
    """Raises ModelFailed where `field` was set for a source that brings its own."""
    value = getattr(settings, field)
    if value != type(settings).model_fields[field].default:
        raise ModelFailed(f"{field}: {_name(settings.source)} has its own, expected no {field}, got {_name(value)}")


def _buckets(settings: ModelSettings, size: Size) -> tuple[Bucket, ...]:
    field = "resolutions" if settings.resolutions else "input_size"
    own = settings.resolutions or (settings.input_size or size,)
    for resolution in own:
        _check_size(field, resolution, size)
    buckets = set()
    for bucket in settings.buckets or map(BucketSettings, settings.auto_buckets.candidates):
        for height, width in own if bucket.height is None else ((bucket.height, bucket.width),):
            if height is None or width is None:
                raise ModelFailed("input_size: the model takes several sizes; set it, or resolutions, or sized buckets")
            _check_size("buckets", (height, width), size)
            buckets.add(Bucket(bucket.batch, height, width))
    return tuple(sorted(buckets))


def _check_unmatched(settings: ModelSettings, network: Network) -> None:
    if settings.unmatched == "reject":
        return
    if None not in network.size:
        raise ModelFailed(
            f"unmatched: expected reject, as the model's only size is {_by(network.size)}, got background"
        )
    if not isinstance(network.program, AnySize):
        raise ModelFailed("unmatched: expected reject, as this kind of model is fixed to its buckets, got background")


def _check_size(field: str, got: Size, size: Size) -> None:
    if any(wanted is not None and wanted != side for side, wanted in zip(got, size, strict=True)):
        raise ModelFailed(f"{field}: expected the model's only size, {_by(size)}, got {_by(got)}")


def _by(size: Size) -> str:
    return "x".join("any" if side is None else str(side) for side in size)


def _explain(settings: ModelSettings, error: Exception) -> str:
    """Returns one line that a client may read: no trace, and of paths only the last part."""
    source = _name(settings.source)
    if isinstance(error, ModuleNotFoundError) and error.name in {"tensorflow", "keras"}:
        return f"source: {source} needs {error.name}; install xlaserve[cpu] or xlaserve[gpu]"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    for path in filter(None, (settings.source, settings.weights)):
        reason = reason.replace(path, _name(path))
    reason = re.sub(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+", "", reason)
    return f"source: {source} can't be loaded: {reason}"


def _name(source: str) -> str:
    """Returns a source or a path without its folders."""
    return Path(source).name or source
