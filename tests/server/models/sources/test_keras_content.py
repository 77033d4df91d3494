from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from xlaserve.errors import ModelFailed
from xlaserve.models.sources import keras_content

CONFIG = {"class_name": "Sequential", "config": {"name": "it", "layers": []}}
BROKEN: list[tuple[Any, str]] = [
    (json.dumps(CONFIG)[:40], "is cut off or no JSON: it ends with"),
    ("", "which is empty"),
    (b"\xff\xfe", "is cut off or no JSON"),
    ("[" * 100_000, "is nested too deeply|is cut off or no JSON"),
    ('"Sequential"', "is no model's: expected an object with class_name and config"),
    ('{"class_name": "Sequential"}', "is no model's"),
    ('{"class_name": 5, "config": {}}', "is no model's"),
]


def reason(file: Path) -> str:
    with pytest.raises(ModelFailed) as caught:
        keras_content.read(file)
    assert str(caught.value).startswith(f"source: {file.name} is damaged: its ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("written", "said"), BROKEN)
def test_a_broken_configuration_in_hdf5_is_said_to_be_so(tmp_path: Path, written: Any, said: str) -> None:
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file.attrs["model_config"] = np.bytes_(written) if isinstance(written, bytes) else written
    assert re.search(said, reason(tmp_path / "it.h5"))


@pytest.mark.parametrize(("written", "said"), BROKEN)
def test_a_broken_configuration_in_a_zip_archive_is_said_to_be_so(tmp_path: Path, written: Any, said: str) -> None:
    with zipfile.ZipFile(tmp_path / "it.keras", "w") as archive:
        archive.writestr("config.json", written)
    assert re.search(said, reason(tmp_path / "it.keras"))


def test_a_configuration_that_is_no_text_is_said_to_be_so(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "it.h5", "w") as file:
        file.attrs["model_config"] = 5
    assert "its model_config is int64, expected text" in reason(tmp_path / "it.h5")


def test_broken_metadata_are_said_to_be_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "it.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(CONFIG))
        archive.writestr("metadata.json", "[]")
    assert "its config.json or metadata.json can't be read" in reason(tmp_path / "it.keras")
