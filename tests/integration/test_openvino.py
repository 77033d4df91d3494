"""Mode `openvino`: served beside the others, chosen from by `auto`, and done without where it can't run a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf
from scripts.digits_data import digit_images
from tests.integration.conftest import Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

SCANS = digit_images("held_out")[:40]


def save_with_zeta(folder: Path) -> None:
    """Writes a model with an operation that XLA compiles and OpenVINO does not know."""
    module = tf.Module()
    module.w = tf.Variable(np.eye(3, 5, dtype=np.float32))

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3), tf.float32, name="pixels")])
    def call(pixels: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": tf.math.zeta(tf.reduce_mean(pixels, axis=(1, 2)) + 2.0, 1.0) @ module.w}

    tf.saved_model.save(module, str(folder), signatures=call)


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("models") / "zeta"
    save_with_zeta(folder)
    digits = {"name": "digits", "source": "builtin:digits", "buckets": [1, 8]}
    models = [
        {**digits, "modes": ["graph", "openvino", "auto"]},
        {**digits, "name": "narrow", "modes": ["openvino"], "openvino_precision": "bfloat16"},
        {"name": "zeta", "source": str(folder), "task": "embedding", "modes": ["auto"], "buckets": [1]},
        {"name": "refused", "source": str(folder), "task": "embedding", "modes": ["openvino"], "buckets": [1]},
    ]
    return start_module_server({"models": models, "lanes": 2, "exit_on_model_failure": False})


@pytest.fixture(scope="module")
def listed(server: Server) -> dict[str, pb.Model]:
    with grpc.insecure_channel(server.grpc) as channel:
        return {model.name: model for model in pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models}


def test_it_reads_digits_in_every_batch_size_and_on_both_lanes_at_once(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel, ThreadPoolExecutor(4) as pool:
        vision = pb_grpc.VisionStub(channel)

        def classify(first: int, count: int) -> list[str]:
            images = [scan.png for scan in SCANS[first : first + count]]
            request = pb.ClassifyRequest(model="digits", images=images, top_k=1, mode="openvino")
            answer = vision.Classify(request)
            assert answer.mode == "openvino"
            return [row.categories[0].label for row in answer.classifications]

        parts = [(first, count) for count in (1, 3, 8) for first in range(0, 32, count)]
        read = [pool.submit(classify, *part) for part in parts]
        for (first, count), labels in zip(parts, read, strict=True):
            assert labels.result() == [str(scan.label) for scan in SCANS[first : first + count]]


def test_the_ledger_has_its_programs_which_agree_with_eager_mode(listed: dict[str, pb.Model]) -> None:
    programs = [program for program in listed["digits"].programs if program.mode == "openvino"]
    assert [program.bucket.batch for program in programs] == [1, 8]
    assert all(program.compile_s > 0 for program in programs)
    assert all(program.verification.difference.largest < 1e-4 for program in programs)
    assert set(listed["digits"].auto_modes.values()) <= {"xla", "graph", "openvino"}


def test_a_narrower_precision_is_stated_with_the_measured_difference(
    server: Server, listed: dict[str, pb.Model]
) -> None:
    (found,) = listed["narrow"].differences
    assert (found.mode, found.images) == ("openvino", 16)
    assert found.largest < 0.05
    assert found.agreement == 1.0
    labels = {"model": "narrow", "mode": "openvino", "precision": "bfloat16"}
    np.testing.assert_allclose(server.metric("xlaserve_precision_difference", **labels), found.largest)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = oip_grpc.GRPCInferenceServiceStub(channel)
        metadata = stub.ModelMetadata(oip.ModelMetadataRequest(name="narrow"))
    assert metadata.properties["precision"].startswith("float32, bfloat16 in openvino (openvino: largest difference")


def test_auto_goes_on_without_it_where_it_does_not_know_an_operation(listed: dict[str, pb.Model]) -> None:
    zeta = listed["zeta"]
    assert {program.mode for program in zeta.programs} == {"xla", "graph"}
    assert set(zeta.auto_modes.values()) <= {"xla", "graph"}
    assert "auto does without openvino: OpenVINO has no translation of Zeta" in zeta.warnings


def test_a_model_that_offers_it_fails_with_the_operation(listed: dict[str, pb.Model]) -> None:
    assert "OpenVINO has no translation of Zeta" in listed["refused"].reason
