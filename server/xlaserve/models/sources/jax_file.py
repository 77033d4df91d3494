"""Networks from exports of `jax.export`.

Their StableHLO is translated to TensorFlow's operations, so that it is lowered and runs in every mode like other
models. A module that can't be translated runs as the operation XlaCallModule, which XLA compiles in every mode. Either
way the weights are variables, and the network takes every batch size that the export does. Saved, it is a SavedModel
like any other, which is served without JAX.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from xlaserve.config import ModelSettings
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import heads
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.networks.image_tensor import channels_last, image_tensor
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.network_inputs import NetworkInputs
from xlaserve.models.sources import saved_model
from xlaserve.models.sources.functions import Found
from xlaserve.programs.tf.definitions import has_narrow

if TYPE_CHECKING:
    from xlaserve.models.sources.jax_export import ExportedModel
    from xlaserve.models.sources.stablehlo_graph import Translated

PIXELS: Final = "pixels"

TOLERANCE: Final = 1e-5
"""Largest difference of a translation's answers from the module's, as a share of the largest answer,"""
OF_SPREAD: Final = 1e-3
"""and of the largest difference between two images."""
NARROW_TOLERANCE: Final = 0.02
"""Largest difference as a share of the largest answer, where narrower types than float32 may be computed in."""

_log = logging.getLogger(__name__)


def jax_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.jax` file, which needs JAX. Raises ModelFailed, or what JAX raises."""
    from xlaserve.models.sources import jax_export  # noqa: PLC0415 - it is not needed for SavedModels

    exported = jax_export.read(file, None if settings.weights is None else Path(settings.weights))
    platform = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    if platform not in exported.platforms:
        made_for = ", ".join(exported.platforms)
        raise ModelFailed(
            f"source: expected an export for {platform}, got {file.name} for {made_for}; export it with"
            ' platforms=["cpu", "cuda"] for both'
        )
    image = image_tensor(exported.image, settings.color, settings.layout, settings.depth)
    function = ImageFunction(exported, has_channels_first=image.has_channels_first)
    if image.has_channels_first:
        return saved_model.arranged(
            function.run, NetworkInputs.of_image(image), function.outputs, settings, weights=file.name
        )
    found = Found(function.run, {PIXELS: exported.image}, function.outputs)
    return saved_model.network(found, settings, weights=file.name)


def save(exported: ExportedModel, folder: Path) -> None:
    """Writes a SavedModel. Raises ModelFailed where the export's input is not one of images."""
    function = ImageFunction(exported, has_channels_first=image_tensor(exported.image).has_channels_first)
    spec = tf.TensorSpec(function.pixels.shape, function.pixels.dtype, name=PIXELS)
    serve = tf.function(function.run, autograph=False, jit_compile=False).get_concrete_function(spec)
    root = tf.Module()
    root.weights = function.weights
    tf.saved_model.save(root, str(folder), signatures={saved_model.DEFAULT_SIGNATURE: serve})


class ImageFunction:
    """An exported function with its weights as variables; channels come last, as the server's pixels do.

    It consists of TensorFlow's operations where all of it can be translated to them, else of StableHLO. A function of
    images with their channels first also returns its maps, outputs of four dimensions, with their channels first.
    """

    def __init__(self, exported: ExportedModel, *, has_channels_first: bool) -> None:
        self._given = exported.outputs
        self.pixels = channels_last(exported.image) if has_channels_first else exported.image
        """The shape and dtype of the pixels that `run` takes."""
        self.outputs = {
            name: channels_last(output) if has_channels_first else output for name, output in exported.outputs.items()
        }
        """The outputs of `run`, by name."""
        module = _Module(exported, has_channels_first=has_channels_first)
        translated = _translated(exported, self.pixels, module)
        self._compute: Callable[[tf.Tensor], Sequence[tf.Tensor]] = module if translated is None else translated.run
        self.weights = module.weights if translated is None else translated.weights

    def run(self, pixels: tf.Tensor) -> heads.Raw:
        """Returns the function's outputs by their names."""
        return {
            name: value if self.outputs[name] is output else tf.transpose(value, (0, 2, 3, 1))
            for (name, output), value in zip(self._given.items(), self._compute(pixels), strict=True)
        }


class _Module:
    """An exported function as the operation XlaCallModule, which XLA compiles in every mode."""

    def __init__(self, exported: ExportedModel, *, has_channels_first: bool) -> None:
        self._exported = exported
        self._has_channels_first = has_channels_first
        self._arguments = [None if one is None else tf.Variable(one, trainable=False) for one in exported.arguments]

    @property
    def weights(self) -> list[tf.Variable]:
        """The variables of its weights."""
        return [variable for variable in self._arguments if variable is not None]

    def __call__(self, pixels: tf.Tensor) -> Sequence[tf.Tensor]:
        """Returns the function's outputs."""
        image = tf.transpose(pixels, (0, 3, 1, 2)) if self._has_channels_first else pixels
        outputs = self._exported.outputs.values()
        values: Sequence[tf.Tensor] = xla.call_module(
            [image if variable is None else variable.read_value() for variable in self._arguments],
            module=self._exported.module,
            version=self._exported.version,
            platforms=[platform.upper() for platform in self._exported.platforms],
            disabled_checks=self._exported.disabled_checks,
            Tout=[tf.as_dtype(output.dtype) for output in outputs],
            Sout=[output.shape for output in outputs],
        )
        return values


def _translated(exported: ExportedModel, pixels: TensorShape, module: _Module) -> Translated | None:
    """Returns `module` as TensorFlow's operations, where all of it can be translated and answers alike."""
    from xlaserve.models.sources import stablehlo_graph  # noqa: PLC0415 - it needs JAX

    try:
        translated = stablehlo_graph.translate(exported, pixels)
        _compare(module, translated, pixels)
    except Exception as error:  # a module may hold anything
        _log.warning("the model stays StableHLO, which XLA runs in every mode, and is not lowered: %s", cause(error))
        return None
    return translated


def _compare(module: _Module, translated: Translated, pixels: TensorShape) -> None:
    """Raises ValueError where the two answer differently to random pixels."""
    shape = [side or 2 for side in pixels.shape or ()]
    largest_pixel = 255 if pixels.dtype == "uint8" else 1
    images = tf.cast(np.random.default_rng(0).uniform(0, largest_pixel, shape), pixels.dtype)
    expected = tf.function(module, autograph=False, jit_compile=True)(images)
    is_narrow = bool(tf.config.get_visible_devices("GPU")) or has_narrow(translated.run)
    for index, (one, other) in enumerate(zip(translated.run(images), expected, strict=True)):
        got, wanted = (tf.cast(values, tf.float64).numpy() for values in (one, other))
        largest, spread = np.abs(wanted).max(), np.abs(wanted - np.atleast_1d(wanted)[::-1]).max()
        is_exact = other.dtype == tf.float32 and not is_narrow
        tolerance = TOLERANCE * largest + OF_SPREAD * spread if is_exact else NARROW_TOLERANCE * largest
        if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=0, atol=tolerance, equal_nan=True):
            raise ValueError(f"output {index} differs by {np.abs(got - wanted).max():.3g} once it is translated")
