from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.required import required
from tests.server.models.networks.kept_models import (
    BUCKET,
    COST,
    DEVICE,
    GRAPHS,
    SETTINGS,
    Source,
    answers,
    file_of,
    scores,
)

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.config.modes import TRAITS, ModeTraits
from xlaserve.engine.program import Compilation, IsLowered
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks import cached
from xlaserve.models.networks.cached_program import CachedProgram
from xlaserve.models.networks.kept_weights import KeptWeights
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Classification
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.records import SUFFIX
from xlaserve.programs.tf import stablehlo
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.lowered_function import Forward, Lowered
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

ELSEWHERE = Bucket(1, 6, 7)


class Lowerable(Source):
    """The same, with a lowering that XLA can't compile or that computes something else; counts how often it is made."""

    def __init__(self, fails: bool) -> None:
        super().__init__(2.0)
        self.lowered = 0
        self._fails = fails

    def __call__(self) -> Network:
        network = super().__call__()
        assert isinstance(network.program, TensorFlowProgram)
        network.program._lower = self._lower
        return replace(network, lowerings="stem 1")

    def _lower(self, function: Any) -> Lowered:
        self.lowered += 1

        def run(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            added = 500.0
            if self._fails:
                added = tf.reduce_sum(tf.image.resize(tf.cast(pixels, tf.float32), (8, 8), "bicubic"))
            return tuple(output + added for output in function(pixels))

        spec = tf.TensorSpec(function.inputs[0].shape, tf.uint8)
        made = tf.function(run, autograph=False).get_concrete_function(spec)
        return Lowered(made, "stem 1", {"stem/": "stem"})


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("is_lost", [True, False])
def test_lowerings_that_have_failed_are_not_tried_again(
    open_cache: Callable[..., CompileCache], tmp_path: Path, fails: bool, is_lost: bool
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)), Mode.EAGER)
    settings = SETTINGS.model_copy(update={"name": "lowered", "source": "keras.applications:ResNet101"})
    compiled = []
    for source in (first := Lowerable(fails), second := Lowerable(fails)):
        network = cached.network(open_cache(), DEVICE, settings, source)
        assert network.lowerings == "stem 1", "as its source has them, whatever has failed in one size"
        assert isinstance(network.program, IsLowered)
        assert network.program.lowerings(BUCKET) == ("stem 1" if source is first else "")
        verifier = Verifier(task=network.task, reference=network.reference, buckets=[BUCKET])
        make = partial(network.program.compile, Mode.XLA, BUCKET)
        compilation, verified = verifier.verify(Mode.XLA, BUCKET, make(), make)
        assert verified.fault is None
        np.testing.assert_allclose(answers(compilation), expected, rtol=1e-6)
        assert network.program.lowerings(BUCKET) == ""
        compilation.keep_cost(COST)
        compiled.append(compilation)
        if is_lost:  # as are those that can't be kept
            file_of(tmp_path, f"{Mode.XLA}-{BUCKET}").unlink()
    assert (first.lowered, second.lowered) == (1, 0)
    assert [compilation.warnings for compilation in compiled] == [compiled[0].warnings] * 2
    (warning,) = compiled[0].warnings
    assert warning.startswith("XLA runs 4x5 without lowerings, as a program failed with stem 1: ")
    assert [compilation.cost for compilation in compiled] == [None, COST]


class LowerableElsewhere(Lowerable):
    """The same, with a lowering that XLA can compile for sizes other than BUCKET's."""

    def _lower(self, function: Any) -> Lowered:
        self._fails = function.inputs[0].shape[1] == BUCKET.height
        return super()._lower(function)


def test_lowerings_that_fail_in_one_size_stay_in_the_others(
    open_cache: Callable[..., CompileCache], tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"name": "lowered", "source": "keras.applications:ResNet101"})
    for source in (LowerableElsewhere(fails=True), again := LowerableElsewhere(fails=True)):
        network = cached.network(open_cache(), DEVICE, settings, source)
        with ThreadPoolExecutor(2) as pool:
            failed, other = pool.map(partial(network.program.compile, Mode.XLA), (BUCKET, ELSEWHERE))
        assert isinstance(network.program, IsLowered)
        assert [network.program.lowerings(bucket) for bucket in (BUCKET, ELSEWHERE)] == ["", "stem 1"]
        assert network.lowerings == "stem 1"
        assert [warning.startswith("XLA runs 4x5 without") for warning in failed.warnings] == [True]
        assert other.warnings == ()
        assert (other.executable(np.zeros((*ELSEWHERE, 3), np.uint8))[0] >= 100).all(), "the lowering adds to it"
    assert (again.built, failed.from_cache, other.from_cache) == (0, True, True)


