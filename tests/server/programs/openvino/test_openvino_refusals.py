"""Refusals of OpenVINO: graphs, operations and shapes, each with the reason."""

from __future__ import annotations

import logging
import pickle
import resource
import sys

import pytest
import tensorflow as tf
from tests.server.programs.openvino.networks import compiled
from tests.server.programs.tf.functions import BUCKET, sums

from xlaserve.config import Mode, Precision
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino.openvino_program import (
    ConvertedGraph,
    Threads,
    UntranslatableGraphError,
)
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram
from xlaserve.programs.xla_refusal import explain


def test_an_operation_that_openvino_does_not_know_is_named() -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.math.zeta(tf.cast(pixels, tf.float32) + 2.0, 1.0),)

    with pytest.raises(ModelFailed, match="OpenVINO has no translation of Zeta") as failed:
        TensorFlowProgram(forward).compile(Mode.OPENVINO, BUCKET)
    assert explain(failed.value).operation == "Zeta"


def test_a_known_operation_that_openvino_cannot_convert_is_named_as_well() -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        spectrum = tf.signal.fft2d(tf.cast(pixels[..., 0], tf.complex64))
        return (tf.math.zeta(tf.math.real(spectrum) + 2.0, 1.0),)

    with pytest.raises(ModelFailed, match="OpenVINO has no translation of Zeta, FFT2D"):
        TensorFlowProgram(forward).compile(Mode.OPENVINO, BUCKET)


def test_a_shape_that_does_not_fit_is_refused_with_what_is_wrong() -> None:
    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.reshape(tf.cast(pixels, tf.float32), (1, 4, 5, 3)),)

    with pytest.raises(ModelFailed, match=r"OpenVINO can't compile it: While validating node .*Reshape"):
        TensorFlowProgram(forward).compile(Mode.OPENVINO, BUCKET)


def test_of_a_refusal_the_line_is_told_that_says_why() -> None:
    class Refusing:
        def clone(self) -> Refusing:
            raise RuntimeError(
                "Exception from src/inference/src/cpp/core.cpp:117:\n"
                "Check 'newNode' failed at src/plugins/intel_cpu/src/node.cpp:1626:\n"
                "Unsupported operation of type: Convert name: Transpose_41912\n"
            )

    converted = ConvertedGraph(Refusing())
    with pytest.raises(ModelFailed, match="can't compile it: Unsupported operation of type: Convert name: Transpose"):
        converted.compile([(1, 4, 5, 3)], Precision.FLOAT32, Threads(1, 1))


def test_an_operation_unknown_to_openvino_stays_named_across_processes() -> None:
    error = pickle.loads(pickle.dumps(UntranslatableGraphError("Zeta")))
    assert (str(error), error.operations) == ("OpenVINO has no translation of Zeta", "Zeta")


def test_loggers_are_left_as_they_are() -> None:
    before = logging.root.level, list(logging.root.handlers), list(logging.root.filters)
    compiled(TensorFlowProgram(sums), BUCKET)
    assert (logging.root.level, logging.root.handlers, logging.root.filters) == before


def test_a_model_that_can_not_be_frozen_is_refused_with_the_reason() -> None:
    counter = tf.Variable(0.0)

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        counter.assign_add(1.0)
        return (tf.reduce_mean(tf.cast(pixels, tf.float32), axis=(1, 2)) + counter,)

    with pytest.raises(ModelFailed, match="openvino runs frozen graphs alone, and this can be none: it assigns"):
        TensorFlowProgram(forward).compile(Mode.OPENVINO, BUCKET)


def test_without_openvino_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ModelFailed, match=r"mode openvino needs openvino; install xlaserve\[openvino\]"):
        TensorFlowProgram(sums).compile(Mode.OPENVINO, BUCKET)


def test_on_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    with pytest.raises(ModelFailed, match="mode openvino runs on a CPU only: expected device: cpu"):
        TensorFlowProgram(sums).compile(Mode.OPENVINO, BUCKET)


def test_a_graph_that_cannot_be_written_is_said_to_lack_temporary_space() -> None:
    graph = TensorFlowProgram(sums).converted(BUCKET)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(OSError, match="folder for temporary files"):
            graph.to_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
