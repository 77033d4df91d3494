from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from xlaserve.errors import ProfilerBusy
from xlaserve.programs.tf import trace

TASK: Final = "ThreadpoolListener::StartRegion"


@pytest.fixture(scope="module")
def product() -> tf.types.experimental.ConcreteFunction:
    function = tf.function(lambda a: tf.nn.relu(a @ a), jit_compile=True, autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec((256, 256)))
    concrete(tf.zeros((256, 256)))
    return concrete


def test_a_recording_says_how_long_each_instruction_took(
    product: tf.types.experimental.ConcreteFunction, tmp_path: Path
) -> None:
    with trace.recorded(tmp_path):
        for _ in range(3):
            product(tf.constant(np.ones((256, 256), np.float32))).numpy()
    seconds = trace.instruction_s(tmp_path)
    assert any("dot" in name.lower() or "matmul" in name.lower() for name in seconds), seconds
    assert all(0 < second < 10 for second in seconds.values())


def test_there_is_one_recording_at_a_time_and_an_error_ends_it(tmp_path: Path) -> None:
    with trace.recorded(tmp_path / "first"), pytest.raises(ProfilerBusy), trace.recorded(tmp_path / "second"):
        pass
    with pytest.raises(RuntimeError, match="of ours"), trace.recorded(tmp_path / "third"):
        raise RuntimeError("of ours")
    with trace.recorded(tmp_path / "fourth"):
        pass


def test_where_nothing_was_recorded_nothing_took_time(tmp_path: Path) -> None:
    assert trace.instruction_s(tmp_path) == {}


def test_times_of_instructions_that_wait_for_each_other_fit_in_the_total(tmp_path: Path) -> None:
    @tf.function(jit_compile=True, autograph=False)
    def products(a: tf.Tensor) -> tf.Tensor:
        for _ in range(10):
            a = tf.tanh(a @ a)
        return a

    images = tf.ones((512, 512))
    products(images)
    with trace.recorded(tmp_path):
        began = time.perf_counter()
        for _ in range(5):
            products(images).numpy()
        took_s = time.perf_counter() - began
    assert took_s / 10 < sum(trace.instruction_s(tmp_path).values()) < took_s


@pytest.mark.parametrize(
    ("others", "end_us"),
    [
        pytest.param([], 9, id="nothing follows"),
        pytest.param([("pool", TASK, 3), ("pool", "next", 6)], 6, id="the next one begins in its last task"),
        pytest.param([("pool", "next", 3), ("pool", TASK, 6)], 9, id="another one began before its last task"),
        pytest.param([("caller", "next", 6)], 9, id="another thread begins another one"),
        pytest.param([("pool", TASK, 3), ("pool", "next", 12)], 9, id="the thread begins another one later"),
    ],
)
def test_an_instruction_ends_where_its_last_thread_begins_the_next(
    others: list[tuple[str, str, int]], end_us: int, tmp_path: Path
) -> None:
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    names = ["call", "end: call", "next", TASK, "hlo_op", "_p", "_c"]
    for number, name in enumerate(names):
        plane.event_metadata[number].name = plane.stat_metadata[number].name = name
    number_of = names.index
    lines = {name: plane.lines.add(name=name) for name in ("caller", "pool")}

    def add(thread: str, name: str, at_us: int) -> Any:
        event = lines[thread].events.add(metadata_id=number_of(name), offset_ps=at_us * 10**6)
        if name in ("call", "next"):
            event.stats.add(metadata_id=number_of("hlo_op"), ref_value=number_of(name))
        return event.stats

    add("caller", "call", 1).add(metadata_id=number_of("_p"), uint64_value=7)
    add("pool", "end: call", 9).add(metadata_id=number_of("_c"), uint64_value=7)
    for thread, name, at_us in others:
        add(thread, name, at_us)
    folder = tmp_path / "plugins" / "profile" / "run"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(space.SerializeToString())
    assert trace.instruction_s(tmp_path)["call"] == pytest.approx((end_us - 1) / 10**6)
