from __future__ import annotations

from pathlib import Path

from tests.server.models.sources.onnx_writer import model, outside

from xlaserve.config import Mode, ModelSettings, Precision, ScalingSettings
from xlaserve.models.networks.model_identity import identity


def test_what_makes_another_model_has_another_identity(tmp_path: Path) -> None:
    file, labels, folder = tmp_path / "weights.h5", tmp_path / "labels.txt", tmp_path / "saved"
    file.write_text("1")
    labels.write_text("1")
    folder.mkdir()
    (folder / "saved_model.pb").write_text("1")
    (calibration := tmp_path / "int8").mkdir()
    (calibration / "calibration.json").write_text("1")
    settings = ModelSettings(
        name="a",
        source=str(folder),
        weights=str(file),
        labels=labels,
        openvino_precision=Precision.INT8,
        calibration=calibration,
    )
    before = identity(settings)
    assert identity(settings.model_copy(update={"name": "b", "max_queue_images": 3, "decode": "fast"})) == before
    assert identity(settings.model_copy(update={"preprocess": "unit"})) != before
    scaled, other = (
        identity(settings.model_copy(update={"preprocess": ScalingSettings(mean=mean)})) for mean in (1.0, 2.0)
    )
    assert before != scaled != other
    both, graph = (settings.model_copy(update={"modes": modes}) for modes in ((Mode.GRAPH, Mode.XLA), (Mode.GRAPH,)))
    assert identity(both) == before != identity(graph), "what is lowered for XLA is not known of this one"
    for path in (file, labels, folder / "saved_model.pb", calibration / "calibration.json"):
        path.write_text("2")
        assert identity(settings) != before
        path.write_text("1")
    assert identity(settings) == before


def test_a_link_that_is_set_to_other_weights_makes_another_model(tmp_path: Path) -> None:
    (source := tmp_path / "saved").mkdir()
    for weights in ("old", "new"):
        (tmp_path / weights).mkdir()
        (tmp_path / weights / "variables.index").write_text(weights)
    (link := source / "variables").symlink_to(tmp_path / "old")
    settings = ModelSettings(name="a", source=str(source))
    before = identity(settings)
    link.unlink()
    link.symlink_to(tmp_path / "new")
    assert identity(settings) != before


def test_other_weights_beside_an_onnx_file_make_another_model(tmp_path: Path) -> None:
    source, weights = tmp_path / "net.onnx", tmp_path / "w.bin"
    source.write_bytes(model([], pixels=("x", [1]), scores=("y", [1]), weights=[outside("kernel", [1], "w.bin")]))
    weights.write_text("1")
    settings = ModelSettings(name="a", source=str(source))
    before = identity(settings)
    weights.write_text("2")
    assert identity(settings) != before
    weights.write_text("1")
    assert identity(settings) == before
