from __future__ import annotations

import io
import zipfile
from pathlib import Path

import h5py
import pytest
import tensorflow as tf
from tests.server.models.sources.onnx_writer import model

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.models import catalog
from xlaserve.models.sources import content_kinds


def archive(*names: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name in names:
            opened.writestr(name, "{}")
    return written.getvalue()


def hdf5() -> bytes:
    written = io.BytesIO()
    h5py.File(written, "w").close()
    return written.getvalue()


def graph() -> bytes:
    with tf.Graph().as_default() as made:
        tf.identity(tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 3], name="photo"))
    return bytes(made.as_graph_def().SerializeToString())


CONTENT = {
    ".keras": archive("metadata.json", "config.json", "model.weights.h5"),
    ".h5": hdf5(),
    ".onnx": model([], pixels=("x", [1]), scores=("y", [1]), weights=[]),
    ".tflite": b"\x1c\0\0\0TFL3" + bytes(99),
    ".pb": graph(),
    ".pt": archive("net/data.pkl", "net/version"),
}
NAMES = [".keras", ".h5", ".onnx", ".tflite", ".pb", ".jax", ""]
ALIKE = {".keras", ".h5"}


@pytest.mark.parametrize("suffix", NAMES)
@pytest.mark.parametrize("of", CONTENT)
def test_a_file_that_is_named_as_another_kind_is_to_be_renamed(tmp_path: Path, of: str, suffix: str) -> None:
    (file := tmp_path / f"my net{suffix}").write_bytes(CONTENT[of])
    if suffix == of or {suffix, of} == ALIKE:
        content_kinds.check_name(file)
        return
    with pytest.raises(ModelFailed, match=rf"mv '.*' 'my net\{of}'") as refused:
        catalog.load(ModelSettings(name="a", source=str(file)))
    if suffix:
        with pytest.raises(ModelFailed) as inspected:
            formats.describe(file)
        assert str(inspected.value) == str(refused.value)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", archive("other"), b"\x08\x01\x12\x02\x0a\0"])
def test_content_that_tells_nothing_is_of_no_kind(tmp_path: Path, content: bytes) -> None:
    (file := tmp_path / "net.keras").write_bytes(content)
    assert content_kinds.of(file) is None
