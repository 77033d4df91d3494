from __future__ import annotations

import io
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.client.conftest import Puppet

from xlaserve_client import cli_tensors, drawing
from xlaserve_client.cli import main
from xlaserve_client.results import Box, Detection, Detections
from xlaserve_proto import vision_pb2 as vision

FIRST_OF_PNG = 0x89
DETECTED = {
    "index": 2,
    "label": "class 2",
    "score": 0.5,
    "box": {"x_min": 1.0, "y_min": 2.0, "x_max": 4.0, "y_max": 8.0},
}
COUNTED = {"index": 0, "label": "nothing"}
PLACES = [
    {"index": 2, "label": "class 2", "score": 0.5, "x": 1, "y": 2},
    {"index": 9, "label": "9", "score": None, "x": -1, "y": 4},
]
READ = {"index": 2, "label": "class 2", "score": 0.75}
DOG = {"index": 2, "label": "dog"}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "three.png"
    path.write_bytes(b"\x03png")
    return path


def test_classify_prints_the_classes_of_each_image_in_order(
    puppet: Puppet, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "one.png"
    other.write_bytes(b"\x01png")
    assert main(["classify", "digits", str(image), str(other), "--top-k", "2", "--target", puppet.target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{image}  (xla, 500.0 ms in the server)",
        "     1.0000  class 3  (3)",
        "     0.5000  class 4  (4)",
        f"{other}  (xla, 500.0 ms in the server)",
        "     1.0000  class 1  (1)",
        "     0.5000  class 2  (2)",
    ]


def test_classify_prints_json(puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["classify", "digits", str(image), "--top-k", "1", "--mode", "graph", "--json"]
    assert main([*arguments, "--target", puppet.target]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["image"] == str(image)
    assert answer["mode"] == "graph"
    assert answer["classifications"] == [{"categories": [{"index": 3, "label": "class 3", "score": 1.0}]}]


def test_run_does_what_the_model_is_for(puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", str(image), "--top-k", "1", "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{image}  (xla, 500.0 ms in the server)",
        "     1.0000  class 3  (3)",
    ]


def test_run_prints_the_outputs_of_a_model_without_a_task(
    puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "another", str(image), "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "float32"


def test_the_images_of_a_folder_are_sent_in_the_order_of_their_names(
    puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, first in (("b.JPG", 1), ("a.png", 2), ("notes.txt", 3)):
        (tmp_path / name).write_bytes(bytes([first]))
    assert main(["classify", "digits", str(tmp_path), "--top-k", "1", "--target", puppet.target, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [Path(answer["image"]).name for answer in answers] == ["a.png", "b.JPG"]
    assert [answer["classifications"][0]["categories"][0]["index"] for answer in answers] == [2, 1]


def test_a_folder_without_images_is_refused(puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", "digits", str(tmp_path), "--target", puppet.target]) == 1
    assert f"{tmp_path}: expected a folder with .jpeg, .jpg, .png, .webp files" in capsys.readouterr().err


def test_an_image_is_read_from_stdin(
    puppet: Puppet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x05png")))
    assert main(["classify", "digits", "-", "--top-k", "1", "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "     1.0000  class 5  (5)"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "wide.png"
    Image.new("RGB", (20, 10), (10, 10, 10)).save(path)
    return path


def test_detect_prints_boxes_and_draws_them(
    puppet: Puppet, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    puppet.failures = []
    out = tmp_path / "new" / "folder"
    assert main(["detect", "shapes", str(picture), "--out", str(out), "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{picture}  (xla, 500.0 ms in the server)",
        f"     0.5000  class {FIRST_OF_PNG}  ({FIRST_OF_PNG})  x 1.0 to 4.0, y 2.0 to 8.0",
    ]
    with Image.open(out / "wide-detect.png") as drawn:
        assert drawn.size == (20, 10)
        assert np.asarray(drawn).max() > 10


def test_boxes_of_less_than_a_pixel_are_drawn(picture: Path) -> None:
    thin = Detection(0, "line", 0.5, Box(4.2, 3.4, 9.0, 3.9))
    drawn = drawing.draw_boxes(picture, Detections((thin,), 10, 20))
    assert np.asarray(drawn).max() > 10


def test_detect_says_where_nothing_was_found(
    puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "empty.png"
    image.write_bytes(b"\0")
    assert main(["detect", "shapes", str(image), "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  nothing"]


def test_segment_prints_shares_and_colours_the_image(
    puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "small.png"
    Image.new("RGB", (3, 2), (10, 10, 10)).save(image)
    puppet.runs = [0, 4, 2, 2]
    assert main(["segment", "shapes", str(image), "--out", str(tmp_path / "out"), "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["    66.67%  nothing  (0)", "    33.33%  dog  (2)"]
    with Image.open(tmp_path / "out" / "small-segment.png") as drawn:
        coloured = np.asarray(drawn).max(axis=2) > 10
    assert coloured.tolist() == [[False] * 3, [False, True, True]]


def test_no_drawing_takes_the_place_of_another(puppet: Puppet, tmp_path: Path) -> None:
    puppet.runs = [0, 4, 2, 2]
    images = [tmp_path / "small.png", tmp_path / "small.jpg", tmp_path / "other" / "small.png"]
    images[2].parent.mkdir()
    for path in images:
        Image.new("RGB", (3, 2)).save(path)
    out = tmp_path / "out"
    for command in ("detect", "segment"):
        assert main([command, "shapes", *map(str, images), "--out", str(out), "--target", puppet.target]) == 0
    assert {file.name for file in out.iterdir()} == {
        f"small-{command}{number}.png" for command in ("detect", "segment") for number in ("", "-2", "-3")
    }


def test_embed_prints_the_first_values(puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "features", str(image), "--target", puppet.target]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  6 values: 0.5000 0.5000 0.5000 0.5000 ..."]


def test_infer_prints_the_output_tensors_and_writes_them(
    puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, out = tmp_path / "three.png", tmp_path / "out"
    image.write_bytes(b"\3png")
    assert main(["infer", "digits", str(image), "--out", str(out), "--target", puppet.target]) == 0
    with np.load(out / "three-infer.npz") as written:
        assert written.files == ["scores"]
        scores = written["scores"]
    assert (scores.dtype, scores.tolist()) == (np.float32, [0, 0, 0, 1])
    assert capsys.readouterr().out.splitlines()[1:] == ["  scores  float32 [4]  0 0 0 1"]
    assert main(["infer", "digits", str(image), "--json", "--target", puppet.target]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["outputs"] == {"scores": [0, 0, 0, 1]}


def test_infer_takes_named_inputs(puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo, numbers, out = tmp_path / "three.png", tmp_path / "numbers.npy", tmp_path / "out"
    photo.write_bytes(b"\3png")
    np.save(numbers, np.array([[0.5, 2]]))
    inputs = ["--input", f"photo={photo}", "--input", f"numbers={numbers}", "--input", "place=4"]
    assert main(["infer", "pets", *inputs, "--out", str(out), "--target", puppet.target]) == 0
    request = puppet.seen[-1]
    assert {tensor.name: tensor.datatype for tensor in request.inputs} == {
        "photo": "BYTES",
        "numbers": "FP32",
        "place": "INT32",
    }
    assert request.raw_input_contents[2] == np.array(4, "<i4").tobytes()
    assert capsys.readouterr().out.splitlines() == [
        "pets  (xla, 250.0 ms in the server)",
        "  scores  float32 [1, 4]  0 0 0 1",
    ]
    with np.load(out / "pets-infer.npz") as written:
        assert written["scores"].tolist() == [[0, 0, 0, 1]]
    assert main(["infer", "pets", *inputs, "--json", "--target", puppet.target]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == {"scores": [[0, 0, 0, 1]]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected IMAGE ..., or --input NAME=VALUE"),
        (["three.png", "--input", "place=4"], "expected IMAGE ..., or --input NAME=VALUE"),
        (["--input", "place=4", "--input", "place=5"], "--input place: expected each input once"),
        (["--input", "photo=missing.png"], "--input photo: expected an image file, a .npy file, or numbers in JSON"),
        (["--input", "numbers=missing.npy"], "No such file"),
        (["--input", "place=4"], "inputs: expected photo, numbers, place, got 'place'"),
        (["--input", "photo=[1]", "--input", "numbers=[1,2]", "--input", "place=0.5"], "photo: expected shape"),
    ],
)
def test_wrong_named_inputs_are_told(
    puppet: Puppet, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "pets", *arguments, "--target", puppet.target]) == 1
    assert says in capsys.readouterr().err


def test_an_input_without_a_name_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["infer", "pets", "--input", "a.png"])
    assert "expected NAME=VALUE" in capsys.readouterr().err


def test_models_lists_the_inputs_of_models_of_several(puppet: Puppet, capsys: pytest.CaptureFixture[str]) -> None:
    photo = vision.ModelInput(name="photo", datatype="UINT8", shape=[-1, -1, -1, 3], is_image=True)
    age = vision.ModelInput(name="age", datatype="FP32", shape=[-1])
    puppet.more_models = [vision.Model(name="one", inputs=[photo]), vision.Model(name="pets", inputs=[photo, age])]
    assert main(["models", "--target", puppet.target]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "pets: inputs photo [n, any, any, 3] UINT8 image, age [n] FP32" in lines
    assert main(["run", "pets", "cat.png", "--target", puppet.target]) == 1
    assert "xlaserve-client infer pets --input photo=IMAGE --input age=NUMBERS" in capsys.readouterr().err
    assert not any(line.startswith(("digits: inputs", "one: inputs")) for line in lines)


def test_arrays_are_written_by_any_names(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {"file": np.arange(3), "heads/age:0": np.ones((2, 2), np.float32)}
    cli_tensors.write_arrays(tmp_path / "it.npz", arrays)
    with np.load(tmp_path / "it.npz") as written:
        assert written.files == [*arrays]
        for name, array in arrays.items():
            np.testing.assert_array_equal(written[name], array)
            assert written[name].dtype == array.dtype


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 3), (2, 3, 4)])
def test_infer_writes_an_image_as_a_picture(puppet: Puppet, tmp_path: Path, shape: tuple[int, ...]) -> None:
    image, out = tmp_path / "three.png", tmp_path / "out"
    image.write_bytes(b"\3png")
    puppet.levels = np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)
    assert main(["infer", "denoiser", str(image), "--out", str(out), "--target", puppet.target]) == 0
    (file,) = out.iterdir()
    assert file.name == "three-infer.png"
    with Image.open(file) as written:
        np.testing.assert_array_equal(np.asarray(written).reshape(shape), puppet.levels)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("detect", {"results": [{"detections": [DETECTED], "height": 10, "width": 20}]}),
        ("segment", {"height": 2, "width": 3, "counts": [COUNTED | {"pixels": 3}, DOG | {"pixels": 3}]}),
        ("embed", {"vector": [0.5] * 5 + [2.0]}),
        ("locate", {"results": [{"keypoints": PLACES, "height": 10, "width": 20}]}),
        ("transcribe", {"transcriptions": [{"text": "class 2", "score": 0.5, "categories": [READ]}]}),
    ],
)
def test_the_others_print_json_too(
    puppet: Puppet, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, says: dict[str, object]
) -> None:
    image = tmp_path / "two.png"
    image.write_bytes(b"\2")
    assert main([command, "m", str(image), "--json", "--target", puppet.target]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["image"], answer["model"], answer["mode"]) == (str(image), "m", "xla")
    assert answer["timings"]["total_s"] == 0.5
    assert {key: answer[key] for key in says} == says


def test_a_folder_that_can_not_be_made_is_said_before_anything_is_asked(
    puppet: Puppet, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", "shapes", str(picture), "--out", str(picture), "--target", puppet.target]) == 1
    assert capsys.readouterr().err == f"xlaserve-client: --out: expected a folder, got {picture}: File exists\n"
    assert not puppet.seen


def test_models_prints_aligned_columns_failures_and_warnings(
    puppet: Puppet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--target", puppet.target]) == 0
    header, digits, broken, reason, warning = capsys.readouterr().out.splitlines()
    assert header.index("STATE") == digits.index("ready") == broken.index("failed")
    assert "xla*,graph" in digits
    assert "8 x 32x32" in digits
    assert reason == "broken: no such file"
    assert warning == "digits: warning: it is served in batches of one"


def test_models_prints_json(puppet: Puppet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json", "--target", puppet.target]) == 0
    digits = json.loads(capsys.readouterr().out)[0]
    assert (digits["name"], digits["precision"]) == ("digits", "float32")
    assert digits["warnings"] == ["it is served in batches of one"]


def test_a_missing_file_is_named_and_the_others_are_answered(
    puppet: Puppet, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.png"
    assert main(["classify", "digits", str(missing), str(image), "--target", puppet.target]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"xlaserve-client: {missing}: No such file or directory\n"
    assert "class 3" in printed.out


def test_an_image_that_the_server_refuses_is_named(
    puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    puppet.failures = [(grpc.StatusCode.INVALID_ARGUMENT, "not a readable image")]
    assert main(["classify", "digits", str(image), "--target", puppet.target]) == 1
    assert capsys.readouterr().err == f"xlaserve-client: {image}: not a readable image\n"


def test_an_unknown_model_ends_it_with_the_servers_words(
    puppet: Puppet, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    puppet.failures = [(grpc.StatusCode.NOT_FOUND, "no model nonsense")] * 9
    assert main(["classify", "nonsense", str(image), "--target", puppet.target]) == 1
    assert capsys.readouterr().err == f"xlaserve-client: {puppet.target}: NOT_FOUND: no model nonsense\n"


def test_an_unreachable_server_is_said_in_one_line(
    closed_port: str, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["classify", "digits", str(image), "--target", closed_port]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"xlaserve-client: {closed_port}: UNAVAILABLE")
    assert error.count("\n") == 1


@pytest.mark.parametrize("target", [["--target", "host:1"], ["--target=host:1"]])
def test_an_option_before_the_command_is_refused_with_where_it_belongs(
    target: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*target, "classify", "digits", "three.png"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --target: options follow the command: xlaserve-client COMMAND --target ...;" in line


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{version('xlaserve')}\n")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], "xlaserve-client"),
        (["classify", "digits"], "xlaserve-client classify"),
        (["models", "--deadline", "0"], "xlaserve-client models"),
        (["models", "--nonsense"], "xlaserve-client models"),
    ],
)
def test_a_wrong_command_line_exits_2_with_one_line(
    arguments: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{command}: error: ")
    assert line.endswith(f"; see {command} --help")
