from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from tests.required import required

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings, Precision
from xlaserve.config.modes import TRAITS, ModeTraits
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.program import Compilation, IsLowered
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.models import catalog
from xlaserve.models.networks import cached
from xlaserve.models.networks.kept_graphs import KINDS
from xlaserve.models.networks.keras_runtime import keras
from xlaserve.models.networks.network import Network
from xlaserve.models.task import Classification, Detection, Task
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.environment import digest
from xlaserve.programs.cache.records import SUFFIX, Folder
from xlaserve.programs.openvino.openvino_program import UntranslatableError
from xlaserve.programs.tf import stablehlo
from xlaserve.programs.tf.device import Device
from xlaserve.programs.tf.lowered_function import Forward, Lowered
from xlaserve.programs.tf.tensorflow_program import TensorFlowProgram

DEVICE = Device("cpu", "a processor", 2, 1)
BUCKET = Bucket(2, 4, 5)
SETTINGS = ModelSettings(name="model", source="keras.applications:ResNet50")
COST = Cost(0.5, 0.75)
GRAPHS = tuple(KINDS)


class Source:
    """Builds a network whose scores are a product with `weight`, and counts."""

    def __init__(self, weight: float = 1.0, task: Task | None = None, openvino_knows_it: bool = True) -> None:
        self.built = 0
        self._activation = tf.identity if openvino_knows_it else partial(tf.math.zeta, q=1.0)
        self._weight = tf.Variable(tf.fill((3, 7), weight))
        self._task = task or Classification(7, tuple("abcdefg"))

    def __call__(self) -> Network:
        self.built += 1

        def forward(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
            means = tf.reduce_mean(tf.cast(pixels, tf.float32), axis=(1, 2))
            return (self._activation(means) @ self._weight,)

        program = TensorFlowProgram(forward)
        return Network(
            *(program, (None, 5), self._task, "random"), default_size=(4, 5), multiple=2, reference=program.reference
        )


@pytest.fixture
def open_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompileCache]:
    # TensorFlow has been imported by other tests: XLA's own executables are not kept here, all else is.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TF_XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")

    def open_cache(read_only: bool = False) -> CompileCache:
        return CompileCache(tmp_path / "cache", read_only=read_only)

    return open_cache


def scores(network: Network, mode: Mode = Mode.XLA, bucket: Bucket = BUCKET) -> np.ndarray:
    return answers(network.program.compile(mode, bucket), bucket)


def answers(compilation: Compilation, bucket: Bucket = BUCKET) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (*bucket, 3), np.uint8)
    (output,) = compilation.executable(pixels)
    return output


def file_of(folder: Path, name: str) -> Path:
    (file,) = (folder / "cache").rglob(f"{name}*{SUFFIX}")
    return file


def test_what_was_built_once_is_not_built_again(open_cache: Callable[..., CompileCache]) -> None:
    first = cached.network(open_cache(), DEVICE, SETTINGS, source := Source(2.0))
    expected = scores(first)
    other = Source(3.0)
    second = cached.network(open_cache(), DEVICE, SETTINGS, other)
    np.testing.assert_array_equal(scores(second), expected)
    assert (source.built, other.built) == (1, 0)
    facts = [(n.size, n.task, n.weights, n.default_size, n.multiple, n.lowerings) for n in (first, second)]
    assert facts[0] == facts[1]


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


ELSEWHERE: Final = Bucket(1, 6, 7)
"""A bucket of another size than BUCKET's."""


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


@pytest.mark.parametrize("task", [Classification(7), Detection(3, ("a", "b", "c"), max_detections=9)])
def test_the_task_comes_back(open_cache: Callable[..., CompileCache], task: Task) -> None:
    for _ in range(2):
        assert cached.network(open_cache(), DEVICE, SETTINGS, Source(task=task)).task == task


