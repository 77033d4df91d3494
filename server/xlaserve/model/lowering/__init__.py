"""Other ways to compute what XLA's CPU backend is slow at: the same weights, the same result up to rounding.

A model is cloned through Keras's public functions, with some layers replaced. The original stays as it is, for the
other modes and for a GPU, whose libraries have fast kernels for all of this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tensorflow as tf

from xlaserve.config import Lowering, Mode, ModelSettings
from xlaserve.model.keras_runtime import keras
from xlaserve.model.lowering import depthwise, normalization, pooling, resize, stem, winograd
from xlaserve.model.lowering.replacement import Replace, Replacement

LOWERINGS: Final[Mapping[Lowering, Replace]] = {
    Lowering.DEPTHWISE: depthwise.replace,
    Lowering.STEM: stem.replace,
    Lowering.WINOGRAD: winograd.replace,
    Lowering.NORMALIZATION: normalization.replace,
    Lowering.POOLING: pooling.replace,
    Lowering.RESIZE: resize.replace,
}
"""Each gives a layer's replacement, or None where it has nothing to replace; the first that has one is taken."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lowered:
    """A model some of whose layers are computed otherwise."""

    model: Any
    """Is called as the Keras model that it was cloned from, whose weights it shares."""
    counts: Mapping[Lowering, int]
    """How many layers each lowering replaced; only those that replaced any."""


def for_settings(model: Any, settings: ModelSettings) -> Lowered | None:
    """Returns the Keras `model` lowered as `settings` want it, or None where XLA is to run it as it is."""
    runs_on_cpu = not tf.config.get_visible_devices("GPU")
    if not {Mode.XLA, Mode.AUTOCLUSTER} & set(settings.compiled_modes) or not runs_on_cpu:
        return None
    lowered = lower(model, [name for name in Lowering if name not in settings.disable_lowerings])
    if lowered is not None:
        _log.info("model %s: lowered for XLA on a CPU: %s", settings.name, describe(lowered.counts))
    return lowered


def lower(model: Any, names: Collection[Lowering]) -> Lowered | None:
    """Returns the Keras `model` with the lowerings `names`, or None where they have nothing to replace.

    Goes into models within models. What a layer or model of a class of its own holds stays as it is, which is logged.
    """
    if (custom := next(filter(_has_own_call, _models(model)), None)) is not None:
        _log.info("%s is a class of its own: %s is not lowered", type(custom).__name__, model.name)
        return None
    counts: Counter[Lowering] = Counter()

    def find(layer: Any) -> tuple[Lowering, Replacement] | None:
        found = ((name, LOWERINGS[name](layer)) for name in LOWERINGS if name in names)
        return next(((name, replacement) for name, replacement in found if replacement is not None), None)

    def clone(layer: Any) -> Any:
        if found := find(layer):
            name, replacement = found
            counts[name] += 1
            return replacement
        if held := sum(find(inner) is not None for inner in _held(layer)):
            kind = type(layer).__name__
            _log.info("%s is a class of its own: %d layers in its %s are not lowered", kind, held, layer.name)
        return layer

    lowered = keras.models.clone_model(model, clone_function=clone, recursive=True)
    return Lowered(lowered, dict(counts)) if counts else None


def describe(counts: Mapping[Lowering, int]) -> str:
    """Returns for example `depthwise 17`, which is how many layers it replaced."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _models(model: Any) -> Iterator[Any]:
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _models(layer)


def _has_own_call(model: Any) -> bool:
    """Returns whether a model computes anything but its graph of layers."""
    pixels = keras.Input((1,))
    return type(model).call not in (keras.Sequential.call, type(keras.Model(pixels, pixels)).call)


def _held(layer: Any) -> Iterator[Any]:
    """Yields the layers that are attributes of `layer`, at any depth."""
    attributes = [value for name, value in vars(layer).items() if not name.startswith("_")]
    for inner in keras.tree.flatten(attributes):
        if isinstance(inner, keras.layers.Layer):
            yield inner
            yield from _held(inner)
