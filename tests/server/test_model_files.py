from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tests.server.models.sources.onnx_writer import model, outside

from xlaserve.config import ExampleSettings, ModelSettings, model_files
from xlaserve.config.stamp import Stamp


def test_files_are_found_through_links_and_not_in_circles(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for path in (folder / "variables.index", elsewhere / "data"):
        path.parent.mkdir()
        path.write_text("1")
    (folder / "variables").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    (folder / "self").symlink_to(".")
    (folder / "nowhere").symlink_to("missing")
    assert [*model_files.files_at(folder)] == [folder / "variables" / "data", folder / "variables.index"]
    assert [*model_files.files_at(folder / "variables.index")] == [folder / "variables.index"]
    assert [*model_files.files_at(tmp_path / "missing")] == []


def test_a_file_replaced_by_one_of_equal_size_and_time_is_noticed(tmp_path: Path) -> None:
    source, labels = tmp_path / "model.keras", tmp_path / "labels.txt"
    for file in (source, labels):
        file.write_text("1")
    settings = ModelSettings(name="a", source=str(source), labels=labels)
    before = model_files.state(settings)
    assert model_files.state(settings) == before
    for file in (source, labels):
        seen = file.stat()
        (other := tmp_path / "other").write_text("2")
        os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        other.replace(file)
        assert model_files.state(settings) != before
        before = model_files.state(settings)


def test_a_file_written_in_place_with_its_size_and_time_is_another_state(tmp_path: Path) -> None:
    source = tmp_path / "model.keras"
    source.write_text("1")
    settings = ModelSettings(name="a", source=str(source))
    before, seen = model_files.state(settings), source.stat()
    give_up_at = time.monotonic() + 30
    while source.stat().st_ctime_ns == seen.st_ctime_ns:  # until the clock of the file system has gone on
        assert time.monotonic() < give_up_at
        source.write_text("2")
        os.utime(source, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    after = source.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    assert model_files.state(settings) != before


def test_weights_that_an_onnx_file_lists_are_part_of_the_state(tmp_path: Path) -> None:
    source, weights = tmp_path / "net.onnx", tmp_path / "below" / "w.bin"
    names = ["below/w.bin", "../up.bin", str(tmp_path / "other.bin"), "nul\0", ""]
    source.write_bytes(
        model([], pixels=("x", [1]), scores=("y", [1]), weights=[outside(name, [1], name) for name in names])
    )
    settings = ModelSettings(name="a", source=str(source))
    assert model_files.named_paths(settings) == [source, weights], "nothing outside its folder"
    before = model_files.state(settings)
    weights.parent.mkdir()
    weights.write_text("1")
    there = model_files.state(settings)
    assert {path for path, _ in there - before} == {str(weights)}
    (other := tmp_path / "other").write_text("2")
    other.replace(weights)
    assert model_files.state(settings) not in (before, there)


def test_shards_of_keras_weights_are_part_of_the_state(tmp_path: Path) -> None:
    weights = tmp_path / "net.weights.json"
    settings = ModelSettings(name="a", source="keras.applications:ResNet50", weights=str(weights))
    assert model_files.named_paths(settings) == [Path(settings.source), weights]
    shards = [tmp_path / f"net_{index:05}.weights.h5" for index in range(3)]
    one, two, three = (shard.name for shard in shards)
    weights.write_text(json.dumps({"weight_map": {"/a/vars": one, "/b/vars": [two, three], "/c/vars": two}}))
    assert model_files.named_paths(settings) == [Path(settings.source), weights, *shards]
    before = model_files.state(settings)
    shards[1].write_text("1")
    assert model_files.state(settings) != before
    for damaged in ("{", "[1]", "{}", '{"weight_map": {"/a": 1}}', '{"weight_map": {"/a": "../up.h5"}}', "[" * 9999):
        weights.write_text(damaged)
        assert model_files.named_paths(settings) == [Path(settings.source), weights]


def test_examples_are_part_of_the_state_and_nothing_to_compute_with(tmp_path: Path) -> None:
    (expected := tmp_path / "predictions.csv").write_text("1")
    settings = ModelSettings(name="a", source="builtin:noop", examples=ExampleSettings(folder=tmp_path))
    assert tmp_path not in model_files.named_paths(settings)
    before = model_files.state(settings)
    expected.write_text("22")
    assert model_files.state(settings) != before


@pytest.mark.parametrize(
    ("modified_s", "changed_s", "shows"),
    [(1, 1, True), (1, 99, False), (99, 1, False), (1, 200, False), (98, 97, False)],
)
def test_a_change_soon_after_another_may_not_show(modified_s: int, changed_s: int, shows: bool) -> None:
    stamp = Stamp(1, 2, 3, modified_s * 10**9, changed_s * 10**9)
    assert stamp.shows_changes_after(100 * 10**9) is shows