@pytest.mark.parametrize("mode", [Mode.AUTOCLUSTER, Mode.EAGER])
def test_other_modes_build_the_model_when_they_need_it(open_cache: Callable[..., CompileCache], mode: Mode) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    source = Source(2.0)
    network = cached.network(open_cache(), DEVICE, SETTINGS, source)
    assert source.built == 0
    np.testing.assert_allclose(scores(network, mode), expected, rtol=1e-6)
    assert source.built == 1


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_mode_with_a_graph_for_all_buckets_of_a_size_needs_no_model_at_a_later_start(
    open_cache: Callable[..., CompileCache], tmp_path: Path, mode: Mode
) -> None:
    larger = BUCKET._replace(batch=5)
    first = cached.network(open_cache(), DEVICE, SETTINGS, source := Source(2.0)).program
    made = [first.compile(mode, bucket) for bucket in (BUCKET, larger)]
    later = cached.network(open_cache(), DEVICE, SETTINGS, other := Source(3.0)).program
    read = [later.compile(mode, bucket) for bucket in (BUCKET, larger)]
    assert (source.built, other.built) == (1, 0)
    assert [one.from_cache for one in (*made, *read)] == [False, False, True, True]
    for before, after, bucket in zip(made, read, (BUCKET, larger), strict=True):
        np.testing.assert_array_equal(answers(before, bucket), answers(after, bucket))
    assert file_of(tmp_path, f"{mode}-").name == f"{mode}-4x5{SUFFIX}"


def test_the_modes_that_are_kept_are_those_that_can_be() -> None:
    assert {mode for mode in Mode if mode.traits.is_kept} == {Mode.XLA, *KINDS}


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_graph_that_was_found_to_be_wrong_is_made_anew(open_cache: Callable[..., CompileCache], mode: Mode) -> None:
    scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)), mode)
    program = cached.network(open_cache(), DEVICE, SETTINGS, source := Source(3.0)).program
    program.compile(mode, BUCKET).forget()
    again = program.compile(mode, BUCKET)
    assert (again.from_cache, source.built) == (False, 1)
    np.testing.assert_array_equal(
        scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)), mode), answers(again)
    )


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_graph_that_can_not_be_written_serves(
    open_cache: Callable[..., CompileCache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: Mode,
) -> None:
    def fail(graph: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(KINDS, mode, KINDS[mode]._replace(write=fail))
    network = cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))
    for _ in range(2):
        assert scores(network, mode).shape == (2, 7)
    assert caplog.text.count("can't keep its programs") == 1


def test_a_graph_that_can_not_be_frozen_serves_and_keeps_no_other_mode_from_being_kept(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("xlaserve.programs.tf.frozen_graph.MAX_BYTES", 0)
    for from_cache in (False, True):
        caplog.clear()
        program = cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)).program
        (warning,) = program.compile(Mode.GRAPH, BUCKET).warnings
        assert "graph mode runs slower than it could" in warning
        assert program.compile(Mode.GRAPH, BUCKET._replace(batch=1)).warnings == (warning,)
        assert caplog.text.count("can't keep its programs") == 1
        assert program.compile(Mode.XLA, BUCKET).from_cache is from_cache


def test_that_openvino_does_not_know_an_operation_is_kept(open_cache: Callable[..., CompileCache]) -> None:
    for built in (1, 0):
        source = Source(openvino_knows_it=False)
        program = cached.network(open_cache(), DEVICE, SETTINGS, source).program
        with pytest.raises(UntranslatableError, match="OpenVINO has no translation of Zeta") as refused:
            program.compile(Mode.OPENVINO, BUCKET)
        assert (refused.value.operations, source.built) == ("Zeta", built)


