from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.server.models.networks.kept_models import (
    DEVICE,
    SETTINGS,
    Source,
    file_of,
    scores,
)

from xlaserve.config import Bucket, Mode
from xlaserve.models.networks import cached
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.cache.records import SUFFIX, RecordFolder


@pytest.mark.parametrize("read_only", [False, True])
def test_weights_of_other_contents_than_their_name_says_are_made_anew(
    open_cache: Callable[..., CompileCache], tmp_path: Path, read_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = scores(cached.network(open_cache(), DEVICE, SETTINGS, Source(2.0)))
    file = file_of(tmp_path, "weights-")
    weights = np.full((3, 7), 9, np.float32)
    forged = RecordFolder(file.parent, read_only=False)
    forged.write(file.name.removesuffix(SUFFIX), {"arrays": [("float32", (3, 7))]}, {"0": weights.tobytes()})
    network = cached.network(open_cache(read_only), DEVICE, SETTINGS, Source(2.0))
    np.testing.assert_array_equal(scores(network), expected)
    assert "its name is not that of its contents" in caplog.text


def test_weights_of_a_model_are_kept_once_for_all_buckets(
    open_cache: Callable[..., CompileCache], tmp_path: Path
) -> None:
    program = cached.network(open_cache(), DEVICE, SETTINGS, Source()).program
    for batch in (1, 2, 4):
        program.compile(Mode.XLA, Bucket(batch, 4, 5))
    assert file_of(tmp_path, "weights-").exists()
    assert len(list((tmp_path / "cache").rglob(f"xla-*{SUFFIX}"))) == 3
