from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from xlaserve import config
from xlaserve.config import ModelSettings, sources
from xlaserve.inspection.model_file import text
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.inspection.model_file.image_input import ImageInput, image_input
from xlaserve.inspection.model_file.serving import MOST_LINES, plan

PIXELS = Tensor("photo", (None, 8, 8, 3))
FREE = Tensor("photo", (None, None, None, None))


def described(*outputs: Tensor, inputs: tuple[Tensor, ...] = (PIXELS,), **fields: Any) -> Description:
    given: dict[str, Any] = {
        "path": Path("nets/net.h5"),
        "format": "Keras model (HDF5)",
        "inputs": inputs,
        "outputs": outputs,
    }
    return Description(**(given | fields))


def output(*sides: int | None, activation: str = "", name: str = "out") -> Tensor:
    return Tensor(name, (None, *sides), "float32", activation)


MODELS = [
    described(output(5, activation="softmax")),
    described(output(5, activation="linear"), inputs=(FREE,)),
    described(output(5, activation="sigmoid"), family="mobilenetv2_1.00_224"),
    described(output(1, activation="sigmoid"), scaling=("Rescaling(1/255)",)),
    described(output(1)),
    described(output(8, 8, 1, activation="sigmoid")),
    described(output(8, 8, 3, activation="sigmoid")),
    described(output(8, 8, 9, activation="softmax")),
    described(output(4, 4, 300)),
    described(output(9, 4, name="boxes"), output(9, 3, name="scores")),
    described(output(1, name="age"), output(1, name="sex", activation="sigmoid"), output(4, name="vector")),
    described(output(2), custom=("Doubled",), has_code=True, inputs=(FREE,)),
    described(output(2), path=Path("a: b #c.h5")),
    described(),
    described(output(8, 8, 20)),
    described(output(8, 8, 3, activation="tanh")),
    described(output(8, 8, 3, activation="relu")),
    described(output(40, 11, activation="softmax")),
    described(output(17, 3)),
    described(output(896, 16), output(896, 1, name="scores_of_faces")),
    described(output(5376, 8), output(5376, 2, name="classes")),
    described(output(1917, 4), output(1917, 91, name="classes")),
    described(output(12276, 4), output(12276, 3, name="classes"), inputs=(Tensor("photo", (None, 256, 256, 3)),)),
    described(output(84, 1344), inputs=(Tensor("photo", (None, 256, 256, 3)),)),
    described(output(4032, 85), inputs=(Tensor("photo", (None, 256, 256, 3)),)),
    described(output(1344, 85), inputs=(Tensor("photo", (None, 256, 256, 3)),)),
    described(output(4032, 85), inputs=(Tensor("photo", (None, 256, 256, 3)),), path=Path("n.tflite"), format="TFLite"),
    described(output(1344, 64), output(1344, 80, name="classes")),
    described(output(1, 17, 3)),
    described(output(4, activation="sigmoid")),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that paths are relative to, with the files that the models name."""
    monkeypatch.chdir(tmp_path)
    for model in MODELS:
        model.path.parent.mkdir(exist_ok=True)
        model.path.touch()
    return tmp_path


@pytest.mark.parametrize("found", MODELS)
def test_the_configuration_is_valid_and_of_few_lines(found: Description) -> None:
    printed = text.as_yaml(found, plan(found))
    lines = printed.partition("models:\n")[2].splitlines()
    assert 2 <= len(lines) <= MOST_LINES
    parsed: Any = config.parse(printed)
    (model,) = parsed["models"]
    settings = ModelSettings(**model)
    assert Path(settings.source) == found.path


@pytest.mark.parametrize("found", MODELS)
def test_an_open_question_is_answered_by_removing_its_hash(found: Description) -> None:
    printed = text.as_yaml(found, plan(found))
    open_lines = [line for line in printed.partition("models:\n")[2].splitlines() if line.startswith("    # ")]
    asked = [line.field for line in plan(found).lines if line.is_open]
    assert len(open_lines) == len(asked)
    for field, line in zip(asked, open_lines, strict=True):
        parsed: Any = config.parse(f"models:\n  - {line.removeprefix('    # ')}")
        (given,) = parsed["models"]
        assert list(given) == [field]
        ModelSettings(name="net", source="net.h5", **given)


@pytest.mark.parametrize(
    ("found", "task", "asked"),
    [
        (MODELS[0], "classification of 5 classes", {"preprocess": "unit", "labels": "nets/net.labels.txt"}),
        (MODELS[1], "classification of 5 classes, or an embedding or numbers", {"activation": "softmax"}),
        (MODELS[2], "classification of 5 classes, each with a probability of its own", {"preprocess": "tf"}),
        (MODELS[3], "classification of two classes: the probability of the second", {"labels": ["first", "second"]}),
        (MODELS[4], "tensors: one number for each image", {"task": "regression"}),
        (MODELS[5], "tensors: one probability for each pixel", {"labels": ["background", "object"], "task": "image"}),
        (MODELS[6], "tensors: an image, or a map, of 3 channels", {"task": "image"}),
        (MODELS[15], "tensors: an image, or a map, of 3 channels", {"task": "image", "output_range": "-1..1"}),
        (MODELS[16], "tensors: an image, or a map, of 3 channels", {"task": "image"}),
        (
            described(output(3, 8, 8), inputs=(Tensor("photo", (None, 3, 8, 8)),)),
            "tensors: an image, or a map, of 3 channels, channels first",
            {"task": "image"},
        ),
        (
            described(output(8, 8, 3, activation="linear")),
            "tensors: an image, or a map, of 3 channels",
            {"task": "image"},
        ),
        (
            described(output(16, 16, 3, activation="tanh")),
            "tensors: an image, or a map, of 3 channels, enlarged 2 times",
            {"task": "image", "output_range": "-1..1"},
        ),
        (described(output(32, 32, 1)), "tensors: one number for each pixel", {"task": "image"}),
        (
            described(output(3, 24, 24), inputs=(Tensor("photo", (None, 3, 8, 8)),)),
            "tensors: an image, or a map, of 3 channels, enlarged 3 times, channels first",
            {"task": "image"},
        ),
        (described(output(16, 24, 3)), "tensors: features of 3 channels", {}),
        (described(output(4, 4, 3)), "tensors: features of 3 channels", {}),
        (described(output(80, 80, 3)), "tensors: features of 3 channels", {}),
        (
            described(output(2, 8, 8)),
            "tensors: a map of 2 channels, channels first",
            {"labels": ["background", "object"]},
        ),
        (
            described(output(1, 8, 8, activation="sigmoid")),
            "tensors: one probability for each pixel, channels first",
            {"labels": ["background", "object"], "task": "image"},
        ),
        (MODELS[7], "segmentation of 9 classes", {"labels": "nets/net.labels.txt"}),
        (MODELS[8], "tensors: features of 300 channels", {}),
        (MODELS[14], "segmentation of 20 classes", {"labels": "nets/net.labels.txt"}),
        (MODELS[9], "detection", {"bounding_box_format": "rel_yxyx"}),
        (MODELS[10], "tensors: 3 outputs", {}),
        (MODELS[13], "told when it is loaded", {}),
    ],
)
def test_the_outputs_suggest_the_task_and_what_is_asked(found: Description, task: str, asked: dict[str, Any]) -> None:
    planned = plan(found)
    assert dict(planned.facts)["task"] == task
    assert asked.items() <= {line.field: line.value for line in planned.lines if line.is_open}.items()


def test_several_heads_are_read_each_by_its_activation() -> None:
    index = Tensor("index", (None,), "int64")
    found = dataclasses.replace(MODELS[10], outputs=(*MODELS[10].outputs, index))
    (line,) = [line for line in plan(found).lines if line.field == "outputs"]
    assert line.value == {
        "age": {"task": "regression"},
        "sex": {"task": "classification", "labels": ["first", "second"]},
        "vector": {"task": "embedding"},
    }


def test_a_head_of_four_sigmoids_may_be_a_box() -> None:
    box = output(4, activation="sigmoid", name="box")
    (line,) = [line for line in plan(MODELS[-1]).lines if line.field == "task"]
    assert (line.value, line.is_open) == ("regression", True)
    (line,) = [line for line in plan(described(output(2, activation="softmax"), box)).lines if line.field == "outputs"]
    assert line.value == {"out": {"task": "classification"}, "box": {"task": "regression"}}
    assert "box as classification" in line.comment


def test_no_scale_is_asked_where_the_model_scales_or_takes_whole_numbers() -> None:
    levels = [described(output(2), inputs=(Tensor("photo", (None, 8, 8, 3), kind),)) for kind in ("uint8", "int8")]
    for found in (MODELS[3], *levels):
        assert not plan(found).refusal
        assert "preprocess" not in {line.field for line in plan(found).lines}


@pytest.mark.parametrize(("count", "shape"), [(784, "28, 28, 1"), (3072, "32, 32, 3")])
def test_the_layer_that_flattens_images_is_named_for_flattened_ones(count: int, shape: str) -> None:
    planned = plan(described(output(2), inputs=(Tensor("pixels", (None, count)),)))
    assert not planned.refusal
    assert f"keras.Input(({shape})), keras.layers.Flatten(), model]" in dict(planned.facts)["inputs"]
    assert "Flatten" not in dict(plan(described(output(2), inputs=(Tensor("ages", (None, 9)),))).facts)["inputs"]


def test_no_colour_order_is_asked_where_the_usual_preprocessing_has_one() -> None:
    fields = {line.field: line.value for line in plan(described(output(2), family="vgg16")).lines}
    assert fields["preprocess"] == "caffe"
    assert "color" not in fields


def test_how_photos_are_resized_is_asked_where_nothing_tells() -> None:
    asked = {line.field: line.value for line in plan(MODELS[0]).lines if line.is_open}
    assert asked["resize"] == {"library": "opencv", "filter": "bilinear"}
    told = described(output(2), family="Teachable Machine")
    features = described(output(2), inputs=(Tensor("maps", (None, 7, 7, 256)),))
    numbers = described(output(2), inputs=(Tensor("ages", (None, 9)),))
    for found in (told, features, numbers):
        assert "resize" not in {line.field for line in plan(found).lines}


@pytest.mark.parametrize(("suffix", "is_asked"), [(".pb", True), (".onnx", True), (".jax", False)])
def test_a_frozen_graph_of_sequences_may_hold_no_images(folder: Path, suffix: str, is_asked: bool) -> None:
    (folder / f"net{suffix}").touch()
    planned = plan(described(output(2), path=Path(f"net{suffix}"), inputs=(Tensor("sequence", (None, 8, 9)),)))
    assert ("layout" in {line.field for line in planned.lines}) is is_asked


def test_labels_beside_the_model_are_named(folder: Path) -> None:
    (folder / "nets" / "labels.txt").touch()
    assert ("labels", "nets/labels.txt") in {(line.field, str(line.value)) for line in plan(MODELS[0]).lines}


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((PIXELS, Tensor("words", (None, None))), "words"),
        ((Tensor("files", (None,), "string"),), "text"),
        ((Tensor("features", (None, None)),), "features"),
        ((Tensor("photo", None),), "unknown shape"),
    ],
)
def test_inputs_that_are_neither_images_nor_of_known_sides_are_refused(inputs: tuple[Tensor, ...], said: str) -> None:
    planned = plan(described(output(2), inputs=inputs))
    assert said in planned.refusal
    assert planned.lines == ()


def test_a_frozen_graph_whose_input_has_no_shape_needs_a_size(folder: Path) -> None:
    (folder / "net.pb").touch()
    graph: dict[str, Any] = {"path": Path("net.pb")}
    planned = plan(described(output(2), inputs=(Tensor("photo", None),), **graph))
    assert not planned.refusal
    assert {"input_size": [224, 224]}.items() <= {
        line.field: line.value for line in planned.lines if not line.is_open
    }.items()
    for inputs in ((Tensor("photo", None), Tensor("age", None)), (Tensor("photo", None, "string"),)):
        assert plan(described(output(2), inputs=inputs, **graph)).refusal


def test_text_that_the_graph_decodes_is_served_as_images() -> None:
    planned = plan(described(output(2), inputs=(Tensor("files", (None,), "string"),), layers=("DecodeJpeg",)))
    assert not planned.refusal
    assert "preprocess" not in {line.field for line in planned.lines}
    assert "images" in dict(planned.facts)


@pytest.mark.parametrize("others", [(Tensor("mask", (None, 8, 8, 1)),), (Tensor("age", (None,), "int32"),)])
def test_a_model_of_several_inputs_is_served(others: tuple[Tensor, ...]) -> None:
    assert not plan(described(output(2), inputs=(PIXELS, *others))).refusal


@pytest.mark.parametrize(
    ("path", "form", "said"),
    [
        ("net.bin", "TFLite", "mv net.bin net.tflite"),
        ("net", "Keras model (zip archive)", "mv net net.keras"),
        ("my net.bin", "Keras model (HDF5)", "mv 'my net.bin' 'my net.h5'"),
    ],
)
def test_a_file_of_a_name_that_is_not_served_gets_the_next_step(folder: Path, path: str, form: str, said: str) -> None:
    (folder / path).touch()
    assert said in plan(described(path=Path(path), format=form)).refusal


def test_a_name_is_that_of_the_file_or_of_its_folder() -> None:
    names = {
        "nets/flowers.h5": "flowers",
        "flowers/model.keras": "flowers",
        "flowers/saved_model/1": "flowers",
        "my flowers/keras_model.h5": "my-flowers",
    }
    assert {path: sources.name_at(Path(path)) for path in names} == names


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((None, 8, 9, 3), ImageInput(None, 8, 9, 3, False)),
        ((2, 3, 8, 9), ImageInput(2, 8, 9, 3, True)),
        ((None, 1, None, None), ImageInput(None, None, None, 1, True)),
        ((None, 8, 9), ImageInput(None, 8, 9, 1, False)),
        ((None, 8), None),
        (None, None),
    ],
)
def test_an_image_input_is_recognised_by_its_shape(shape: Any, found: ImageInput | None) -> None:
    assert image_input(Tensor("photo", shape)) == found
    assert image_input(Tensor("photo", shape, "string")) is None


def test_json_has_the_same_as_the_comments() -> None:
    found = dataclasses.replace(MODELS[0], written_by="Keras 3.0", parameters=12, layers=("Lambda plus",))
    shown = text.as_json(found, plan(found))
    assert shown["inputs"] == [{"name": "photo", "shape": [None, 8, 8, 3], "dtype": "float32"}]
    assert shown["settings"] == {"name": "net", "source": "nets/net.h5"}
    assert set(shown["questions"]) == {"preprocess", "labels", "color", "resize"}
    assert (shown["parameters"], shown["written_by"], shown["refusal"]) == (12, "Keras 3.0", "")


@pytest.mark.parametrize(
    ("outputs", "side", "field", "value", "is_open"),
    [
        ((output(896, 16), output(896, 1, name="faces")), 128, "box_decoding", "blazeface", False),
        ((output(896, 16), output(896, 1, name="faces")), 128, "preprocess", "tf", False),
        ((output(5376, 8), output(5376, 2, name="two")), 128, "output_names", {"boxes": "out", "scores": "two"}, True),
        ((output(1917, 4), output(1917, 91, name="classes")), 300, "box_decoding", "ssd", True),
        ((output(12276, 4), output(12276, 3, name="classes")), 256, "box_decoding", "retinanet", True),
        ((output(84, 1344),), 256, "box_decoding", "yolo", True),
        ((output(4032, 85),), 256, "box_decoding", {"kind": "yolo", "has_objectness": True}, True),
        ((output(1344, 84),), 256, "box_decoding", "yolo", True),
        ((output(1344, 5),), 256, "box_decoding", "yolo", True),
        ((output(1344, 85),), 256, "box_decoding", "yolox", True),
        ((output(1344, 85),), 256, "preprocess", "none", True),
        ((output(1344, 64), output(1344, 80, name="classes")), 256, "box_decoding", "yolov8", True),
        ((output(40, 11, activation="softmax"),), 64, "task", "sequence", True),
        ((output(17, 3),), 64, "keypoint_format", "rel_xy", True),
    ],
)
def test_what_outputs_may_be_is_a_line_to_paste(
    outputs: tuple[Tensor, ...], side: int, field: str, value: Any, is_open: bool
) -> None:
    pixels = Tensor("photo", (None, side, side, 3))
    (line,) = [one for one in plan(described(*outputs, inputs=(pixels,))).lines if one.field == field]
    assert (line.value, line.is_open) == (value, is_open)


@pytest.mark.parametrize(
    ("sides", "line"),
    [
        ((84, 1344), {"kind": "yolo", "format": "rel_center_xywh"}),
        ((4032, 85), {"kind": "yolo", "format": "rel_center_xywh", "has_objectness": True}),
        ((1344, 85), "yolox"),
    ],
)
def test_boxes_of_yolo_in_tflite_are_relative_to_the_image(sides: tuple[int, int], line: Any) -> None:
    pixels = Tensor("photo", (None, 256, 256, 3))
    planned = plan(described(output(*sides), inputs=(pixels,), path=Path("n.tflite"), format="TFLite"))
    assert [one.value for one in planned.lines if one.field == "box_decoding"] == [line]


def test_objects_that_are_found_already_are_no_raw_boxes() -> None:
    fields = {line.field for line in plan(described(output(100, 4), output(100, 80, name="classes"))).lines}
    assert "box_decoding" not in fields


@pytest.mark.parametrize(
    ("sides", "fields", "line"),
    [
        ((8, 9, 1), {}, ("depth", "float")),
        ((50, 32), {}, ("layout", "none")),
        ((7, 7, 256), {}, ("layout", "none")),
        ((8, 9, 3), {}, None),
        ((8, 9, 1), {"scaling": ("Rescaling(1/255)",)}, None),
    ],
)
def test_floats_that_may_be_no_levels_are_asked_about(sides: Any, fields: Any, line: tuple[str, str] | None) -> None:
    found = plan(described(output(5, activation="softmax"), inputs=(Tensor("given", (None, *sides)),), **fields))
    asked = [(one.field, one.value) for one in found.lines if one.field in ("depth", "layout")]
    assert asked == ([line] if line else [])
    assert all(one.is_open for one in found.lines if one.field in ("depth", "layout"))
