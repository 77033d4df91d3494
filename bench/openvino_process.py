"""OpenVINO by itself, for comparison: the first model of a configuration, begun and run as `bench.in_process` does.

One lane is its hint for latency, several its hint for throughput.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import openvino as ov
import tensorflow as tf

from bench.trials import TRIAL_S, fastest
from xlaserve.config import Bucket, Lowering, Mode, Settings
from xlaserve.engine.warmup.compiler import noise
from xlaserve.models import catalog
from xlaserve.programs.openvino.openvino_program import TYPES
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.telemetry.logs import quiet_tensorflow


def begin(config: Mapping[str, object]) -> tuple[int, Callable[[str, float], float]]:
    """Compiles the model for each bucket; returns its lanes, and what runs the fastest bucket."""
    settings = Settings.model_validate(config)
    quiet_tensorflow()
    tf.config.set_visible_devices([], "GPU")
    lanes = settings.lanes or 1
    model = catalog.load(settings.models[0].model_copy(update={"disable_lowerings": tuple(Lowering)}))
    precision = TYPES[settings.models[0].precision_in(Mode.OPENVINO)]
    queues = {bucket: _compile(model.program, bucket, lanes, precision) for bucket in model.buckets}
    best = fastest(list(queues), lambda bucket: _images_per_s(queues[bucket], bucket, TRIAL_S))
    return lanes, lambda _, seconds: _images_per_s(queues[best], best, seconds)


def _compile(program: Any, bucket: Bucket, lanes: int, precision: str) -> Any:
    assert isinstance(program, TensorFlowProgram)
    module, traced = tf.Module(), cast(Any, program.trace(Mode.XLA, bucket))
    module.weights = traced.variables  # else they would not be saved
    module.forward = tf.function(traced, input_signature=[tf.TensorSpec((*bucket, 3), tf.uint8)])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures=module.forward)
        converted = ov.convert_model(folder, input=[(*bucket, 3)])
    hint = "LATENCY" if lanes == 1 else "THROUGHPUT"
    compiled = ov.Core().compile_model(
        converted, "CPU", {"PERFORMANCE_HINT": hint, "INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": lanes}
    )
    return ov.AsyncInferQueue(compiled, lanes)


def _images_per_s(queue: Any, bucket: Bucket, seconds: float) -> float:
    (images,) = noise(bucket)
    queue.start_async({0: images})
    queue.wait_all()
    began, batches = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        queue.start_async({0: images})  # waits for a free request
        batches += 1
    queue.wait_all()
    return batches * bucket.batch / (time.perf_counter() - began)
