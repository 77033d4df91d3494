from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks.keras_runtime import keras


def test_labels_are_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("rose\n  daisy \nÄhre\n", encoding="utf-8")
    assert class_names.from_file(file, 3) == ("rose", "daisy", "Ähre")


def test_numbers_before_labels_are_left_out_where_each_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("0 rose\n1 2 daisies\n")
    assert class_names.from_file(file, 2) == ("rose", "2 daisies")
    file.write_text("0 rose\n2 daisies\n")
    assert class_names.from_file(file, 2) == ("0 rose", "2 daisies")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(("background", "face"), True), (("__Background__", "car"), True), (("face", "background"), False), (None, False)],
)
def test_the_first_class_may_be_the_background(labels: tuple[str, ...] | None, expected: bool) -> None:
    assert class_names.has_background(labels) is expected


def test_a_wrong_number_of_labels_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("rose\ndaisy\n")
    with pytest.raises(ModelFailed) as failure:
        class_names.from_file(file, 3)
    assert str(failure.value) == "labels: expected 3 lines, one for each class, got 2 in labels.txt"


def test_labels_that_cannot_be_read_are_refused_without_their_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFailed) as failure:
        class_names.from_file(tmp_path / "none.txt", 3)
    assert str(failure.value) == "labels: none.txt can't be read: No such file or directory"
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFailed, match=r"labels: binary.txt can't be read: it is not UTF-8 text"):
        class_names.from_file(binary, 3)


def test_imagenet_labels_stand_in_the_order_of_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(scores: Any, top: int) -> list[list[tuple[str, str, float]]]:
        return [[(f"n{i}", f"class {i}", row[i]) for i in np.argsort(-row)[:top]] for row in scores]

    monkeypatch.setattr(keras.applications.imagenet_utils, "decode_predictions", decode)
    assert class_names.imagenet() == tuple(f"class {i}" for i in range(1000))


def test_imagenet_labels_that_cannot_be_fetched_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(scores: Any, top: int) -> Any:
        raise OSError("URL fetch failure")

    monkeypatch.setattr(keras.applications.imagenet_utils, "decode_predictions", decode)
    with caplog.at_level(logging.WARNING):
        assert class_names.imagenet() is None
    assert "URL fetch failure" in caplog.text


def test_a_network_that_never_answers_does_not_hold_the_model_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def decode(scores: Any, top: int) -> Any:
        done.wait()
        return [[]]

    monkeypatch.setattr(keras.applications.imagenet_utils, "decode_predictions", decode)
    with caplog.at_level(logging.WARNING):
        assert class_names.imagenet(timeout_s=0.01) is None
    done.set()
    assert "no answer" in caplog.text