def test_without_openvino_the_model_is_not_built_for_it(
    open_cache: Callable[..., CompileCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores(cached.network(open_cache(), DEVICE, SETTINGS, Source()))
    monkeypatch.setitem(sys.modules, "openvino", None)
    program = cached.network(open_cache(), DEVICE, SETTINGS, source := Source()).program
    with pytest.raises(ModelFailed, match="needs openvino"):
        program.compile(Mode.OPENVINO, BUCKET)
    assert source.built == 0


@pytest.mark.parametrize("mode", GRAPHS)
def test_what_is_compiled_beside_traffic_is_not_kept(
    open_cache: Callable[..., CompileCache], tmp_path: Path, mode: Mode
) -> None:
    cache = open_cache()
    cache.stop_filling()
    assert scores(cached.network(cache, DEVICE, SETTINGS, Source()), mode).shape == (2, 7)
    assert list((tmp_path / "cache").rglob(f"{mode}-*{SUFFIX}")) == []


def test_graphs_from_the_cache_go_on_once_it_is_sealed_and_are_gone_once_it_is_dismantled(
    open_cache: Callable[..., CompileCache],
) -> None:
    scores(cached.network(open_cache(), DEVICE, SETTINGS, Source()), Mode.GRAPH)
    program = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    assert isinstance(program, cached.CachedProgram)
    compilation = program.compile(Mode.GRAPH, BUCKET)
    program.seal()
    assert answers(compilation).shape == (2, 7)
    graph = weakref.ref(compilation.executable.run._session.graph)  # type: ignore[attr-defined]
    gc.disable()
    try:
        program.dismantle()
        del compilation, program
        assert graph() is None
    finally:
        gc.enable()


def test_costs_are_kept_for_each_number_of_lanes(open_cache: Callable[..., CompileCache]) -> None:
    compilation = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program.compile(Mode.XLA, BUCKET)
    assert compilation.cost is None
    required(compilation.keep_cost)(COST)
    again = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    assert again.compile(Mode.XLA, BUCKET).cost == COST
    assert again.compile(Mode.GRAPH, BUCKET).cost is None
    other = cached.network(open_cache(), Device("cpu", "a processor", 1, 2), SETTINGS, Source()).program
    assert other.compile(Mode.XLA, BUCKET).cost is None


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, Mode.XLA) for name in ("network", "weights-", "xla-")] + [(f"{one}-", one) for one in GRAPHS],
)
def test_any_file_may_be_lost_or_damaged(
    open_cache: Callable[..., CompileCache], tmp_path: Path, name: str, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)), mode)

    def cut(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1])

    for damage in (Path.unlink, cut):
        damage(file_of(tmp_path, name))
        np.testing.assert_array_equal(
            scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)), mode), expected
        )
        source = Source(3.0)
        np.testing.assert_array_equal(scores(cached.network(open_cache(), DEVICE, SETTINGS, source), mode), expected)
        assert source.built == 0
    assert "is damaged" in caplog.text


OTHER = SETTINGS.model_copy(update={"source": "keras.applications:ResNet101"})


@pytest.mark.parametrize("name", ["network", "weights-", "xla-"])
def test_whole_records_of_another_model_are_not_taken_for_its_own(
    open_cache: Callable[..., CompileCache], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    own = file_of(tmp_path, name)
    scores(cached.network(open_cache(), DEVICE, OTHER, Source(3.0)))
    (others,) = set((tmp_path / "cache").rglob(f"{name}*{SUFFIX}")) - {own}
    others.replace(own)
    np.testing.assert_array_equal(scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))), expected)
    assert "written for another place" in caplog.text


