from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from scripts.digits_data import digit_images
from tests.server.programs.openvino.networks import SMALL, compiled, small_network
from tests.server.programs.tf.functions import BUCKET, noise, sums

from xlaserve.config import Bucket, Mode, ModelSettings, Precision
from xlaserve.engine.inputs import Images
from xlaserve.engine.niceness import yield_to_traffic
from xlaserve.models import catalog
from xlaserve.programs.openvino.openvino_program import (
    CompiledModel,
    ConvertedGraph,
    Threads,
    convert,
)
from xlaserve.programs.tf import openvino_graph
from xlaserve.programs.tf.lowered_function import Forward
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_network_answers_as_in_graph_mode_in_every_batch_size(batch: int) -> None:
    program, bucket = TensorFlowProgram(small_network()), SMALL._replace(batch=batch)
    images = noise(bucket)
    for own, wanted in zip(
        compiled(program, bucket)(images), compiled(program, bucket, Mode.GRAPH)(images), strict=True
    ):
        assert own.dtype == wanted.dtype
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)


def test_digits_are_read_as_in_graph_mode() -> None:
    model = catalog.load(ModelSettings(name="digits", source="builtin:digits", buckets=(8,)))
    scans = digit_images("held_out", side=32, resample=Image.Resampling.BILINEAR)[:8]
    images = np.stack([np.asarray(Image.open(io.BytesIO(scan.png)).convert("RGB")) for scan in scans])
    own, wanted = (
        model.program.compile(mode, model.buckets[0]).executable(images)[0] for mode in (Mode.OPENVINO, Mode.GRAPH)
    )
    np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)
    assert own.argmax(axis=1).tolist() == [scan.label for scan in scans]


def test_padding_changes_no_row() -> None:
    executable = compiled(TensorFlowProgram(small_network()), SMALL)
    images = noise(SMALL)
    padded = np.concatenate([images[:2], images[:1]])
    for whole, part in zip(executable(images), executable(padded), strict=True):
        np.testing.assert_allclose(part[:2], whole[:2], rtol=1e-5, atol=1e-7)


