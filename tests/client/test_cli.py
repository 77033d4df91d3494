from __future__ import annotations

import json

import grpc
import pytest

from xlaserve_client.cli import main


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "three.png"
    path.write_bytes(b"\x03png")
    return path


def test_classify_prints_the_classes_of_each_image_in_order(puppet, image, tmp_path, capsys):
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


def test_classify_prints_json(puppet, image, capsys):
    arguments = ["classify", "digits", str(image), "--top-k", "1", "--mode", "graph", "--json"]
    assert main([*arguments, "--target", puppet.target]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["image"] == str(image)
    assert answer["mode"] == "graph"
    assert answer["classifications"] == [{"categories": [{"index": 3, "label": "class 3", "score": 1.0}]}]


def test_models_prints_aligned_columns_and_the_reason_of_a_failure(puppet, capsys):
    assert main(["models", "--target", puppet.target]) == 0
    header, digits, broken, reason = capsys.readouterr().out.splitlines()
    assert header.index("STATE") == digits.index("ready") == broken.index("failed")
    assert "xla*,graph" in digits
    assert "8 x 32x32" in digits
    assert reason == "broken: no such file"


def test_models_prints_json(puppet, capsys):
    assert main(["models", "--json", "--target", puppet.target]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "digits"


def test_a_missing_file_is_named_and_the_others_are_answered(puppet, image, tmp_path, capsys):
    missing = tmp_path / "missing.png"
    assert main(["classify", "digits", str(missing), str(image), "--target", puppet.target]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"xlaserve-client: {missing}: No such file or directory\n"
    assert "class 3" in printed.out


def test_an_image_that_the_server_refuses_is_named(puppet, image, capsys):
    puppet.failures = [(grpc.StatusCode.INVALID_ARGUMENT, "not a readable image")]
    assert main(["classify", "digits", str(image), "--target", puppet.target]) == 1
    assert capsys.readouterr().err == f"xlaserve-client: {image}: not a readable image\n"


def test_an_unknown_model_ends_it_with_the_servers_words(puppet, image, capsys):
    puppet.failures = [(grpc.StatusCode.NOT_FOUND, "no model nonsense")] * 9
    assert main(["classify", "nonsense", str(image), "--target", puppet.target]) == 1
    assert capsys.readouterr().err == f"xlaserve-client: {puppet.target}: NOT_FOUND: no model nonsense\n"


def test_an_unreachable_server_is_said_in_one_line(closed_port, image, capsys):
    assert main(["classify", "digits", str(image), "--target", closed_port]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"xlaserve-client: {closed_port}: UNAVAILABLE")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["classify", "digits"], ["models", "--deadline", "0"]])
def test_a_wrong_command_line_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
