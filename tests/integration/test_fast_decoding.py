"""A model with `decode: fast` beside the same one without: every interface shows it, and answers hardly differ."""

from __future__ import annotations

import io
import json
import urllib.request
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from scripts.shapes_data import HELD_OUT_SEED, LABELS, scene
from tests.integration.conftest import Server, StartServer

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc

DETECTOR = {"source": "builtin:shapes-detector", "modes": ["graph"], "buckets": [1]}
NAMES = ("fast", "exact")
SCENE = scene(HELD_OUT_SEED, 3, height=541, width=723)
CORNERS = ("x_min", "y_min", "x_max", "y_max")


@pytest.fixture(scope="module")
def server(start_module_server: StartServer) -> Server:
    return start_module_server({"models": [DETECTOR | {"name": name, "decode": name} for name in NAMES]})


@pytest.fixture
def image() -> bytes:
    """Some five times as large as the model's input."""
    file = io.BytesIO()
    Image.fromarray(SCENE.pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def test_the_measured_difference_is_in_lists_metadata_metrics_and_the_log(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        fast, exact = pb_grpc.VisionStub(channel).ListModels(pb.ListModelsRequest()).models
        metadata = [
            oip_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(oip.ModelMetadataRequest(name=name))
            for name in NAMES
        ]
    assert (fast.decode, exact.decode) == NAMES
    assert not exact.HasField("decode_difference")
    found = fast.decode_difference
    assert (found.mode, found.images) == ("graph", 8)
    assert 0 < found.largest < 0.2
    np.testing.assert_allclose(server.metric("xlaserve_decode_difference", model="fast"), found.largest)
    assert 'xlaserve_decode_difference{model="exact"' not in server.scrape()
    assert metadata[0].properties["decode"].startswith("fast (largest difference 0.")
    assert metadata[1].properties["decode"] == "exact"
    assert "model fast: decode fast (largest difference 0." in server.stderr


def over_grpc(server: Server, name: str, image: bytes) -> list[dict[str, Any]]:
    with grpc.insecure_channel(server.grpc) as channel:
        (result,) = pb_grpc.VisionStub(channel).Detect(pb.DetectRequest(model=name, images=[image])).results
    return [
        {"index": item.index, "box": {corner: getattr(item.box, corner) for corner in CORNERS}}
        for item in result.detections
    ]


def over_http(server: Server, name: str, image: bytes) -> list[dict[str, Any]]:
    url = f"http://{server.http}/v1/models/{name}:detect"
    with urllib.request.urlopen(
        urllib.request.Request(url, image, {"Content-Type": "image/jpeg"}), timeout=30
    ) as reply:
        (result,) = json.load(reply)["results"]
    detections: list[dict[str, Any]] = result["detections"]
    return detections


@pytest.mark.parametrize("detect", [over_grpc, over_http])
def test_fast_decoding_finds_objects_where_exact_decoding_does(server: Server, image: bytes, detect: Any) -> None:
    fast, exact = ({item["index"]: item["box"] for item in detect(server, name, image)} for name in NAMES)
    assert set(fast) == set(exact) == {shape.label for shape in SCENE.shapes} <= set(range(len(LABELS)))
    boxes = [[[box[corner] for corner in CORNERS] for _, box in sorted(found.items())] for found in (fast, exact)]
    assert boxes[0] != boxes[1], "the same answer shows that nothing was reduced"
    np.testing.assert_allclose(boxes[0], boxes[1], atol=4)
