from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xlaserve.models.example_files import read
from xlaserve_client import AsyncVisionClient, VisionClient

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\nand more"


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "photos" / name for name in ("a.jpg", "in/a.jpg", "b.png")]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(PNG + bytes([number]))
    return paths


def test_the_server_reads_what_the_client_saves(photos: list[Path], tmp_path: Path) -> None:
    scores = np.arange(8, dtype=np.float32).reshape(4, 2)
    file = VisionClient.save_examples(tmp_path / "new" / "folder", [*map(str, photos), PNG], scores)
    assert file == tmp_path / "new" / "folder" / "predictions.npz"
    examples = read(file.parent)
    assert examples.names == ("00000-a.jpg", "00001-a.jpg", "b.png", "00003.png")
    assert [examples.path(row).read_bytes() for row in range(4)] == [PNG + bytes([n]) for n in range(3)] + [PNG]
    np.testing.assert_array_equal(examples.outputs["output"], scores)


def test_images_that_are_in_the_folder_stay_where_they_are(photos: list[Path], tmp_path: Path) -> None:
    before = {path.stat().st_ino for path in photos}
    VisionClient.save_examples(tmp_path / "photos", photos, {"a": [1, 2, 3], "b": np.zeros((3, 2))})
    examples = read(tmp_path / "photos")
    assert examples.names == ("a.jpg", "in/a.jpg", "b.png")
    assert {path.stat().st_ino for path in (tmp_path / "photos").rglob("*.*g")} == before
    assert {name: values.shape for name, values in examples.outputs.items()} == {"a": (3,), "b": (3, 2)}


def test_the_asyncio_client_has_it_too() -> None:
    assert AsyncVisionClient.save_examples is VisionClient.save_examples


def test_the_lines_for_a_notebook_write_what_the_server_reads(
    photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "notebook.md").read_text()
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "np.savez" in block)
    monkeypatch.chdir(tmp_path)
    model = SimpleNamespace(predict=lambda batch: batch * 2)
    exec(lines, {"preprocessed": lambda path: np.array([len(path.read_bytes()), 1.5]), "model": model})
    examples = read(tmp_path / "photos")
    assert examples.names == ("a.jpg",)
    np.testing.assert_array_equal(examples.outputs["scores"], [[2 * (len(PNG) + 1), 3.0]])


@pytest.mark.parametrize(
    ("images", "outputs", "error"),
    [
        ([PNG], np.zeros((2, 3)), ValueError),
        ([PNG], "cat", ValueError),
        ([PNG], {}, ValueError),
        ([PNG], {"files": [1]}, ValueError),
        ([PNG], ["cat"], ValueError),
        ([], np.zeros((0, 3)), ValueError),
        (PNG, np.zeros((1, 3)), TypeError),
        ([np.zeros((3, 3, 3))], np.zeros((1, 3)), TypeError),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    images: Any, outputs: Any, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match=r"^(images|outputs): expected"):
        VisionClient.save_examples(tmp_path / "photos", images, outputs)
    assert not [*tmp_path.rglob("*.npz")]
