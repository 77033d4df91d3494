"""Mode `auto`: each bucket in the mode that warm-up measured to be the fastest, as each interface shows."""

from __future__ import annotations

from urllib.request import urlopen

import grpc
import pytest
from scripts.digits_data import digit_images
from tests.integration.conftest import Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc


@pytest.fixture(scope="module")
def server(start_module_server: StartServer) -> Server:
    model = {"name": "digits", "source": "builtin:digits", "modes": ["auto"], "buckets": [1, 8]}
    return start_module_server({"models": [model]})


def test_auto_compiles_its_candidates_answers_right_and_reports_its_choice(server: Server) -> None:
    scans = digit_images("held_out")[:20]
    with grpc.insecure_channel(server.grpc) as channel:
        vision = pb_grpc.VisionStub(channel)
        answer = vision.Classify(pb.ClassifyRequest(model="digits", images=[scan.png for scan in scans], top_k=1))
        assert answer.mode == "auto"
        assert [row.categories[0].label for row in answer.classifications] == [str(scan.label) for scan in scans]
        (listed,) = vision.ListModels(pb.ListModelsRequest()).models
        assert listed.modes == ["auto"]
        assert [(program.mode, program.bucket.batch) for program in listed.programs] == [
            *(("xla", 1), ("xla", 8)),
            *(("graph", 1), ("graph", 8)),
            *(("openvino", 1), ("openvino", 8)),
        ]
        assert set(listed.auto_modes) == {"1x32x32", "8x32x32"}
        assert set(listed.auto_modes.values()) <= {"xla", "graph", "openvino"}
        metadata = oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(oip.ModelMetadataRequest(name="digits"))
    for bucket, mode in listed.auto_modes.items():
        assert f"{bucket} in {mode}" in metadata.properties["auto"]
    with urlopen(f"http://{server.metrics}/metrics") as response:
        metrics = response.read().decode()
    for bucket, mode in listed.auto_modes.items():
        assert f'xlaserve_auto_mode{{bucket="{bucket}",mode="{mode}",model="digits",version="1"}} 1.0' in metrics
    assert (
        'xlaserve_requests_total{method="Classify",mode="auto",model="digits",status="OK",version="1"} 1.0' in metrics
    )


def test_a_mode_that_is_only_compiled_for_auto_is_not_offered(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        request = pb.ClassifyRequest(model="digits", images=[digit_images("held_out")[0].png], mode="graph")
        try:
            pb_grpc.VisionStub(channel).Classify(request)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "mode: expected one of auto, got 'graph'"
        else:
            raise AssertionError("graph mode was served")