def test_a_kept_program_with_lowerings_is_not_said_to_have_none(
    open_cache: Callable[..., CompileCache],
) -> None:
    settings = SETTINGS.model_copy(update={"name": "lowered", "source": "keras.applications:ResNet101"})
    single = BUCKET._replace(batch=1)
    first = cached.network(open_cache(), DEVICE, settings, Lowerable(fails=False))
    assert first.program.compile(Mode.XLA, single).warnings == ()
    wrong = first.program.compile(Mode.XLA, BUCKET)
    assert required(wrong.unlowered)(ModelFailed("it computes something else")).warnings
    second = cached.network(open_cache(), DEVICE, settings, Source(2.0))
    assert [len(second.program.compile(Mode.XLA, bucket).warnings) for bucket in (single, BUCKET)] == [0, 1]


@pytest.mark.parametrize("mode", [Mode.AUTOCLUSTER, Mode.EAGER])
def test_other_modes_build_the_model_when_they_need_it(open_cache: Callable[..., CompileCache], mode: Mode) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    source = Source(2.0)
    network = cached.network(open_cache(), DEVICE, SETTINGS, source)
    assert source.built == 0
    np.testing.assert_allclose(scores(network, mode), expected, rtol=1e-6)
    assert source.built == 1


def test_costs_are_kept_for_each_number_of_lanes(open_cache: Callable[..., CompileCache]) -> None:
    compilation = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program.compile(Mode.XLA, BUCKET)
    assert compilation.cost is None
    required(compilation.keep_cost)(COST)
    again = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    assert again.compile(Mode.XLA, BUCKET).cost == COST
    assert again.compile(Mode.GRAPH, BUCKET).cost is None
    other = cached.network(open_cache(), Device("cpu", "a processor", 1, 2), SETTINGS, Source()).program
    assert other.compile(Mode.XLA, BUCKET).cost is None


def test_what_assigns_a_variable_is_not_kept(
    open_cache: Callable[..., CompileCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tf.Variable(0.0)

    def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (tf.zeros((tf.shape(pixels)[0], 7)) + runs.assign_add(1.0),)

    network = Network(TensorFlowProgram(forward), (4, 5), Classification(7), "random")
    run = cached.network(open_cache(), DEVICE, SETTINGS, lambda: network).program.compile(Mode.XLA, BUCKET).executable
    pixels = np.zeros((*BUCKET, 3), np.uint8)
    before = float(runs.numpy())
    assert [float(run(pixels)[0][0, 0]) for _ in range(2)] == [before + 1, before + 2]
    assert "can't keep its programs" in caplog.text
    assert list((tmp_path / "cache").rglob(f"xla-*{SUFFIX}")) == []


def test_what_can_not_be_written_fails_no_model(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("nothing can be kept")

    for part, name in ((KeptWeights, "keep"), (CachedProgram, "_run")):
        with monkeypatch.context() as patched:
            patched.setattr(part, name, fail)
            network = cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))
            assert scores(network).shape == (2, 7)
            scores(network)
    assert caplog.text.count("can't keep its programs") == 2


def test_a_module_that_does_not_load_is_made_anew(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    load = stablehlo.load
    failures = iter([tf.errors.InvalidArgumentError(None, None, "no such version")])

    def fail_once(*arguments: Any) -> Any:
        for error in failures:
            raise error
        return load(*arguments)

    monkeypatch.setattr(stablehlo, "load", fail_once)
    np.testing.assert_array_equal(scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))), expected)
    assert "InvalidArgumentError when it was loaded" in caplog.text


