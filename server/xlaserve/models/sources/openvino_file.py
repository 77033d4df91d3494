"""Networks from ONNX and TFLite files: OpenVINO reads them, and its operations become TensorFlow's."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf

from xlaserve.config import ModelSettings
from xlaserve.engine.causes import telling_line
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import functions, openvino_quantization, saved_model
from xlaserve.models.sources.openvino_graph import Translator
from xlaserve.models.sources.openvino_values import UntranslatableError
from xlaserve.programs.openvino.openvino_program import fold_constants, load

TOLERANCE: Final = 1e-3
"""Largest difference of the translation's answers from OpenVINO's, as a share of the largest answer."""
QUANTIZED_TOLERANCE: Final = 0.05
"""The same for quantized networks, where a sum that differs in its last bit may be rounded to another level."""
SIDE: Final = 64
"""Height and width of the image of the comparison, where the model does not fix them."""
_CUSTOM: Final = re.compile(r"No translator found for (\S+) node")
_EXTERNAL: Final = re.compile(r"invalid external data: ExternalDataInfo\(data_full_path: ([^,]*),")


def openvino_file(file: Path, settings: ModelSettings) -> Network:
    """Reads a `.onnx` or `.tflite` file, and compares the answers to a random image with OpenVINO's own.

    Raises ModelFailed.
    """
    if importlib.util.find_spec("openvino") is None:
        raise ModelFailed(
            f"source: {file.name} is read by openvino, which is not installed; pip install --no-deps"
            " 'openvino>=2026.4,<2026.5'"
        )
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
    try:
        translator = Translator(model)
        function = tf.function(translator.run, autograph=False).get_concrete_function(*translator.inputs)
    except UntranslatableError as error:
        raise ModelFailed(
            f"source: {file.name} holds what is not translated: {error}; make a SavedModel of it elsewhere:"
            f" pip install onnx2tf && onnx2tf -osd -i {file.name}"
        ) from error
    is_quantized = openvino_quantization.is_quantized(model)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    _compare(compiled, function, translator, QUANTIZED_TOLERANCE if is_quantized else TOLERANCE)
    found = functions.found(translator, function, file.name)
    network = saved_model.network(found, settings, weights=file.name)
    return replace(network, is_narrow=is_quantized)


def _remedy(error: RuntimeError, file: Path) -> str:
    """Returns the cause of an error of reading, and what to do."""
    if missing := _EXTERNAL.search(str(error)):
        name = missing[1].rpartition("/")[2]
        return f"its weights are in another file, {name}, which can't be read; copy that beside {file.name}"
    if custom := _CUSTOM.search(str(error)):
        return (
            f"its operation {custom[1]} is of TensorFlow Lite alone; serve what the file was converted from, such as a"
            " SavedModel or frozen graph"
        )
    return f"{_cause(error)}; copy it once more, and compare both: sha256sum {file.name}"


def _cause(error: RuntimeError) -> str:
    """Returns the last line of an error of OpenVINO, which tells the cause."""
    return telling_line(([*filter(str.strip, str(error).splitlines())] or ["it gives no reason"])[-1])


def _compare(expected: Any, function: Any, translator: Translator, tolerance: float) -> None:
    """Raises ModelFailed where a translation answers otherwise than OpenVINO; `tolerance` as in `TOLERANCE`."""
    given = [_noise(spec, seed) for seed, spec in enumerate(translator.inputs)]
    wanted, answers = expected(given), function(*map(tf.constant, given))
    for index, name in enumerate(translator.outputs):
        other, one = (np.asarray(values, np.float64) for values in (wanted[index], answers[name]))
        limit = tolerance * max(1.0, np.abs(other).max(initial=0.0))
        if one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=limit, equal_nan=True):
            how = "has another shape" if one.shape != other.shape else f"is off by {np.abs(one - other).max():.2g}"
            raise ModelFailed(f"source: output {name} {how} once the model is translated; it is not served")


def _noise(spec: tf.TensorSpec, seed: int) -> Any:
    """Returns random values for an input: from 0 to 255 for whole numbers that may be pixels, else from 0 to 1."""
    batch, *sides = spec.shape
    is_level = spec.dtype.is_integer and len(sides) > 1
    values = np.random.default_rng(seed).uniform(
        0, 255 if is_level else 1, (batch or 2, *(side or SIDE for side in sides))
    )
    return values.astype(spec.dtype.as_numpy_dtype)
