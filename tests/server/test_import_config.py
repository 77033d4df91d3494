from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve import config
from xlaserve.commands import foreign_configs, import_config
from xlaserve.commands.command import Invocation
from xlaserve.config import ModelSettings, Settings
from xlaserve.errors import ConfigError

MODELS = """
# Two models.
model_config_list {
  config { name: "first" base_path: "/models/first" model_platform: "tensorflow"
    model_version_policy { specific { versions: 42 versions: 43 } }
    version_labels { key: "stable" value: 42 } }
  config: < name: 'second', base_path: 'models' '/second'; >
}
"""
BATCHING = """
max_batch_size { value: 24 }
batch_timeout_micros { value: 1500 }
max_enqueued_batches { value: 10 }
num_batch_threads { value: 8 }
"""
TRITON = """
platform: "tensorflow_savedmodel"
version_policy: { latest { num_versions: 3 } }
max_batch_size: 8
input [ { name: "input_1" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 224, 192, 3 ] } ]
output { name: "probs" data_type: TYPE_FP32 dims: 1000 label_filename: "labels.txt" }
instance_group [ { count: 2 kind: KIND_GPU } ]
dynamic_batching {
  preferred_batch_size: [4, 8]
  max_queue_delay_microseconds: 100
  default_queue_policy { max_queue_size: 64 timeout_action: REJECT }
}
"""


