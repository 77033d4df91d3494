from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.errors import ProfilerBusy
from xlaserve.inspection import trace


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
