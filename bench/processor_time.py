"""The modes on a machine that does other work as well: `python -m bench.processor_time [--models A,B] [--arms A,B]`.

Says images per second of processor time, which other work changes less than it does images/s. A model's arms are in
one process and take turns; each runs on two lanes of a thread. ONNX Runtime by itself is one of them where
`onnxruntime` and `tf2onnx` are installed, which nothing else here needs: it gets the frozen graph that the mode
`openvino` gets.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

from bench.figures import Figure, finish, ratio
from bench.trials import interleaved
from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings, Settings
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Executable, Outputs
from xlaserve.engine.warmup.compiler import noise
from xlaserve.models import catalog
from xlaserve.programs.tf.device import configure, cpu_name
from xlaserve.programs.tf.frozen_graph import portable
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.telemetry.logs import quiet_tensorflow

MODELS: Final = (
    *("MobileNetV2", "MobileNetV3Large", "EfficientNetB0", "ResNet50", "DenseNet121"),
    *("ConvNeXtTiny", "NASNetMobile", "Xception"),
    *("keras_hub:DeiTImageClassifier", "keras_hub:SegFormerImageSegmenter"),
)
"""Applications of Keras, and other sources."""
ONNX_RUNTIME: Final = "onnxruntime"
ARMS: Final = ("xla", "graph", "openvino", ONNX_RUNTIME)
BATCHES: Final = (1, 4)
LANES: Final = 2
OPSET: Final = 18
WARM_UP_S: Final = 0.3


def compare(name: str, arms: tuple[str, ...], blocks: int, block_s: float) -> Iterator[Figure]:
    """Prints what each arm reaches on one model, and yields the ratios of the last one to the others."""
    model = catalog.load(_settings(name))
    assert isinstance(model.program, TensorFlowProgram)
    onnx = to_onnx(model.program, model.buckets[0]) if ONNX_RUNTIME in arms else None
    for bucket in model.buckets:
        (images,) = noise(bucket)
        run = {arm: model.program.compile(Mode(arm), bucket).executable for arm in arms if arm != ONNX_RUNTIME}
        if onnx is not None:
            try:
                run[ONNX_RUNTIME] = in_onnx_runtime(onnx, bucket)
                run[ONNX_RUNTIME](images)
            except Exception as error:  # the converter makes models that ONNX Runtime can't run
                run.pop(ONNX_RUNTIME, None)
                print(f"  {name}: ONNX Runtime is left out: {error}", flush=True)
        for executable in run.values():
            images_per_processor_s(executable, images, WARM_UP_S)
        turns = {arm: partial(images_per_processor_s, run[arm], images, block_s) for arm in arms if arm in run}
        rates = interleaved(turns, blocks)
        for arm, measured in rates.items():
            line = f"{median(measured):.1f} ({min(measured):.1f} to {max(measured):.1f})"
            print(f"  {name}, batch {bucket.batch}, {arm}: {line} images/s of processor time", flush=True)
        *others, last = rates
        for other in others:
            yield ratio(f"{name}, batch {bucket.batch}: {last} / {other}", rates[last], rates[other], None)


def images_per_processor_s(executable: Executable, images: Images, seconds: float) -> float:
    """Returns images per second of processor time, all of this process, with every lane running one bucket for
    `seconds` of that, or one batch at the least.
    """
    began = time.process_time()

    def run() -> int:
        batches = 0
        while not batches or time.process_time() < began + seconds:
            executable(images)
            batches += 1
        return batches

    with ThreadPoolExecutor(LANES) as pool:
        batches = sum(lane.result() for lane in [pool.submit(run) for _ in range(LANES)])
    return batches * len(images) / (time.process_time() - began)


def to_onnx(program: TensorFlowProgram, bucket: Bucket) -> Any:
    """Returns the frozen graph for images of the size of `bucket` as an ONNX model."""
    function = cast(Any, program.trace(Mode.OPENVINO, bucket))
    # The other inputs are weights, which are constants in a frozen graph.
    inputs, outputs = ([tensor.name for tensor in tensors] for tensors in (function.inputs[:1], function.outputs))
    convert = importlib.import_module("tf2onnx").convert
    definition = portable(function).as_graph_def()
    _write_erfc_with_erf(definition)
    return convert.from_graph_def(definition, None, inputs, outputs, OPSET)[0]


def _write_erfc_with_erf(definition: Any) -> None:
    """Writes each `Erfc(x)`, which ONNX lacks and GELU has, as `1 - Erf(x)`."""
    for erfc in [node for node in definition.node if node.op == "Erfc"]:
        erf, one = definition.node.add(), definition.node.add()
        erf.CopyFrom(erfc)
        erf.op, erf.name = "Erf", f"{erfc.name}/erf"
        one.op, one.name = "Const", f"{erfc.name}/one"
        one.attr["dtype"].type = one.attr["value"].tensor.dtype = erfc.attr["T"].type
        one.attr["value"].tensor.float_val.append(1.0)
        erfc.op, erfc.input[:] = "Sub", (one.name, erf.name)


def in_onnx_runtime(onnx: Any, bucket: Bucket) -> Executable:
    """Returns what runs a bucket on the thread that calls it."""
    runtime = importlib.import_module(ONNX_RUNTIME)
    (pixels,) = onnx.graph.input
    for dimension, size in zip(pixels.type.tensor_type.shape.dim, (*bucket, 3), strict=True):
        dimension.dim_value = size
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(onnx.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(images: Images) -> Outputs:
        return tuple(session.run(None, {pixels.name: images}))

    return run


def _settings(name: str) -> ModelSettings:
    return ModelSettings(
        name=name.replace(":", "."),
        source=name if ":" in name else f"keras.applications:{name}",
        weights="random",
        input_size=(224, 224),
        buckets=tuple(map(BucketSettings, BATCHES)),
    )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.processor_time", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="applications of Keras, or sources")
    parser.add_argument("--arms", default=",".join(ARMS), help="the last one is compared with each other one")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--block-s", type=float, default=2.0, help="processor time of an arm's turn")
    parser.add_argument("--json", type=Path, default=Path("build/bench-processor-time.json"))
    options = parser.parse_args()
    names = tuple(options.models.split(","))
    is_there = all(map(importlib.util.find_spec, (ONNX_RUNTIME, "tf2onnx")))
    arms = tuple(arm for arm in options.arms.split(",") if arm != ONNX_RUNTIME or is_there)
    quiet_tensorflow()
    models = tuple(map(_settings, names))
    configure(Settings(device="cpu", models=models, lanes=LANES, threads_per_lane=1), uses_tensorflow=True)
    if not is_there:
        print("onnxruntime and tf2onnx are not installed: ONNX Runtime is left out", flush=True)
    figures = (figure for name in names for figure in compare(name, arms, options.blocks, options.block_s))
    finish(options.json, figures, processor=cpu_name())


if __name__ == "__main__":
    main()
