from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.config import Color, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import example_files
from xlaserve.models.example_files import Examples, for_task, read
from xlaserve.models.task import (
    Classification,
    Embedding,
    ImageToImage,
    Regression,
    Segmentation,
    Tensors,
    TensorSpec,
)

NAMES = ("a.png", "in/b.png")
SCORES = np.array([[0.25, 0.75], [1.0, 0.0]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"an image")
    return tmp_path


def save(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "predictions.npz", **{"files": np.array(NAMES), "scores": SCORES, **arrays})


def settings(**fields: Any) -> ModelSettings:
    return ModelSettings(name="a", source="a.keras", **fields)


def test_files_and_outputs_are_read_from_an_npz_file(folder: Path) -> None:
    save(folder, more=np.zeros((2, 3), np.int64))
    examples = read(folder)
    assert examples.names == NAMES
    assert [*map(examples.path, range(2))] == [folder / name for name in NAMES]
    assert {name: values.shape for name, values in examples.outputs.items()} == {"scores": (2, 2), "more": (2, 3)}


def test_files_and_scores_are_read_from_a_csv_file(folder: Path) -> None:
    (folder / "predictions.csv").write_text("file,cat,dog\na.png,0.25,0.75\n\nin/b.png,1,0\n")
    examples = read(folder)
    assert examples.names == NAMES
    np.testing.assert_array_equal(examples.outputs["output"], SCORES)


def test_the_file_may_be_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere)
    assert read(folder, elsewhere / "predictions.npz").names == NAMES


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"files": np.array([*NAMES, "c.png"]), "scores": np.zeros((3, 2))}, "no c.png"),
        ({"files": np.array(["a.png", "a.png"])}, "a.png several times"),
        ({"files": np.array([1, 2])}, "got int64 [2]"),
        ({"files": np.array(NAMES, object)}, "Object arrays cannot be loaded"),
        ({"scores": np.zeros((3, 2))}, "scores: expected numbers for each of 2 files"),
        ({"scores": np.array(["x", "y"])}, "scores: expected numbers"),
        ({"files": np.array([], str), "scores": np.zeros((0, 2))}, "got none"),
    ],
    ids=["missing", "repeated", "numbers", "objects", "rows", "text", "empty"],
)
def test_wrong_arrays_are_refused_with_what_is_wrong(folder: Path, arrays: dict[str, Any], said: str) -> None:
    save(folder, **arrays)
    with pytest.raises(ModelFailed) as failed:
        read(folder)
    assert said in str(failed.value)
    assert str(folder) not in str(failed.value)


@pytest.mark.parametrize(
    ("arrays", "said"), [({"scores": SCORES}, "files"), ({"files": np.array(NAMES)}, "beside files, got none")]
)
def test_an_array_that_lacks_is_named(folder: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez(folder / "predictions.npz", **arrays)
    with pytest.raises(ModelFailed, match=said):
        read(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.png,0.25,0.75\n", "headings"),
        ("file,cat,dog\na.png,0.25\n", "image 1: expected a file and 2 numbers, got 2 fields"),
        ("file,cat,dog\na.png,x,1\n", "image 1: could not convert"),
        ("file\na.png\n", "image 1: expected a file and 1 numbers"),
        ("", "headings"),
    ],
)
def test_wrong_lines_are_refused_with_what_is_wrong(folder: Path, text: str, said: str) -> None:
    (folder / "predictions.csv").write_text(text)
    with pytest.raises(ModelFailed) as failed:
        read(folder)
    assert said in str(failed.value)


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, SCORES)
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"\x93NUMPY", array()])
def test_a_damaged_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "predictions.npz").write_bytes(content)
    with pytest.raises(ModelFailed, match=r"predictions\.npz"):
        read(folder)


def test_a_folder_without_outputs_says_how_to_make_them(folder: Path) -> None:
    with pytest.raises(ModelFailed, match=r"expected predictions\.npz or predictions\.csv .* np\.savez"):
        read(folder)


def examples(**outputs: Any) -> Examples:
    return Examples(Path("photos"), NAMES, {name: np.asarray(values) for name, values in outputs.items()})


def test_the_only_output_may_have_any_name() -> None:
    (scores,) = for_task(examples(dense_3=SCORES), Classification(2), settings())
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, SCORES)


def test_several_outputs_are_taken_by_their_names() -> None:
    task = Tensors((TensorSpec("age", "FP32", (-1, 1)), TensorSpec("kind", "INT64", (-1,))))
    given = examples(kind=[3, 4], age=[[1.5], [2.5]])
    age, kind = for_task(given, task, settings())
    assert age.shape == (2, 1)
    assert (str(age.dtype), str(kind.dtype)) == ("float32", "int64")
    with pytest.raises(ModelFailed, match="expected the outputs age, kind, got age, sex"):
        for_task(examples(age=[[1.5], [2.5]], sex=[1, 2]), task, settings())


