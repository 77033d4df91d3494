"""Digits in int8: calibrated with the command on scans that the model was trained on, and served on those held out."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from scripts.digits_data import digit_images
from tests.integration.conftest import Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nncf") is None, reason="needs nncf")

SCANS = digit_images("held_out")
CALIBRATED_ON = 200


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (images := (folder := tmp_path_factory.mktemp("int8")) / "scans").mkdir()
    for scan in digit_images("train")[:CALIBRATED_ON]:
        (images / f"{scan.index}.png").write_bytes(scan.png)
    command = [sys.executable, "-m", "xlaserve", "calibrate", "builtin:digits", "--images", "scans"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "int8" in done.stdout
    assert "of 40 held-out images; written: digits-int8" in done.stdout
    assert sorted(file.name for file in folder.iterdir()) == ["digits-int8", "scans"]
    return folder / "digits-int8"


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, made: Path) -> Server:
    damaged = shutil.copytree(made, made.with_name("damaged"))
    (damaged / "32x32.bin").write_bytes((made / "32x32.bin").read_bytes()[:-1])
    int8 = {"source": "builtin:digits", "openvino_precision": "int8", "calibration": str(made), "buckets": [1, 32]}
    models = [
        {"name": "float32", "source": "builtin:digits", "modes": ["openvino"], "buckets": [32]},
        {**int8, "name": "int8", "modes": ["openvino"]},
        {**int8, "name": "chosen", "modes": ["auto"], "buckets": [32]},
        {**int8, "name": "damaged", "calibration": str(damaged), "modes": ["auto"], "buckets": [32]},
    ]
    return start_module_server({"models": models, "exit_on_model_failure": False})


def accuracy(server: Server, model: str) -> float:
    right = 0
    with grpc.insecure_channel(server.grpc) as channel:
        vision = pb_grpc.VisionStub(channel)
        for start in range(0, len(SCANS), 32):
            scans = SCANS[start : start + 32]
            request = pb.ClassifyRequest(model=model, images=[scan.png for scan in scans], top_k=1)
            answer = vision.Classify(request)
            labels = [row.categories[0].label for row in answer.classifications]
            right += sum(label == str(scan.label) for label, scan in zip(labels, scans, strict=True))
    return right / len(SCANS)


def test_int8_reads_digits_as_well_as_float32(server: Server) -> None:
    exact = accuracy(server, "float32")
    assert exact > 0.95
    assert abs(accuracy(server, "int8") - exact) <= 0.005
    assert abs(accuracy(server, "chosen") - exact) <= 0.005


def test_the_agreement_is_stated_where_the_precision_is(server: Server, made: Path) -> None:
    (calibrated,) = json.loads((made / "calibration.json").read_text())["models"]
    with grpc.insecure_channel(server.grpc) as channel:
        metadata = oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(oip.ModelMetadataRequest(name="int8"))
        models = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models
    said = f"calibrated: agreement {calibrated['agreement']:.4f} of 40 held-out images)"
    stated = metadata.properties["precision"]
    assert stated.startswith("float32, int8 in openvino (openvino: largest difference")
    assert stated.endswith(said)
    assert said in server.stderr
    (found,) = next(model for model in models if model.name == "int8").differences
    assert found.mode == "openvino"
    assert 0 < found.largest < 0.3
    assert server.metric("xlaserve_model_info", model="int8", mode="openvino", precision="int8") == 1


def test_a_damaged_calibration_is_refused_by_auto_too(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        models = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models
    (damaged,) = [model for model in models if model.name == "damaged"]
    assert damaged.reason == "calibration: damaged/32x32.bin is damaged, or not the one that was written"
