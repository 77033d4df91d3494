from __future__ import annotations

import errno
import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from tests.server.models.networks.kept_models import (
    BUCKET,
    DEVICE,
    GRAPHS,
    SETTINGS,
    Source,
    answers,
    file_of,
    scores,
)

from xlaserve.config import Mode
from xlaserve.errors import ModelFailed
from xlaserve.models.networks import cached
from xlaserve.models.networks.cached_program import CachedProgram
from xlaserve.models.networks.kept_graphs import KINDS
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.records import SUFFIX
from xlaserve.programs.openvino.openvino_program import UntranslatableGraphError


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_kept_graph_serves_all_buckets_of_a_size_without_the_model(
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


def test_a_graph_that_cannot_be_frozen_serves_and_other_modes_are_kept(
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
        with pytest.raises(UntranslatableGraphError, match="OpenVINO has no translation of Zeta") as refused:
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


def test_graphs_from_the_cache_outlast_sealing_and_end_when_dismantled(open_cache: Callable[..., CompileCache]) -> None:
    scores(cached.network(open_cache(), DEVICE, SETTINGS, Source()), Mode.GRAPH)
    program = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    assert isinstance(program, CachedProgram)
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
