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

from xlaserve.config import Lowering, ModelSettings
from xlaserve.model.lowering import depthwise, grouped, normalization, pointwise, pooling, resize, stem, winograd
from xlaserve.model.lowering.holding import with_replaced
from xlaserve.model.lowering.replacement import Replace
from xlaserve.model.networks.keras_runtime import keras

LOWERINGS: Final[Mapping[Lowering, Replace]] = {
    Lowering.DEPTHWISE: depthwise.replace,
    Lowering.GROUPED: grouped.replace,
    Lowering.STEM: stem.replace,
    Lowering.POINTWISE: pointwise.replace,
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
    """Called like the Keras model that it was cloned from, whose weights it shares."""
    counts: Mapping[Lowering, int]
    """How many layers each lowering replaced; only those that replaced any."""

    def __str__(self) -> str:
        """Returns for example `depthwise 17`, which is how many layers it replaced."""
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


def for_settings(model: Any, settings: ModelSettings) -> Lowered | None:
    """Returns the Keras `model` lowered as `settings` want it, or None where XLA runs it as it is or not at all."""
    if not any(mode.traits.is_jit for mode in settings.compiled_modes) or tf.config.get_visible_devices("GPU"):
        return None
    lowered = lower(model, [name for name in Lowering if name not in settings.disable_lowerings])
    if lowered is not None:
        _log.info("model %s: lowered for XLA on a CPU: %s", settings.name, lowered)
    return lowered


def lower(model: Any, names: Collection[Lowering]) -> Lowered | None:
    """Returns the Keras `model` with the lowerings `names`, or None where they have nothing to replace.

    Goes into models within models and layers within layers, unless a layer does not work with other layers in it.
    What a model of a class of its own holds stays as it is. Both are logged.
    """
    if (custom := next(filter(_has_own_call, _models(model)), None)) is not None:
        _log.info("%s is a class of its own: %s is not lowered", type(custom).__name__, model.name)
        return None
    replaces = {name: replace for name, replace in LOWERINGS.items() if name in names}
    try:
        return _lower(model, replaces, goes_into_layers=True)
    except Exception as error:  # a layer's own code may ask anything of the layers that it holds
        _log.info("%s: layers within layers are not lowered: %s", model.name, error)
        return _lower(model, replaces, goes_into_layers=False)


def _lower(model: Any, replaces: Mapping[Lowering, Replace], goes_into_layers: bool) -> Lowered | None:
    counts: Counter[Lowering] = Counter()

    def clone(layer: Any) -> Any:
        for name, replace in replaces.items():
            if (replacement := replace(layer)) is not None:
                counts[name] += 1
                return replacement
        return with_replaced(layer, clone_held) if goes_into_layers else layer

    def clone_held(layer: Any) -> Any:
        if not layer.built or (isinstance(layer, keras.Model) and any(map(_has_own_call, _models(layer)))):
            return layer
        if not isinstance(layer, keras.Model):
            return clone(layer)
        before = counts.total()
        cloned = clone_model(layer)
        return cloned if counts.total() > before else layer

    def clone_model(held: Any) -> Any:
        return keras.models.clone_model(held, clone_function=clone, recursive=True)

    lowered = clone_model(model)
    return Lowered(lowered, dict(counts)) if counts else None


def _models(model: Any) -> Iterator[Any]:
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _models(layer)


def _has_own_call(model: Any) -> bool:
    """Returns whether a model computes anything but its graph of layers."""
    pixels = keras.Input((1,))
    return type(model).call not in (keras.Sequential.call, type(keras.Model(pixels, pixels)).call)
