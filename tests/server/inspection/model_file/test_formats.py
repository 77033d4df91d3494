from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tests.server.models.sources.onnx_writer import model, outside

from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.inspection.model_file.description import Tensor
from xlaserve.models.sources.onnx_tflite import tflite_tables
from xlaserve_proto import model_files_pb2 as pb

v1 = tf.compat.v1


def refused(file: Path) -> str:
    with pytest.raises(ModelFailed) as failure:
        formats.describe(file)
    return str(failure.value)


def onnx(file: Path) -> Path:
    """Writes a model of a matrix and a softmax."""

    def value(name: str, *sides: int | str) -> pb.OnnxValue:
        dims = [
            pb.OnnxValue.Dimension(**({"dim_param": side} if isinstance(side, str) else {"dim_value": side}))
            for side in sides
        ]
        tensor = pb.OnnxValue.Tensor(elem_type=1, shape=pb.OnnxValue.Shape(dim=dims))
        return pb.OnnxValue(name=name, type=pb.OnnxValue.Type(tensor_type=tensor))

    nodes = [
        pb.OnnxGraph.Node(op_type="Resize", input=["photo"], output=["small"]),
        pb.OnnxGraph.Node(op_type="MatMul", input=["small", "kernel"], output=["logits"]),
        pb.OnnxGraph.Node(op_type="Softmax", input=["logits"], output=["odds"]),
        pb.OnnxGraph.Node(op_type="Reshape", input=["odds"], output=["scores"]),
    ]
    graph = pb.OnnxGraph(
        node=nodes,
        initializer=[pb.OnnxGraph.Initializer(name="kernel", dims=[3, 4])],
        input=[value("photo", "n", 3, 8, 8), value("kernel", 3, 4)],
        output=[value("scores", "n", 4), value("logits", "n", 4)],
    )
    model = pb.OnnxModel(
        ir_version=8,
        producer_name="pytorch",
        producer_version="2.0",
        graph=graph,
        opset_import=[pb.OnnxModel.OperatorSet(version=17)],
    )
    file.write_bytes(model.SerializeToString())
    return file


def test_an_onnx_file_is_described(tmp_path: Path) -> None:
    found = formats.describe(onnx(tmp_path / "net.onnx"))
    assert found.inputs == (Tensor("photo", (None, 3, 8, 8)),)
    assert found.outputs == (
        Tensor("scores", (None, 4), "float32", "softmax"),
        Tensor("logits", (None, 4), "float32", "linear"),
    )
    assert (found.format, found.written_by) == ("ONNX, operator set 17", "pytorch 2.0")
    assert (found.parameters, found.layers) == (12, ("Resize",))


def test_an_onnx_file_is_described_with_its_weights_alone(tmp_path: Path) -> None:
    (file := tmp_path / "lonely.onnx").write_bytes(
        model([], pixels=("x", [1]), scores=("y", [1]), weights=[outside("kernel", [5], "w.bin")])
    )
    assert "w.bin, which is missing; copy that beside lonely.onnx" in refused(file)
    (tmp_path / "w.bin").write_bytes(bytes(20))
    assert formats.describe(file).size_bytes == file.stat().st_size + 20


def test_a_tflite_file_is_described(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 6, 5, 3], tf.float32)])
    def scores(photo: Any) -> Any:
        return tf.nn.softmax(tf.reduce_sum(photo, (1, 2)) @ tf.constant([[1.0, 2.0]] * 3))

    converter = tf.lite.TFLiteConverter.from_concrete_functions([scores.get_concrete_function()])
    file = tmp_path / "net.tflite"
    file.write_bytes(converter.convert())
    found = formats.describe(file)
    assert [one.shape for one in found.inputs] == [(None, 6, 5, 3)]
    assert [(one.shape, one.dtype, one.activation) for one in found.outputs] == [((None, 2), "float32", "softmax")]
    assert found.parameters is not None
    assert found.parameters >= 6
    assert "cut off" in refused_of(tmp_path / "cut.tflite", file.read_bytes()[:200])