@pytest.mark.parametrize("read_only", [False, True])
def test_weights_of_other_contents_than_their_name_says_are_made_anew(
    open_cache: Callable[..., CompileCache], tmp_path: Path, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    file = file_of(tmp_path, "weights-")
    weights = np.full((3, 7), 9, np.float32)
    forged = Folder(file.parent, read_only=False)
    forged.write(file.name.removesuffix(SUFFIX), {"arrays": [("float32", (3, 7))]}, {"0": weights.tobytes()})
    network = cached.network(open_cache(read_only), DEVICE, SETTINGS, Source(2.0))
    np.testing.assert_array_equal(scores(network), expected)
    assert "its name is not that of its contents" in caplog.text


@pytest.mark.parametrize(
    "name", ["network", "weights-", "xla-", "cost-", "difference-", "reference-", "graph-", "openvino-"]
)
@pytest.mark.parametrize(
    "header",
    [
        {},
        {"arrays": 3},
        {"outputs": "?"},
        {"alone_s": float("nan"), "loaded_s": 1.0},
        {"alone_s": 0.0, "loaded_s": 1.0},
    ],
)
def test_any_record_may_hold_something_else(
    open_cache: Callable[..., CompileCache],
    tmp_path: Path,
    name: str,
    header: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pixels = np.zeros((*BUCKET, 3), np.uint8)

    def start() -> tuple[np.ndarray, Any]:
        network = cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0))
        assert network.reference is not None
        compilation = network.program.compile(Mode.XLA, BUCKET)
        required(compilation.keep_cost)(COST)
        compilation.keep_difference(0.5)
        for mode in GRAPHS:
            np.testing.assert_allclose(scores(network, mode), scores(network), rtol=1e-5)
        return scores(network), network.reference(pixels)

    expected, (reference,) = start()
    file = file_of(tmp_path, name)
    Folder(file.parent, read_only=False).write(file.name.removesuffix(SUFFIX), header, {"x": b"y"})
    answers, (again,) = start()
    np.testing.assert_array_equal(answers, expected)
    np.testing.assert_array_equal(again, reference)
    assert f"{file} is damaged" in caplog.text
    assert file.exists()


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

    for name in ("_keep_weights", "_run"):
        with monkeypatch.context() as patched:
            patched.setattr(cached.CachedProgram, name, fail)
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


def test_what_makes_another_model_has_another_identity(tmp_path: Path) -> None:
    file, labels, folder = tmp_path / "weights.h5", tmp_path / "labels.txt", tmp_path / "saved"
    file.write_text("1")
    labels.write_text("1")
    folder.mkdir()
    (folder / "saved_model.pb").write_text("1")
    (calibration := tmp_path / "int8").mkdir()
    (calibration / "calibration.json").write_text("1")
    settings = ModelSettings(
        name="a",
        source=str(folder),
        weights=str(file),
        labels=labels,
        openvino_precision=Precision.INT8,
        calibration=calibration,
    )
    before = cached.identity(settings)
    assert cached.identity(settings.model_copy(update={"name": "b", "max_queue_images": 3, "decode": "fast"})) == before
    assert cached.identity(settings.model_copy(update={"preprocess": "unit"})) != before
    both, graph = (settings.model_copy(update={"modes": modes}) for modes in ((Mode.GRAPH, Mode.XLA), (Mode.GRAPH,)))
    assert cached.identity(both) == before != cached.identity(graph), "what is lowered for XLA is not known of this one"
    for path in (file, labels, folder / "saved_model.pb", calibration / "calibration.json"):
        path.write_text("2")
        assert cached.identity(settings) != before
        path.write_text("1")
    assert cached.identity(settings) == before


def test_a_link_that_is_set_to_other_weights_makes_another_model(tmp_path: Path) -> None:
    (source := tmp_path / "saved").mkdir()
    for weights in ("old", "new"):
        (tmp_path / weights).mkdir()
        (tmp_path / weights / "variables.index").write_text(weights)
    (link := source / "variables").symlink_to(tmp_path / "old")
    settings = ModelSettings(name="a", source=str(source))
    before = cached.identity(settings)
    link.unlink()
    link.symlink_to(tmp_path / "new")
    assert cached.identity(settings) != before


