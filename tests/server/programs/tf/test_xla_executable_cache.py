from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tensorflow as tf

from xlaserve.programs.tf import xla_executable_cache
from xlaserve.programs.tf.xla_executable_cache import FOLDER

ONE, TWO = (b"\x01a_xlaserve_%s__.1\x02code" % name for name in (b"one", b"two"))


@pytest.fixture(autouse=True)
def emptied_folder() -> Iterator[None]:
    yield
    for path in tf.io.gfile.glob(f"{FOLDER}/*"):
        tf.io.gfile.remove(path)


def test_each_function_takes_its_own_executables() -> None:
    assert xla_executable_cache.take("xlaserve_one") == {}
    xla_executable_cache.put({"one.pb": memoryview(ONE), "two.pb": memoryview(TWO)})
    assert xla_executable_cache.take("xlaserve_two") == {"two.pb": TWO}
    assert xla_executable_cache.take("xlaserve_two") == {}
    assert xla_executable_cache.take("xlaserve_one") == {"one.pb": ONE}


def test_nothing_is_put_outside_of_the_folder() -> None:
    xla_executable_cache.put({"../../escaped.pb": memoryview(b"code")})
    assert tf.io.gfile.listdir(FOLDER) == ["escaped.pb"]


def test_what_is_not_kept_takes_no_memory() -> None:
    xla_executable_cache.put({"one.pb": memoryview(ONE), "other.pb": memoryview(b"\x01a_cluster_0__.1\x02code")})
    xla_executable_cache.sweep()
    assert tf.io.gfile.listdir(FOLDER) == ["one.pb"]


def test_tensorflow_is_told_of_the_folder_beside_the_flags_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    xla_executable_cache.set_environment()
    assert os.environ["TF_XLA_FLAGS"] == (
        f"--tf_xla_auto_jit=2 --tf_xla_persistent_cache_directory={FOLDER} --tf_xla_persistent_cache_read_only=false"
    )
