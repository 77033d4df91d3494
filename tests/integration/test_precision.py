"""A model in bfloat16: each interface shows what it is and how far its answers are from float32."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from scripts.digits_data import digit_images
from tests.integration.conftest import StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc


@pytest.mark.slow
def test_the_difference_by_precision_is_shown_and_survives_restarts(start_server: StartServer, tmp_path: Any) -> None:
    modes = ["xla", "graph"]
    digits = {"name": "digits", "source": "builtin:digits", "modes": modes, "buckets": [8]}
    models = [digits | {"precision": "bfloat16"}, digits | {"name": "exact"}]
    config = {"models": models, "compile_cache": str(tmp_path / "cache")}
    seen = []
    for _ in range(2):  # the second takes everything from the compile cache
        server = start_server(config)
        with grpc.insecure_channel(server.grpc) as channel:
            vision, inference = pb_grpc.VisionStub(channel), oip_grpc.GRPCInferenceServiceStub(channel)
            narrow, exact = vision.ListModels(pb.ListModelsRequest()).models
            assert not any("float32" in said for said in exact.warnings)
            assert sum("on a CPU XLA computes in float32 all the same" in said for said in narrow.warnings) == 1
            assert (narrow.precision, exact.precision, list(exact.differences)) == ("bfloat16", "float32", [])
            assert [found.mode for found in narrow.differences] == modes
            for found in narrow.differences:
                assert 0 < found.largest < 0.05
                assert found.agreement == 1.0
                assert found.images == 16
                labels = {"model": "digits", "mode": found.mode, "precision": "bfloat16"}
                np.testing.assert_allclose(server.metric("xlaserve_precision_difference", **labels), found.largest)
                assert server.metric("xlaserve_precision_agreement", **labels) == 1.0
            assert server.metric("xlaserve_precision_agreement", model="exact") == 0
            metadata = inference.ModelMetadata(oip.ModelMetadataRequest(name="digits"))
            assert metadata.properties["precision"].startswith("bfloat16 (xla: largest difference ")
            assert inference.ModelMetadata(oip.ModelMetadataRequest(name="exact")).properties["precision"] == "float32"
            scans = digit_images("held_out")[:40]
            answer = vision.Classify(pb.ClassifyRequest(model="digits", images=[scan.png for scan in scans], top_k=1))
            assert [row.categories[0].label for row in answer.classifications] == [str(scan.label) for scan in scans]
            seen.append({found.mode: found.largest for found in narrow.differences})
        server.stop()
    np.testing.assert_allclose(seen[0]["xla"], seen[1]["xla"])
