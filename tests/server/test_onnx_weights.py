from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.server.models.sources.onnx_writer import field, model, outside

from xlaserve.config import keras_shards, onnx_weights
from xlaserve.config.stamp import GRANULARITY_NS, Stamp

OLD_NS = 10**18


def weights(name: str) -> bytes:
    return outside("weights", [1], name)


def graph(name: str) -> bytes:
    """Returns a graph of one stored tensor."""
    return field(5, weights(name))


def node_with(attribute: bytes) -> bytes:
    return field(4, "If") + field(5, field(1, "attribute") + attribute)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(field(7, graph("w.bin")), id="initializer"),
        pytest.param(field(7, field(15, field(1, weights("w.bin")))), id="sparse-values"),
        pytest.param(field(7, field(15, field(2, weights("w.bin")))), id="sparse-indices"),
        pytest.param(field(7, field(1, node_with(field(5, weights("w.bin"))))), id="constant"),
        pytest.param(field(7, field(1, node_with(field(10, weights("w.bin"))))), id="constants"),
        pytest.param(field(7, field(1, node_with(field(22, field(1, weights("w.bin")))))), id="sparse-constant"),
        pytest.param(field(7, field(1, node_with(field(6, graph("w.bin"))))), id="branch"),
        pytest.param(field(7, field(1, node_with(field(11, graph("w.bin"))))), id="branches"),
        pytest.param(field(25, field(7, node_with(field(5, weights("w.bin"))))), id="function"),
        pytest.param(field(25, field(11, field(5, weights("w.bin")))), id="default-of-a-function"),
        pytest.param(field(20, field(1, graph("w.bin"))), id="training"),
    ],
)
def test_the_weights_of_tensors_anywhere_are_found(tmp_path: Path, message: bytes) -> None:
    (file := tmp_path / "net.onnx").write_bytes(field(1, 8) + message)
    assert onnx_weights.names(file) == ("w.bin",)


def test_large_weights_before_and_after_names_are_passed_over(tmp_path: Path) -> None:
    large = field(1, 3) + field(9, bytes(3 * onnx_weights.WINDOW_BYTES))
    stored = [large, weights("b.bin"), large, weights("a.bin"), weights("b.bin"), large]
    (file := tmp_path / "net.onnx").write_bytes(model([], pixels=("x", [1]), scores=("y", [1]), weights=stored))
    assert onnx_weights.names(file) == ("a.bin", "b.bin")


def test_a_tensor_that_has_its_numbers_names_no_file(tmp_path: Path) -> None:
    named = field(13, field(1, "location") + field(2, "w.bin"))
    (file := tmp_path / "net.onnx").write_bytes(field(7, field(5, named + field(14, 0)) + field(5, named)))
    assert onnx_weights.names(file) == ()


def test_a_damaged_file_has_the_names_before_the_damage(tmp_path: Path) -> None:
    whole = field(7, graph("a.bin")) + field(7, graph("b.bin"))
    file = tmp_path / "net.onnx"
    for damage in (whole[:-1], whole[:-1] + b"\xff" * 99, b"\xff" * 99, b"\x0b" + whole, b""):
        file.write_bytes(damage)
        assert set(onnx_weights.names(file)) <= {"a.bin", "b.bin"}
    file.write_bytes(whole[:-1])
    assert onnx_weights.names(file) == ("a.bin",)


def test_messages_that_are_nested_without_end_are_not_followed(tmp_path: Path) -> None:
    nested = graph("w.bin")
    for _ in range(3000):
        nested = field(1, node_with(field(6, nested)))
    (file := tmp_path / "net.onnx").write_bytes(field(7, graph("a.bin") + nested))
    assert onnx_weights.names(file) == ("a.bin",)


def test_a_file_is_read_again_only_where_it_may_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "net.onnx").write_bytes(field(7, graph("a.bin")))
    os.utime(file, ns=(OLD_NS, OLD_NS))
    changed_ns = Stamp.of(file).changed_ns
    assert onnx_weights.names(file) == ("a.bin",)
    monkeypatch.setattr("time.time_ns", lambda: changed_ns + 2 * GRANULARITY_NS)
    assert onnx_weights.names(file) == ("a.bin",)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "open", None)
        assert onnx_weights.names(file) == ("a.bin",)
    (other := tmp_path / "other").write_bytes(field(7, graph("b.bin")))
    other.replace(file)
    assert onnx_weights.names(file) == ("b.bin",)


@pytest.mark.parametrize("name", ["net.onnx", "net.weights.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert onnx_weights.files(tmp_path / name) == []
    assert keras_shards.files(tmp_path / name) == []


def test_no_more_fields_are_looked_at_than_there_are_in_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = field(1, b"") * 100
    (file := tmp_path / "net.onnx").write_bytes(field(7, many + graph("w.bin")))
    assert onnx_weights.names(file) == ("w.bin",)
    monkeypatch.setattr(onnx_weights, "MOST_FIELDS", 50)
    assert onnx_weights._names(file) == ()