def imported(
    file: Path, capsys: pytest.CaptureFixture[str], batching: Path | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the models and the notes."""
    own = argparse.Namespace(file=file, batching_parameters=batching)
    assert import_config.run(Invocation(own, Settings(), Settings)) == 0
    said = capsys.readouterr()
    models: list[dict[str, Any]] = config.parse(said.out)["models"]
    return models, said.err.splitlines()


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_models_config_becomes_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "models.config", MODELS)
    models, notes = imported(file, capsys, written(tmp_path, "batching.txt", BATCHING))
    batching = {"buckets": [1, 2, 4, 8, 16, 24], "max_queue_delay_ms": 1.5, "max_queue_images": 240}
    assert models == [
        {
            "name": "first",
            "source": "/models/first",
            "versions": [42, 43],
            "version_labels": {"stable": 42},
            **batching,
        },
        {"name": "second", "source": "models/second", **batching},
    ]
    assert {note.partition(":")[0] for note in notes} == {"num_batch_threads"}
    for model in models:
        ModelSettings(**model)


def test_a_config_pbtxt_becomes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((model,), notes) = imported(written(tmp_path / "net", "config.pbtxt", TRITON), capsys)
    assert model == {
        "name": "net",
        "source": str(tmp_path / "net"),
        "versions": "latest 3",
        "buckets": [1, 4, 8],
        "max_queue_delay_ms": 0.1,
        "max_queue_images": 64,
        "input_name": "input_1",
        "input_size": [224, 192],
        "output_name": "probs",
        "labels": str(tmp_path / "net" / "labels.txt"),
    }
    assert {note.partition(":")[0] for note in notes} == {
        "net.dynamic_batching.default_queue_policy.timeout_action",
        "net.input.data_type",
        "net.instance_group",
    }
    ModelSettings(**model)


@pytest.mark.parametrize(
    ("policy", "versions"),
    [("all {}", "all"), ("specific { versions: 3 }", [3]), ("latest {}", None), ("latest { num_versions: 1 }", None)],
)
def test_a_policy_of_versions_is_translated(
    policy: str, versions: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'model_config_list {{ config {{ name: "a" base_path: "/a" model_version_policy {{ {policy} }} }} }}'
    ((model,), notes) = imported(written(tmp_path, "models.config", text), capsys)
    assert (model.get("versions"), notes) == (versions, [])


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ('name: "a" backend: "tensorflow" input { dims: [8] data_type: TYPE_UINT8 }', "a.input.dims"),
        ('name: "a" backend: "tensorflow" input { name: "x" } input { name: "y" }', "a.input"),
        ('name: "a" backend: "tensorflow" output { name: "x" } output { name: "y" }', "a.output.name"),
        ('name: "a" backend: "tensorflow" max_batch_size: 1000', "a.max_batch_size"),
        ('name: "a" backend: "tensorflow" optimization { graph { level: 1 } }', "a.optimization"),
        ('name: "a/b" backend: "tensorflow"', "a/b.name"),
        ('model_config_list { config { name: "a" base_path: "/a" } } custom_model_config {}', "custom_model_config"),
    ],
)
def test_what_is_not_translated_is_named(
    text: str, noted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, notes = imported(written(tmp_path, "config", text), capsys)
    assert len(models) == 1
    assert noted in {note.partition(": ")[0] for note in notes}


def test_every_model_of_a_repository_is_translated_if_it_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (
        ("net", TRITON),
        ("other", 'backend: "tensorflow" input { name: "pixels" dims: [1, 8, 9, 3] data_type: TYPE_UINT8 }'),
        ("pre", 'name: "pre" backend: "python"'),
        ("all", 'name: "all" platform: "ensemble" ensemble_scheduling { step { model_name: "net" } }'),
    ):
        written(tmp_path / name, "config.pbtxt", text)
    models, notes = imported(tmp_path, capsys)
    assert [model["name"] for model in models] == ["net", "other"]
    assert models[1] == {"name": "other", "source": str(tmp_path / "other"), "buckets": [1], "input_size": [8, 9]}
    assert [note for note in notes if "left out" in note] == [
        "all: left out: an ensemble: the server decodes, resizes and preprocesses images itself",
        "pre: left out: expected a SavedModel, got 'python': export the network as one, or as a .keras file",
    ]


@pytest.mark.parametrize("one", ['base_path: "gs://bucket/b"', 'base_path: "/b" model_platform: "other"'])
def test_a_model_that_tensorflow_can_not_load_from_a_folder_is_left_out(
    one: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'model_config_list {{ config {{ name: "a" base_path: "/a" }} config {{ name: "b" {one} }} }}'
    models, notes = imported(written(tmp_path, "models.config", text), capsys)
    assert [model["name"] for model in models] == ["a"]
    assert [note.startswith("b: left out: ") for note in notes] == [True]


def test_a_folder_without_a_model_that_can_be_served_is_refused(tmp_path: Path) -> None:
    own = argparse.Namespace(file=tmp_path, batching_parameters=None)
    with pytest.raises(ConfigError, match=r"expected config\.pbtxt in it or in the folders of models"):
        import_config.run(Invocation(own, Settings(), Settings))
    written(tmp_path / "a", "config.pbtxt", 'platform: "onnxruntime_onnx"')
    with pytest.raises(ConfigError, match="expected a model that can be served"):
        import_config.run(Invocation(own, Settings(), Settings))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected model_config_list"),
        ("unheard_of { value: 8 }", "expected model_config_list"),
        ('name: "a" }', "text format; line 1:11"),
        ('name: "a"\ninput {', "text format; line 2:7"),
        ("name: [1, 2", "Expected string"),
        ("name: \n\n'unfinished", "text format; line 3:1"),
        ("name:", "Expected string"),
        ("a {" * 10_000, "too many levels"),
        ('name: "a" backend: "tensorflow" max_batch_size: "eight"', "parse integer"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, said: str, tmp_path: Path) -> None:
    own = argparse.Namespace(file=written(tmp_path, "config", text), batching_parameters=None)
    with pytest.raises(ConfigError, match=said):
        import_config.run(Invocation(own, Settings(), Settings))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    own = argparse.Namespace(file=tmp_path / "nowhere", batching_parameters=None)
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        import_config.run(Invocation(own, Settings(), Settings))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ConfigError):
        foreign_configs.translate(written(Path(folder), "config", text))
