"""Networks from ONNX and TFLite files: OpenVINO reads them, and its operations become TensorFlow's."""

from __future__ import annotations

import importlib.util
import logging
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import ModelSettings, onnx_weights
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import functions, saved_model
from xlaserve.models.sources.onnx_tflite import image_size, openvino_quantization, tflite_detection, tflite_weights
from xlaserve.models.sources.onnx_tflite.openvino_to_tensorflow import Translator
from xlaserve.models.sources.onnx_tflite.openvino_values import UntranslatableError, cause
from xlaserve.models.sources.onnx_tflite.tflite_detection import Suppression
from xlaserve.programs.openvino.openvino_program import fold_constants, load

_log = logging.getLogger(__name__)

TOLERANCE: Final = 1e-3
"""Largest difference of the translation's answers from OpenVINO's, as a share of the largest answer."""
QUANTIZED_TOLERANCE: Final = 0.05
"""The same for quantized networks, where a sum that differs in its last bit may be rounded to another level."""
QUANTIZED_ALIKE: Final = 0.99
"""Share of the numbers of a quantized network's output that the tolerance is for: single ones may be levels apart."""
SIDE: Final = 64
"""Height and width of the image of the comparison, where neither the model nor the settings have them."""
_CUSTOM: Final = re.compile(r"No translator found for (\S+) node")
_UNREAD: Final = re.compile(r"(?:Conversion is failed for|No conversion rule found for operations): ([^\n]+)")
_QUANTIZED: Final = "QLinear"
"""Part of the names of ONNX Runtime's operations on levels."""
_EXTERNAL: Final = re.compile("external(ly stored)? data")
NAMED: Final = 4
"""Files with weights that an error names."""


