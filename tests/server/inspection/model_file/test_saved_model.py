from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.inspection.model_file.description import Tensor
from xlaserve_proto import model_files_pb2 as pb

PIXELS = tf.TensorSpec([None, 6, 5, 3], tf.float32, name="photo")


class Net(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones((3, 4)))
        self.bias = tf.Variable(tf.zeros(4))

    @tf.function(input_signature=[PIXELS])
    def scores(self, photo: Any) -> dict[str, Any]:
        logits = tf.nn.bias_add(tf.reduce_sum(photo, (1, 2)) @ self.kernel, self.bias)
        return {"logits": logits, "scores": tf.nn.softmax(logits)}

    @tf.function(input_signature=[PIXELS])
    def mask(self, photo: Any) -> Any:
        return tf.sigmoid(photo[..., :1])


def save(folder: Path, signatures: tuple[str, ...] = ("serving_default",)) -> Path:
    net = Net()
    tf.saved_model.save(net, str(folder), dict.fromkeys(signatures, net.scores) or None)
    return folder


def test_a_signature_is_described_with_its_activations(tmp_path: Path) -> None:
    found = formats.describe(save(tmp_path / "net"))
    assert found.inputs == (Tensor("photo", (None, 6, 5, 3)),)
    assert found.outputs == (
        Tensor("logits", (None, 4), "float32", "linear"),
        Tensor("scores", (None, 4), "float32", "softmax"),
    )
    assert (found.parameters, found.settings) == (16, ())
    assert found.written_by == f"TensorFlow {tf.__version__}"
    assert found.size_bytes == sum(file.stat().st_size for file in (tmp_path / "net").rglob("*") if file.is_file())


def test_of_several_signatures_without_the_default_one_is_set(tmp_path: Path) -> None:
    assert formats.describe(save(tmp_path / "net", ("b", "a"))).settings == (("signature", "a"),)
    assert formats.describe(save(tmp_path / "two", ("a", "serving_default"))).settings == ()


def test_a_savedmodel_of_neither_signatures_nor_functions_is_refused(tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path / "net"))
    assert "got a SavedModel of neither; where the model is, write it" in formats.describe(tmp_path / "net").refusal


def test_without_signatures_a_function_of_one_input_is_described(tmp_path: Path) -> None:
    found = formats.describe(save(tmp_path / "net", ()))
    assert [one.shape for one in found.inputs] == [(None, 6, 5, 3)]
    assert found.outputs == (Tensor("output", (None, 6, 5, 1)),)  # of `mask`, the first by name
    assert found.settings == (("function", "mask"),)


def test_a_folder_of_versions_is_described_by_its_latest(tmp_path: Path) -> None:
    save(tmp_path / "3", ("old",))
    save(tmp_path / "20")
    found = formats.describe(tmp_path)
    assert found.path == tmp_path
    assert found.format == "SavedModel 20/ of a folder"


def test_layers_of_keras_2_are_read_from_its_metadata(tmp_path: Path) -> None:
    folder = save(tmp_path / "net")
    shape = {"class_name": "__tuple__", "items": [None, 6, 5, 3]}
    layers = [
        {"class_name": "InputLayer", "config": {"name": "photo", "batch_input_shape": shape}},
        {"class_name": "Rescaling", "config": {"name": "scale", "scale": 1 / 255, "offset": 0}},
    ]
    model = {"class_name": "Sequential", "keras_version": "2.6.0", "config": {"name": "vgg16", "layers": layers}}
    written = [
        ("_tf_keras_sequential", model),
        ("_tf_keras_layer", layers[1]),
        ("_tf_keras_metric", {"class_name": "X"}),
    ]
    nodes = [
        pb.KerasMetadata.Layer(node_id=index, identifier=identifier, metadata=json.dumps(one))
        for index, (identifier, one) in enumerate(written)
    ]
    (folder / "keras_metadata.pb").write_bytes(pb.KerasMetadata(nodes=nodes).SerializeToString())
    found = formats.describe(folder)
    assert found.layers == found.scaling == ("Rescaling(1/255)",)
    assert found.written_by == f"TensorFlow {tf.__version__}, Keras 2.6.0"
    assert found.family == "vgg16"


def test_decoding_within_the_graph_is_named(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="files")])
    def decoded(files: Any) -> Any:
        return tf.map_fn(lambda one: tf.io.decode_jpeg(one, 3), files, fn_output_signature=tf.uint8)

    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path / "net"), {"serving_default": decoded})
    found = formats.describe(tmp_path / "net")
    assert found.inputs == (Tensor("files", (None,), "string"),)
    assert found.layers == ("DecodeJpeg",)


def test_a_signature_of_pixels_is_preferred_to_one_of_text(tmp_path: Path) -> None:
    module = tf.Module()
    texts = tf.function(tf.strings.length).get_concrete_function(tf.TensorSpec([None], tf.string))
    photos = tf.function(lambda photo: photo).get_concrete_function(tf.TensorSpec([None, 8, 8, 3], name="photo"))
    tf.saved_model.save(module, str(tmp_path / "net"), {"serving_default": texts, "of_pixels": photos})
    found = formats.describe(tmp_path / "net")
    assert found.inputs == (Tensor("photo", (None, 8, 8, 3), "float32"),)
    assert found.settings == (("signature", "of_pixels"),)


@pytest.mark.parametrize("content", [b"", b"\n\x03", b"version https://git-lfs.github.com/spec/v1\nsize 12\n"])
def test_a_damaged_graph_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "saved_model.pb").write_bytes(content)
    with pytest.raises(ModelFailed, match=r"saved_model\.pb"):
        formats.describe(tmp_path)


def test_a_folder_without_a_model_is_refused_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelFailed, match=r"notes\.txt"):
        formats.describe(tmp_path)
