from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tests.required import required
from tests.server.models.networks.kept_models import (
    BUCKET,
    COST,
    DEVICE,
    GRAPHS,
    SETTINGS,
    Source,
    file_of,
    scores,
)

from xlaserve.config import Bucket, Mode, ModelSettings
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.models.networks import cached, model_identity
from xlaserve.models.networks.network import Network
from xlaserve.models.networks.preparation import TEACHABLE_MACHINE
from xlaserve.models.task import Classification, Detection, Regression, Task, Tensors, TensorSpec
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.environment import digest
from xlaserve.programs.cache.records import SUFFIX, RecordFolder

OTHER = SETTINGS.model_copy(update={"source": "keras.applications:ResNet101"})


def test_what_was_built_once_is_not_built_again(open_cache: Callable[..., CompileCache]) -> None:
    first = cached.network(open_cache(), DEVICE, SETTINGS, source := Source(2.0))
    expected = scores(first)
    other = Source(3.0)
    second = cached.network(open_cache(), DEVICE, SETTINGS, other)
    np.testing.assert_array_equal(scores(second), expected)
    assert (source.built, other.built) == (1, 0)
    facts = [(n.size, n.task, n.weights, n.default_size, n.multiple, n.lowerings) for n in (first, second)]
    assert facts[0] == facts[1]


HEADS = Tensors(
    (TensorSpec("sex", "FP32", (-1, 2)), TensorSpec("age", "FP32", (-1, 1)), TensorSpec("kept", "BOOL", (-1, -1))),
    (Classification(2, ("f", "m"), threshold=0.4), Regression(1, (("age", "years"),), at=1)),
)


def test_the_preparation_of_images_comes_back(open_cache: Callable[..., CompileCache]) -> None:
    def build() -> Network:
        return replace(Source()(), preparation=TEACHABLE_MACHINE)

    for _ in range(2):
        assert cached.network(open_cache(), DEVICE, SETTINGS, build).preparation == TEACHABLE_MACHINE


@pytest.mark.parametrize("task", [Classification(7), Detection(3, ("a", "b", "c"), max_detections=9), HEADS])
def test_the_task_comes_back(open_cache: Callable[..., CompileCache], task: Task) -> None:
    for _ in range(2):
        assert cached.network(open_cache(), DEVICE, SETTINGS, Source(task=task)).task == task


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
    RecordFolder(file.parent, read_only=False).write(file.name.removesuffix(SUFFIX), header, {"x": b"y"})
    answers, (again,) = start()
    np.testing.assert_array_equal(answers, expected)
    np.testing.assert_array_equal(again, reference)
    assert f"{file} is damaged" in caplog.text
    assert file.exists()


def test_nothing_is_kept_of_files_replaced_while_they_were_loaded(
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
    monkeypatch.setattr(model_identity, "digest", reads)

    def build() -> Network:
        if is_replaced:
            (other := tmp_path / "other").write_text("new")
            os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
            other.replace(file)
        return Source(2.0)()

    cached.network(open_cache(), DEVICE, ModelSettings(name="model", source=str(file)), build)
    assert reads.call_count == (1 if is_settled and not is_replaced else 2)
    assert bool([*(tmp_path / "cache").rglob(f"*{SUFFIX}")]) is not is_replaced


def test_kept_programs_are_not_mixed_with_those_of_replaced_files(
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


@pytest.mark.parametrize(("mode", "warnings"), [(0o700, 0), (0o755, 0), (0o770, 0), (0o777, 1), (0o1777, 1)])
def test_a_cache_that_everybody_can_write_is_warned_of(
    mode: int, warnings: int, open_cache: Callable[..., CompileCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    open_cache()
    assert [record.getMessage().count("chmod go-w") for record in caplog.records] == [1] * warnings
