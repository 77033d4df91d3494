from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from xlaserve.config import BoxDecoding, ModelSettings, check_files, dump, load
from xlaserve.config.model_files import named_paths
from xlaserve.errors import ConfigError


def load_models(folder: Path, *models: dict[str, Any]) -> tuple[ModelSettings, ...]:
    file = folder / "xlaserve.yaml"
    (folder / "net.onnx").write_bytes(b"")
    file.write_text(yaml.safe_dump({"models": [{"source": "./net.onnx", **model} for model in models]}))
    settings = load(file, environ={})
    check_files(settings)
    return settings.models


def test_a_kind_alone_stands_for_its_defaults(tmp_path: Path) -> None:
    short, long = load_models(
        tmp_path, {"name": "a", "box_decoding": "yolo"}, {"name": "b", "box_decoding": {"kind": "yolo"}}
    )
    assert short.box_decoding == long.box_decoding == BoxDecoding(kind="yolo")


@pytest.mark.parametrize("kind", ["ssd", "retinanet", "blazeface", "yolov8", "yolo"])
def test_what_is_shown_may_be_read_again(tmp_path: Path, kind: str) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    file, again = tmp_path / "one.yaml", tmp_path / "two.yaml"
    model = {"name": "a", "source": "./net.onnx", "box_decoding": {"kind": kind}}
    file.write_text(yaml.safe_dump({"models": [model]}))
    settings = load(file, environ={})
    again.write_text(dump(settings))
    assert load(again, environ={}).models == settings.models


def test_anchors_are_a_file_of_the_model(tmp_path: Path) -> None:
    model = {"name": "a", "box_decoding": {"kind": "ssd", "anchors": "anchors.npy"}}
    with pytest.raises(ConfigError, match=r"box_decoding.anchors: expected an existing path"):
        load_models(tmp_path, model)
    (tmp_path / "anchors.npy").write_bytes(b"")
    (settings,) = load_models(tmp_path, model)
    assert settings.box_decoding is not None
    assert settings.box_decoding.anchors == tmp_path / "anchors.npy"
    assert tmp_path / "anchors.npy" in named_paths(settings)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("sdd", "did you mean ssd"),
        ({"kind": "yolo", "strides": [8]}, "expected fields of yolo .*, got strides"),
        ({"kind": "ssd", "strides": [8, 16], "scales": [0.1, 0.2]}, "one for each of 2 strides and one more, got 2"),
        ({"kind": "ssd", "scales": [0.1]}, "one for each of 6 strides and one more, got 1"),
        ({"kind": "ssd", "strides": [0]}, "strides: expected at least 1"),
        ({"kind": "retinanet", "scales": [-1]}, "expected more than 0"),
        ({"kind": "retinanet", "ratios": [1]}, "ratios: no such field"),
    ],
)
def test_what_does_not_fit_the_kind_is_said(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_models(tmp_path, {"name": "a", "box_decoding": value})