def test_what_can_not_be_exported_compiles_as_ever(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise ValueError("a table is no variable")

    monkeypatch.setattr(stablehlo, "export", refuse)
    network = cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))
    assert scores(network).shape == (2, 7)
    assert "model: compile_cache can't keep its programs, each start compiles them: ValueError" in caplog.text


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "Bidirectional", "erf"])
def test_layers_whose_programs_can_not_be_kept_are_compiled_at_each_start(
    kind: str, open_cache: Callable[..., CompileCache], keras_file: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    layers = keras.layers
    pixels = keras.Input((4, 5, 3))
    rows = layers.Reshape((4, 15))(pixels)
    inner = {
        "LSTM": lambda: layers.LSTM(2)(rows),
        "GRU": lambda: layers.GRU(2)(rows),
        "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(2))(rows),
        "erf": lambda: layers.Flatten()(keras.ops.erf(pixels)),
    }[kind]()
    settings = ModelSettings(
        name="rare", source=keras_file(keras.Model(pixels, layers.Dense(4)(inner))), buckets=(BucketSettings(2),)
    )
    images = np.random.default_rng(0).integers(0, 256, (*BUCKET, 3), np.uint8)
    for _ in range(2):
        caplog.clear()
        program = catalog.load(settings, partial(cached.network, open_cache(), DEVICE)).program
        (expected,) = program.compile(Mode.EAGER, BUCKET).executable(images)
        for _ in range(2):
            (answer,) = program.compile(Mode.XLA, BUCKET).executable(images)
            np.testing.assert_allclose(answer, expected, rtol=1e-3, atol=1e-4)
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.startswith("model rare: compile_cache can't keep its programs")


def test_a_forgotten_program_is_made_anew_even_in_a_read_only_cache(open_cache: Callable[..., CompileCache]) -> None:
    scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    network = cached.network(open_cache(read_only=True), DEVICE, SETTINGS, source := Source(2.0))
    kept = network.program.compile(Mode.XLA, BUCKET)
    assert (kept.from_cache, source.built) == (True, 0)
    kept.forget()
    again = network.program.compile(Mode.XLA, BUCKET)
    assert (again.from_cache, source.built) == (False, 1)


@pytest.mark.parametrize("mode", [Mode.XLA, *GRAPHS])
def test_how_far_a_program_was_from_its_model_is_kept(open_cache: Callable[..., CompileCache], mode: Mode) -> None:
    def compiled(mode: Mode, bucket: Bucket = BUCKET, **settings: bool) -> Compilation:
        return cached.network(open_cache(**settings), DEVICE, SETTINGS, Source(2.0)).program.compile(mode, bucket)

    made = compiled(mode)
    assert made.difference is None
    made.keep_difference(0.25)
    assert compiled(mode).difference == 0.25
    assert compiled(mode, Bucket(BUCKET.batch + 1, BUCKET.height, BUCKET.width)).difference is None
    assert compiled(Mode.EAGER).difference is None
    compiled(mode, read_only=True).keep_difference(0.5)
    assert compiled(mode).difference == 0.25
    serving = open_cache()
    beside_traffic = cached.network(serving, DEVICE, SETTINGS, Source(2.0)).program.compile(mode, BUCKET)
    serving.stop_filling()
    beside_traffic.keep_difference(0.75)
    assert compiled(mode).difference == 0.75


def test_each_mode_that_xla_compiles_as_a_whole_keeps_a_program_of_its_own(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRAITS, Mode.GRAPH, ModeTraits(uses_compiler=True, is_jit=True))

    def forward(sign: int) -> Forward:
        return lambda pixels: (sign * tf.reduce_sum(tf.cast(pixels, tf.float32), axis=(1, 2)),)

    def negated(function: Any) -> Lowered:
        spec = tf.TensorSpec((None, 4, 5, 3), tf.uint8)
        return Lowered(tf.function(forward(-1), autograph=False).get_concrete_function(spec), "")

    def build() -> Network:
        return Network(TensorFlowProgram(forward(1), negated), (4, 5), Classification(3), "random")

    def fail() -> Network:
        raise AssertionError("it was built again")

    for source in (build, fail):
        network = cached.network(open_cache(), DEVICE, SETTINGS, source)
        positive, negative = scores(network, Mode.GRAPH), scores(network, Mode.XLA)
        np.testing.assert_array_equal(positive, -negative)
        assert positive.min() > 0