def test_nothing_is_kept_of_files_that_were_replaced_while_they_were_loaded(
    open_cache: Callable[..., CompileCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.keras"
    settings = ModelSettings(name="model", source=str(file))
    file.write_text("old")

    def build_of_new() -> Network:
        file.write_text("new")
        return Source(3.0)()

    of_new = scores(cached.network(open_cache(), DEVICE, settings, build_of_new))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert list((tmp_path / "cache").rglob(f"*{SUFFIX}")) == []
    file.write_text("old")  # rolled back
    rolled_back = scores(cached.network(open_cache(), DEVICE, settings, Source(2.0)))
    np.testing.assert_allclose(rolled_back * 1.5, of_new, rtol=1e-5)


@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_files_are_read_again_after_a_build_if_they_may_have_changed(
    is_settled: bool,
    is_replaced: bool,
    open_cache: Callable[..., CompileCache],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "model.keras"
    file.write_text("old")
    if is_settled:
        later_ns = time.time_ns() + 60 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    reads = Mock(wraps=digest)
    monkeypatch.setattr(cached, "digest", reads)

    def build() -> Network:
        if is_replaced:
            (other := tmp_path / "other").write_text("new")
            os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
            other.replace(file)
        return Source(2.0)()

    cached.network(open_cache(), DEVICE, ModelSettings(name="model", source=str(file)), build)
    assert reads.call_count == (1 if is_settled and not is_replaced else 2)
    assert bool([*(tmp_path / "cache").rglob(f"*{SUFFIX}")]) is not is_replaced


def test_kept_programs_are_not_mixed_with_those_of_files_that_replaced_theirs(
    open_cache: Callable[..., CompileCache], tmp_path: Path
) -> None:
    file = tmp_path / "model.keras"
    settings = ModelSettings(name="model", source=str(file))
    file.write_text("old")
    scores(cached.network(open_cache(), DEVICE, settings, Source(2.0)))
    network = cached.network(open_cache(), DEVICE, settings, Source(3.0))
    file.write_text("new")
    with pytest.raises(ModelFailed, match="source"):
        network.program.compile(Mode.XLA, Bucket(4, 4, 5))


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "kagglehub:a/b/keras/c"},
        {"source": "m.keras", "custom_objects": {"A": "a:A"}},
        {"source": "m.keras", "safe_mode": False},
    ],
)
def test_what_may_change_unnoticed_is_not_kept(
    settings: dict[str, Any], open_cache: Callable[..., CompileCache], tmp_path: Path
) -> None:
    source = Source()
    network = cached.network(open_cache(), DEVICE, ModelSettings(name="m", **settings), source)
    assert network.program.compile(Mode.XLA, BUCKET).cost is None
    assert source.built == 1
    assert list((tmp_path / "cache").rglob(f"*{SUFFIX}")) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_wrong_configuration(
    number: int,
    open_cache: Callable[..., CompileCache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("xlaserve.programs.cache.compile_cache.check_writable", fail)
    cache = open_cache()
    (warning,) = caplog.records
    assert "nothing is kept" in warning.getMessage()
    assert os.strerror(number) in warning.getMessage()
    assert scores(cached.network(cache, DEVICE, SETTINGS, Source(2.0))).shape == (2, 7)
    assert len(caplog.records) == 1


def test_a_read_only_cache_has_to_be_there(open_cache: Callable[..., CompileCache], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compile_cache: expected a folder that can be read"):
        open_cache(read_only=True)
    open_cache()
    open_cache(read_only=True)
    shutil.rmtree(tmp_path / "cache")


def test_weights_of_a_model_are_kept_once_for_all_buckets(
    open_cache: Callable[..., CompileCache], tmp_path: Path
) -> None:
    program = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    for batch in (1, 2, 4):
        program.compile(Mode.XLA, Bucket(batch, 4, 5))
    assert file_of(tmp_path, "weights-").exists()
    assert len(list((tmp_path / "cache").rglob(f"xla-*{SUFFIX}"))) == 3


def test_a_program_that_was_found_to_be_wrong_is_made_anew_even_where_it_stays(
    open_cache: Callable[..., CompileCache],
) -> None:
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
