"""Networks from what `jax.export` wrote.

TensorFlow runs its StableHLO as the operation XlaCallModule, with the weights as variables, in every mode and for every
batch size that the export takes. Saved so, it is a SavedModel like any other, which is served without JAX.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.model.networks import heads
from xlaserve.model.networks.assemble import check_pixels
from xlaserve.model.networks.heads import TensorShape
from xlaserve.model.networks.network import Network
from xlaserve.model.sources import saved_model

if TYPE_CHECKING:
    from xlaserve.model.sources.jax_export import ExportedModel
    from xlaserve.model.sources.stablehlo_graph import Translated

PIXELS: Final = "pixels"

TOLERANCE: Final = 1e-5
"""How far a translation's answers may be from the module's, as a share of the largest,"""
OF_SPREAD: Final = 1e-3
"""and of the largest difference between two images."""
NARROW_TOLERANCE: Final = 0.02
"""The same where less than float32 may be computed in."""

_log = logging.getLogger(__name__)


def jax_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.jax` file, which needs JAX. Raises ModelFailed, or what JAX raises."""
    from xlaserve.model.sources import jax_export  # noqa: PLC0415 - it is not needed for SavedModels

    exported = jax_export.read(file, None if settings.weights is None else Path(settings.weights))
    platform = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    if platform not in exported.platforms:
        made_for = ", ".join(exported.platforms)
        raise ModelFailed(
            f"source: expected an export for {platform}, got {file.name} for {made_for}; export it with"
            ' platforms=["cpu", "cuda"] for both'
        )
    function = ImageFunction(exported)
    return saved_model.network(function.run, function.pixels, function.outputs, settings, weights=file.name)


def save(exported: ExportedModel, folder: Path) -> None:
    """Writes a SavedModel. Raises ModelFailed where the export's input is not one of images."""
    function = ImageFunction(exported)
    check_pixels(function.pixels)
    spec = tf.TensorSpec(function.pixels.shape, function.pixels.dtype, name=PIXELS)
    serve = tf.function(function.run, autograph=False, jit_compile=False).get_concrete_function(spec)
    root = tf.Module()
    root.weights = function.weights
    tf.saved_model.save(root, str(folder), signatures={saved_model.DEFAULT_SIGNATURE: serve})


class ImageFunction:
    """An exported function with its weights as variables; channels come last, as the server's pixels do.

    One that takes images with their channels first gives maps so, too: outputs of four dimensions.
    """

    def __init__(self, exported: ExportedModel) -> None:
        self._exported = exported
        self._arguments = [None if one is None else tf.Variable(one, trainable=False) for one in exported.arguments]
        self._has_channels_first = _has_channels_first(exported.image)
        self.pixels = _with_channels_last(exported.image) if self._has_channels_first else exported.image
        """What `run` takes."""
        self.outputs = {name: self._as_given(output) for name, output in exported.outputs.items()}
        """What it gives."""
        self._translated = self._translate()
        self.weights = [variable for variable in self._arguments if variable is not None]
        if self._translated is not None:
            self.weights = list(self._translated.weights)

    def run(self, pixels: tf.Tensor) -> heads.Raw:
        """Returns the function's outputs by their names."""
        outputs = self._exported.outputs
        values = self._module(pixels) if self._translated is None else self._translated.run(pixels)
        return {
            name: value if self.outputs[name] is output else tf.transpose(value, (0, 2, 3, 1))
            for (name, output), value in zip(outputs.items(), values, strict=True)
        }

    def _module(self, pixels: tf.Tensor) -> Sequence[tf.Tensor]:
        image = tf.transpose(pixels, (0, 3, 1, 2)) if self._has_channels_first else pixels
        outputs = self._exported.outputs
        values: Sequence[tf.Tensor] = xla.call_module(
            [image if variable is None else variable.read_value() for variable in self._arguments],
            module=self._exported.module,
            version=self._exported.version,
            platforms=[platform.upper() for platform in self._exported.platforms],
            disabled_checks=self._exported.disabled_checks,
            Tout=[tf.as_dtype(output.dtype) for output in outputs.values()],
            Sout=[output.shape for output in outputs.values()],
        )
        return values

    def _translate(self) -> Translated | None:
        """Returns the function as TensorFlow's operations, where all of it can be translated and gives the same."""
        from xlaserve.model.sources import stablehlo_graph  # noqa: PLC0415 - it needs JAX

        platforms = self._exported.platforms
        platform = "cpu" if "cpu" in platforms else platforms[0]
        try:
            translated = stablehlo_graph.translate(self._exported, self.pixels, platform)
            self._compare(translated)
        except Exception as error:  # a module may hold anything
            _log.info("it stays StableHLO, which XLA runs in every mode and as it is: %s", error)
            return None
        return translated

    def _compare(self, translated: Translated) -> None:
        """Raises ValueError where the translation of random pixels gives something else."""
        batch, *sides = self.pixels.shape or ()
        pixels = np.random.default_rng(0).uniform(0, 255 if self.pixels.dtype == "uint8" else 1, (batch or 2, *sides))
        images = tf.cast(pixels, self.pixels.dtype)
        expected = tf.function(self._module, autograph=False, jit_compile=True)(images)
        for name, one, other in zip(self._exported.outputs, translated.run(images), expected, strict=True):
            got, wanted = (tf.cast(values, tf.float64).numpy() for values in (one, other))
            is_narrow = other.dtype != tf.float32 or tf.config.get_visible_devices("GPU")
            largest, spread = np.abs(wanted).max(), np.abs(wanted - wanted[::-1]).max()
            tolerance = NARROW_TOLERANCE * largest if is_narrow else TOLERANCE * largest + OF_SPREAD * spread
            if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=0, atol=tolerance, equal_nan=True):
                raise ValueError(f"its {name} differs once it is translated")

    def _as_given(self, output: TensorShape) -> TensorShape:
        is_map = self._has_channels_first and output.shape is not None and len(output.shape) == len("NCHW")
        return _with_channels_last(output) if is_map else output


def _has_channels_first(image: TensorShape) -> bool:
    match image.shape:
        case (_, 3, _, side):
            return side != 3
    return False


def _with_channels_last(image: TensorShape) -> TensorShape:
    assert image.shape is not None
    batch, channels, height, width = image.shape
    return TensorShape((batch, height, width, channels), image.dtype)
