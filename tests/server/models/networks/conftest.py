from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.programs.cache.compile_cache import CompileCache


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