@pytest.mark.parametrize("second", [[[0.25], [1.0]], [0.25, 1.0]])
def test_one_probability_becomes_the_scores_of_two_classes(second: Any) -> None:
    (scores,) = for_task(examples(output=second), Classification(2, threshold=0.5), settings())
    np.testing.assert_array_equal(scores, np.array([[0.75, 0.25], [0.0, 1.0]], np.float32))


def test_scores_of_pixels_become_the_likeliest_classes() -> None:
    scores = np.random.default_rng(0).random((2, 4, 5, 3))
    (maps,) = for_task(examples(output=scores), Segmentation(3), settings())
    np.testing.assert_array_equal(maps, scores.argmax(axis=-1))
    (masks,) = for_task(examples(output=scores[..., :1]), Segmentation(2), settings(threshold=0.25))
    np.testing.assert_array_equal(masks, scores[..., 0] >= 0.25)
    (own,) = for_task(examples(output=maps), Segmentation(3), settings())
    np.testing.assert_array_equal(own, maps)


def test_images_become_levels() -> None:
    values = np.linspace(-1.2, 1.2, 2 * 3 * 4).reshape(2, 3, 4)
    (levels,) = for_task(
        examples(output=values), ImageToImage(Color.GREY), settings(task="image", output_range="-1..1")
    )
    np.testing.assert_array_equal(levels[..., 0], np.rint(np.clip(values * 127.5 + 127.5, 0, 255)))


def test_numbers_without_a_second_axis_are_taken() -> None:
    (values,) = for_task(examples(output=[1.0, 2.0]), Regression(1), settings())
    assert values.shape == (2, 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_are_refused_with_their_image(wrong: float) -> None:
    scores = np.full((2, 2), 0.5, np.float32)
    scores[1, 0] = wrong
    with pytest.raises(ModelFailed, match="image 1"):
        for_task(examples(scores=scores), Classification(2), settings())


@pytest.mark.parametrize("task", [Classification(3), Embedding(3), Segmentation(2)])
def test_outputs_of_another_shape_are_refused(task: Any) -> None:
    with pytest.raises(ModelFailed, match=r"expected outputs of shape .*, got \[2, 2\]"):
        for_task(examples(output=SCORES.astype(np.int64)), task, settings())


def npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            opened.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def header(**fields: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, **fields})
    return file.getvalue()


GOOD = npz(files=npy(np.array(NAMES)), scores=npy(SCORES))
DIRECTORY = GOOD.index(b"PK\1\2")


def changed(*places: tuple[int, int]) -> bytes:
    octets = bytearray(GOOD)
    for place, octet in places:
        octets[place] = octet
    return bytes(octets)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(npz(files=b"no array", scores=npy(SCORES)), id="no array"),
        pytest.param(npz(files=npy(np.array(NAMES)), scores=b"no array"), id="no numbers"),
        pytest.param(npz(files=npy(np.array(NAMES)), scores=header(shape=(2, 2**50))), id="more than there is memory"),
        pytest.param(
            npz(files=npy(np.array(NAMES)), scores=header(shape=(2,)).replace(b"(2,)", b"((((")), id="no header"
        ),
        pytest.param(npz(files=npy(np.array([b"\xff", b"b.png"])), scores=npy(SCORES)), id="names that are no text"),
        pytest.param(changed((6, 1), (DIRECTORY + 8, 1)), id="encrypted"),
        pytest.param(changed((8, 97), (DIRECTORY + 10, 97)), id="an unknown compression"),
        pytest.param(changed((50, 255), (51, 255), (52, 255)), id="damaged"),
    ],
)
def test_damaged_and_foreign_npz_files_are_refused(folder: Path, content: bytes) -> None:
    (folder / "predictions.npz").write_bytes(content)
    with pytest.raises(ModelFailed, match=r"predictions\.npz"):
        read(folder)


def test_an_npz_file_that_becomes_too_large_is_not_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(folder / "predictions.npz", files=np.array(NAMES), scores=np.zeros((2, 10**4)))
    size = (folder / "predictions.npz").stat().st_size
    monkeypatch.setattr(example_files, "MAX_BYTES", size + 1000)
    with pytest.raises(ModelFailed, match=f"expected at most {size + 1000} bytes of outputs in predictions.npz"):
        read(folder)


def test_a_name_that_no_file_can_have_is_missing(folder: Path) -> None:
    save(folder, files=np.array(["a.png", "b" * 5000]))
    with pytest.raises(ModelFailed, match="got no bbbb"):
        read(folder)