def onnx_tflite_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.onnx` or `.tflite` file, and compares the answers to a random image with OpenVINO's own.

    Raises ModelFailed.
    """
    if importlib.util.find_spec("openvino") is None:
        raise ModelFailed(
            f"source: {file.name} is read by openvino, which is not installed; pip install --no-deps"
            " 'openvino>=2026.4,<2026.5'"
        )
    if tflite_weights.are_of_dynamic_range(file):
        _log.info("model %s: %s", settings.title, tflite_weights.NOTE)
    with tflite_detection.cut(file) as (read, suppression):
        return _network(read, suppression, settings)


def _network(file: Path, suppression: Suppression | None, settings: ModelSettings) -> Network:
    openvino = load()
    core = openvino.Core()
    try:
        model = core.read_model(file)
    except RuntimeError as error:
        version = openvino.__version__.partition("-")[0]
        raise ModelFailed(f"source: {file.name} can't be read by OpenVINO {version}: {_remedy(error, file)}") from error
    fold_constants(model)
    openvino_quantization.take_pixels(model)
    openvino_quantization.give_numbers(model)
    translator, function = _translated(model, file, settings)
    is_quantized = openvino_quantization.is_quantized(model)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    _compare(compiled, function, translator, settings, is_quantized=is_quantized)
    found = functions.found(translator, function, file.name)
    head = None
    if suppression is not None:
        found, head = suppression.decoded(found, translator.outputs, settings), suppression.head(settings)
    network = saved_model.network(found, settings, weights=file.name, head=head)
    return replace(network, is_narrow=is_quantized)


def _translated(model: Any, file: Path, settings: ModelSettings) -> tuple[Translator, Any]:
    """Returns the translation of a model and its function: of images of any size where the model takes these and can be
    translated so, else of the size in the settings. Raises ModelFailed."""
    try:
        try:
            return _traced(model)
        except UntranslatableError as error:
            if not image_size.is_open(model, settings):
                raise
            height, width = image_size.fix(model, settings, file.name, str(error))
            _log.info("model %s: translated for images of %dx%d alone: %s", settings.title, height, width, error)
            fold_constants(model)
            return _traced(model)
    except UntranslatableError as error:
        raise ModelFailed(
            f"source: {file.name} holds what is not translated: {error}; {_elsewhere(file.name)}"
        ) from error


def _traced(model: Any) -> tuple[Translator, Any]:
    translator = Translator(model)
    return translator, tf.function(translator.run, autograph=False).get_concrete_function(*translator.inputs)


def _remedy(error: RuntimeError, file: Path) -> str:
    """Returns the cause of an error of reading, and what to do."""
    if _EXTERNAL.search(str(error)):
        names = [*onnx_weights.names(file)[:NAMED]]
        return (
            f"its weights in {', '.join(names)} have been cut off, or are another model's; copy both once more, and"
            f" compare: sha256sum {' '.join(map(shlex.quote, [file.name, *names]))}"
        )
    if custom := _CUSTOM.search(str(error)):
        return (
            f"its operation {custom[1]} is of TensorFlow Lite alone; serve what the file was converted from, such as a"
            " SavedModel or frozen graph"
        )
    if unread := _UNREAD.search(str(error)):
        step = f"make a SavedModel of it elsewhere: pip install onnx2tf && onnx2tf -osd -i {file.name}"
        if _QUANTIZED in unread[1]:
            step = "quantize it with quantize_static(..., quant_format=QuantFormat.QDQ)"
        return f"it has no translator for {unread[1].strip()}; {step}"
    return f"{cause(error)}; copy it once more, and compare both: sha256sum {file.name}"


def _elsewhere(file: str) -> str:
    return f"make a SavedModel of it elsewhere: pip install onnx2tf && onnx2tf -osd -i {file}"


def _compare(
    expected: Any, function: Any, translator: Translator, settings: ModelSettings, *, is_quantized: bool
) -> None:
    """Raises ModelFailed where a translation answers otherwise than OpenVINO."""
    tolerance, least_alike = (QUANTIZED_TOLERANCE, QUANTIZED_ALIKE) if is_quantized else (TOLERANCE, 1.0)
    given = [_noise(spec, seed, settings) for seed, spec in enumerate(translator.inputs)]
    try:
        wanted, answers = expected(given), function(*map(tf.constant, given))
    except (RuntimeError, tf.errors.OpError) as error:
        shapes = " and ".join(str([*each.shape]) for each in given)
        raise ModelFailed(
            f"source: {Path(settings.source).name} can't be run for inputs {shapes}: {cause(error)}; if it was"
            " exported for images of another size, write that: input_size: [HEIGHT, WIDTH]"
        ) from error
    for index, name in enumerate(translator.outputs):
        other, one = (np.asarray(values, np.float64) for values in (wanted[index], answers[name]))
        limit = tolerance * max(1.0, np.abs(other).max(initial=0.0))
        if one.shape != other.shape or _alike(one, other, limit) < least_alike:
            how = "has another shape" if one.shape != other.shape else f"is off by {np.abs(one - other).max():.2g}"
            raise ModelFailed(
                f"source: output {name} {how} once the model is translated; {_elsewhere(Path(settings.source).name)}"
            )


def _noise(spec: tf.TensorSpec, seed: int, settings: ModelSettings) -> Any:
    """Returns random values for an input: from 0 to 255 for whole numbers that may be pixels, else from 0 to 1."""
    batch, *sides = image_size.filled([*spec.shape], settings.layout, settings.only_size or (SIDE, SIDE))
    is_level = spec.dtype.is_integer and len(sides) > 1
    values = np.random.default_rng(seed).uniform(
        0, 255 if is_level else 1, (batch or 2, *(side or SIDE for side in sides))
    )
    return values.astype(spec.dtype.as_numpy_dtype)


def _alike(one: NDArray[np.float64], other: NDArray[np.float64], limit: float) -> float:
    """Returns the share of the numbers that are at most `limit` apart, of arrays of one shape."""
    return float(np.mean(np.isclose(one, other, rtol=0, atol=limit, equal_nan=True))) if one.size else 1.0