def test_threads_that_run_at_the_same_time_get_their_own_answers() -> None:
    executable = compiled(TensorFlowProgram(small_network()), SMALL)
    batches = [noise(SMALL, seed) for seed in range(8)]
    wanted = [executable(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for own, alone in zip(pool.map(executable, batches), wanted, strict=True):
                for one, other in zip(own, alone, strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_what_is_compiled_beside_traffic_runs_at_the_priority_of_all_else() -> None:
    def priorities() -> dict[int, int]:
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        return {task: os.getpriority(os.PRIO_PROCESS, task) for task in tasks}

    graph = TensorFlowProgram(small_network()).converted(SMALL)

    def compile_for(batch: int) -> CompiledModel:
        return graph.compile([(batch, *SMALL[1:], 3)], Precision.FLOAT32, Threads(lanes=2, total=2))

    def compile_beside() -> tuple[CompiledModel, int]:
        yield_to_traffic()
        return compile_for(1), threading.get_native_id()

    first = compile_for(SMALL.batch)
    before = priorities()
    with ThreadPoolExecutor(1) as pool:
        model, own = pool.submit(compile_beside).result()
    model(noise(SMALL._replace(batch=1)))
    first(noise(SMALL))
    started = {task: nice for task, nice in priorities().items() if task not in (*before, own)}
    assert started
    assert set(started.values()) == {os.getpriority(os.PRIO_PROCESS, 0)}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_what_holds_the_interpreter_while_it_converts_does_not_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    program = TensorFlowProgram(sums)
    program.converted(BUCKET)  # what is loaded first yields to nothing
    priorities = []

    def noted(*given: Any) -> ConvertedGraph:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return convert(*given)

    def convert_beside() -> None:
        yield_to_traffic()
        program.converted(BUCKET._replace(height=8))

    monkeypatch.setattr(openvino_graph, "convert", noted)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(convert_beside).result()
    assert priorities == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_only_as_many_requests_are_made_as_run_at_the_same_time() -> None:
    model = TensorFlowProgram(sums).in_openvino(BUCKET)
    for seed in range(3):
        model(noise(BUCKET, seed))
    assert len(model._idle) == 1


def test_images_are_not_kept_once_they_are_answered() -> None:
    model = TensorFlowProgram(sums).in_openvino(BUCKET)
    images = noise(BUCKET)
    model(images)
    kept = weakref.ref(images)
    del images
    assert kept() is None


def test_answers_own_their_memory() -> None:
    model = TensorFlowProgram(lambda pixels: (pixels,)).in_openvino(BUCKET)
    images = noise(BUCKET)
    (first,) = model(images)
    wanted, images[:] = images.copy(), 0
    model(noise(BUCKET, seed=1))
    np.testing.assert_array_equal(first, wanted)


@pytest.mark.parametrize("make", [lambda images: images[::-1], np.asfortranarray], ids=["reversed", "by columns"])
def test_images_are_read_in_whatever_order_they_are_kept(make: Callable[[Images], Images]) -> None:
    images = make(noise(BUCKET))
    totals, _ = compiled(TensorFlowProgram(sums), BUCKET)(images)
    np.testing.assert_allclose(totals, images.sum(axis=(1, 2)))


def test_images_that_may_not_be_written_to_are_read() -> None:
    images = noise(BUCKET)
    images.flags.writeable = False
    totals, _ = compiled(TensorFlowProgram(sums), BUCKET)(images)
    np.testing.assert_allclose(totals, images.sum(axis=(1, 2)))


def test_integers_stay_integers_and_outputs_in_order() -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = tf.cast(pixels, tf.float32)
        return tf.reduce_mean(values, axis=(1, 2)), tf.argmax(values[:, 0, 0], axis=-1, output_type=tf.int32), pixels

    images = noise(BUCKET)
    means, first, same = compiled(TensorFlowProgram(forward), BUCKET)(images)
    assert [output.dtype.name for output in (means, first, same)] == ["float32", "int32", "uint8"]
    np.testing.assert_allclose(means, images.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(first, images[:, 0, 0].argmax(axis=-1))
    np.testing.assert_array_equal(same, images)


def test_compiling_counts_as_compiling_and_converting_as_tracing() -> None:
    compilation = TensorFlowProgram(small_network()).compile(Mode.OPENVINO, SMALL)
    assert compilation.trace_s > 0
    assert compilation.compile_s > 0
    assert compilation.warnings == ()


def test_a_graph_is_converted_once_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def counted(*given: Any) -> ConvertedGraph:
        converted.append(given)
        return convert(*given)

    monkeypatch.setattr(openvino_graph, "convert", counted)
    program = TensorFlowProgram(sums)
    for batch in (1, 2):
        compiled(program, BUCKET._replace(batch=batch))
    assert len(converted) == 1


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
def test_a_narrow_precision_is_computed_in_or_it_is_said_that_it_is_not(precision: Precision) -> None:
    network = small_network()
    images = noise(SMALL)
    exact = compiled(TensorFlowProgram(network), SMALL)(images)
    compilation = TensorFlowProgram(network, openvino_precision=precision).compile(Mode.OPENVINO, SMALL)
    narrow = compilation.executable(images)
    assert [output.dtype for output in narrow] == [output.dtype for output in exact]
    np.testing.assert_allclose(narrow[0], exact[0], atol=0.05)
    differs = any(not np.array_equal(*pair) for pair in zip(narrow, exact, strict=True))
    said = "mode openvino computes in {}: this processor has no " + precision
    own, wider = (), (said.format(Precision.FLOAT32),)
    # A processor with bfloat16 alone computes in that.
    assert compilation.warnings in ([own, (said.format(Precision.BFLOAT16),)] if differs else [wider])


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_a_graph_of_a_narrow_model_is_computed_in_what_openvino_is_told(dtype: tf.DType) -> None:
    kernel = tf.Variable(np.random.default_rng(1).normal(size=(3, 3, 3, 8)).astype(np.float32))

    def network(own: tf.DType) -> Forward:
        def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            x = tf.nn.conv2d(tf.cast(pixels, own) / 255, tf.cast(kernel, own), 1, "SAME")
            x = tf.cond(tf.reduce_sum(x) > 0, lambda: x * tf.constant(1.7, own), lambda: x)
            return (tf.cast(tf.reduce_mean(tf.nn.relu(x), axis=(1, 2)), tf.float32),)

        return forward

    images = noise(SMALL)
    (wanted,) = compiled(TensorFlowProgram(network(tf.float32)), SMALL, Mode.GRAPH)(images)
    for precision, rtol in ((Precision.FLOAT32, 1e-3), (Precision.BFLOAT16, 0.05)):
        program = TensorFlowProgram(network(dtype), openvino_precision=precision)
        np.testing.assert_allclose(compiled(program, SMALL)(images)[0], wanted, rtol=rtol)


@pytest.mark.parametrize("batch", [1, 3])
def test_gathering_within_each_image_does_not_crash_the_process(batch: int) -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        boxes = tf.reshape(tf.cast(pixels, tf.float32), (-1, 256, 3))
        scores, places = tf.math.top_k(boxes[..., 0], 100)
        return scores, tf.gather(boxes, places, batch_dims=1), tf.gather(boxes[..., 1], places, batch_dims=1)

    bucket = Bucket(batch, 16, 16)
    images = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (batch, 3, 1)), axis=2)
    images = images.transpose(0, 2, 1).reshape(*bucket, 3)
    for got, expected in zip(
        compiled(TensorFlowProgram(forward), bucket)(images), forward(tf.constant(images)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_gathering_in_a_branch_or_a_loop_does_not_crash_the_process(batch: int) -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        boxes = tf.reshape(tf.cast(pixels, tf.float32), (-1, 60, 1))
        places = tf.argsort(boxes[..., 0], stable=True)
        chosen = tf.cond(tf.reduce_mean(boxes) > 1, lambda: tf.gather(boxes, places, batch_dims=1), lambda: boxes)

        def step(run: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return run + 1, tf.gather(values, places, batch_dims=1)

        _, again = tf.while_loop(lambda run, values: run < 2, step, (tf.constant(0), boxes))
        return chosen, again

    images = noise(BUCKET._replace(batch=batch))
    got = compiled(TensorFlowProgram(forward), BUCKET._replace(batch=batch))(images)
    for own, wanted in zip(got, forward(tf.constant(images)), strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_the_layers_of_a_profiled_model_and_what_they_took() -> None:
    large = Bucket(8, 96, 96)  # a layer of a small one takes less than the microsecond that OpenVINO counts in
    model = TensorFlowProgram(small_network()).in_openvino(large, is_profiled=True)
    layers = model.layers([noise(large)], runs=2)
    assert any("Conv" in layer.operation for layer in layers)
    assert all(layer.name and layer.kernel and layer.seconds > 0 for layer in layers)


class SlowAtFirst:
    """A compiled model and its request in one, whose layers' first runs are slow, and which tells means of all runs."""

    def __init__(self, *took_us: list[int]) -> None:
        self._took_us = took_us
        self._runs = 0

    def create_infer_request(self) -> SlowAtFirst:
        return self

    def infer(self, *_: object, **__: object) -> None:
        self._runs += 1

    def get_profiling_info(self) -> list[SimpleNamespace]:
        means = [sum(took_us[: self._runs]) // self._runs for took_us in self._took_us]
        return [
            SimpleNamespace(node_name=str(number), node_type="", exec_type="", real_time=timedelta(microseconds=mean))
            for number, mean in enumerate(means)
        ]


def test_first_runs_do_not_count_in_what_a_layer_takes() -> None:
    slow = CompiledModel(SlowAtFirst([900, 100, 10, 30], [0, 0, 0, 0], [7, 1, 0, 0]), 0.0, Precision.FLOAT32)
    layers = slow.layers([noise(SMALL)], runs=2)
    assert {layer.name: layer.seconds for layer in layers} == pytest.approx({"0": 20e-6})


def test_what_was_sealed_goes_on_and_converts_nothing_more() -> None:
    program = TensorFlowProgram(sums)
    executable = compiled(program, BUCKET)
    program.dismantle()
    images = noise(BUCKET)
    np.testing.assert_allclose(executable(images)[0], images.sum(axis=(1, 2)))
    with pytest.raises(RuntimeError, match="sealed"):
        compiled(program, BUCKET._replace(batch=1))


def test_nothing_that_reports_usage_is_imported_even_if_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "openvino_telemetry"
    package.mkdir()
    imported = tmp_path / "imported"
    (package / "__init__.py").write_text(f"open({str(imported)!r}, 'w').close()\n")
    (package / "backend.py").write_text("backend_ga4 = None\n")
    code = """
import importlib, sys
from xlaserve.programs.openvino import openvino_program
openvino_program.load()
importlib.import_module("openvino.tools.ovc")  # what converts models, and would send reports
assert not any('telemetry' in name and module for name, module in sys.modules.items()
               if name.startswith('openvino_')), 'imported'
"""
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not imported.exists()