def refused_of(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return refused(file)


def test_tflite_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "net.bin"
    file.write_bytes(b"\0\0\0\0" + tflite_tables.MAGIC)
    assert "cut off" in refused(file)


def graph(file: Path, *more: str) -> Path:
    with v1.Graph().as_default() as built:
        pixels = v1.placeholder(tf.float32, (None, 6, 5, 3), name="photo")
        for name in more:
            v1.placeholder(tf.float32, (None, 2, 2, 1), name=name)
        v1.placeholder(tf.bool, (), name="is_training")
        sums = tf.reduce_sum(pixels, (1, 2)) @ tf.constant([[1.0, 2.0]] * 3)
        tf.nn.softmax(sums, name="scores")
    file.write_bytes(built.as_graph_def().SerializeToString())
    return file


def test_a_frozen_graph_is_described(tmp_path: Path) -> None:
    found = formats.describe(graph(tmp_path / "net.pb"))
    assert found.inputs == (Tensor("photo", (None, 6, 5, 3)),)
    assert [(one.name, one.activation) for one in found.outputs] == [("scores", "softmax")]
    assert (found.parameters, found.settings) == (6 + 2, ())  # the axes of the sum as well


def test_of_several_image_inputs_of_a_graph_the_first_is_set(tmp_path: Path) -> None:
    assert formats.describe(graph(tmp_path / "net.pb", "mask")).settings == (("input_tensor", "photo:0"),)


def test_the_graph_of_a_saved_model_names_its_folder(tmp_path: Path) -> None:
    file = graph(tmp_path / "saved_model.pb")
    assert refused(file).endswith(f"xlaserve inspect {tmp_path}/")


def test_exports_of_pytorch_name_the_command_that_imports_them(tmp_path: Path) -> None:
    for name in ("net.pt2", "my net.pth"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("net/data.pkl", b"")
    assert formats.describe(tmp_path / "net.pt2").refusal.endswith(f"xlaserve import {tmp_path}/net.pt2")
    assert formats.describe(tmp_path / "my net.pth").refusal.endswith(f"xlaserve import '{tmp_path}/my net.pt2'")
    (tmp_path / "net.pkl").write_bytes(pickle.dumps({}))
    assert "torch.export.save" in formats.describe(tmp_path / "net.pkl").refusal


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("net.keras", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n", "git lfs pull"),
        ("net.h5", b"<!DOCTYPE html><html>", "web page"),
        ("net.tflite", b"", "is empty"),
        ("net.keras", b"PK\x03\x04" + bytes(99), "cut off"),
        ("net.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "cut off"),
        ("net.onnx", b"\xff" * 99, "cut off"),
        ("net.pb", b"\xff" * 99, "cut off"),
        ("net.pb", b"\x0a", "cut off"),
        ("net.keras", b"text", "neither"),
        ("net.txt", b"text", "which is none"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    assert said in refused_of(tmp_path / name, content)


def test_a_path_without_anything_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "net.keras")


@pytest.mark.parametrize(
    ("got", "name"),
    [
        ("keras.applications:ResNet50", "keras.applications:ResNet50"),
        ("builtin:digits", "builtin:digits"),
        ("builtin:digit", "builtin:digits"),
        ("kearas.applications:ResNet50", "keras.applications:ResNet50"),
        ("kerashub:ViTImageClassifier", "keras_hub:ViTImageClassifier"),
        ("builtin:cats", ""),
        ("net.keras", ""),
        ("C:/net.keras", ""),
    ],
)
def test_a_named_model_is_no_file_and_the_command_for_it_is_told(got: str, name: str) -> None:
    said = refused(Path(got))
    assert ("does not exist" in said) is (got != name)
    assert said.endswith(f"xlaserve serve {name}" if name else f"ls {Path(got).parent}")


def test_what_is_neither_a_file_nor_a_folder_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "net.keras")
    assert refused(tmp_path / "net.keras").endswith("a pipe, socket or device; look at it: ls -l net.keras")


def test_a_keras_file_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "download", "w") as archive:
        archive.writestr("config.json", '{"class_name": "Sequential", "config": {"layers": []}}')
    assert formats.describe(tmp_path / "download").format == "Keras model (zip archive)"
