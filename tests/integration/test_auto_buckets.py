"""`buckets: auto`: candidates are measured, some are kept, and those answer correctly without another compilation."""

from __future__ import annotations

import grpc
from scripts.digits_data import digit_images
from tests.integration.conftest import COMPILES, StartServer

from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto import vision_pb2_grpc as pb_grpc


def test_candidates_are_measured_and_those_that_are_kept_serve(start_server: StartServer) -> None:
    model = {
        "name": "digits",
        "source": "builtin:digits",
        "modes": ["xla", "graph"],
        "buckets": "auto",
        "auto_buckets": {"max_batch": 6, "max_buckets": 2},
    }
    server = start_server({"models": [model], **COMPILES})
    scans = digit_images("held_out")[:20]
    with grpc.insecure_channel(server.grpc) as channel:
        vision = pb_grpc.VisionStub(channel)
        (listed,) = vision.ListModels(pb.ListModelsRequest()).models
        kept = [bucket.batch for bucket in listed.buckets]
        assert 1 <= len(kept) <= 2
        measured = [program.bucket.batch for program in listed.programs if program.mode == "xla"]
        assert sorted(measured) == [1, 2, 3, 4, 6]
        assert [program.bucket.batch for program in listed.programs if program.mode == "graph"] == kept
        assert listed.programs_total == len(listed.programs) == server.metric("xlaserve_compilations_total")
        for mode in ("xla", "graph"):
            request = pb.ClassifyRequest(model="digits", mode=mode, images=[scan.png for scan in scans], top_k=1)
            answer = vision.Classify(request)
            assert [row.categories[0].label for row in answer.classifications] == [str(scan.label) for scan in scans]
    assert server.metric("xlaserve_compilations_total") == len(listed.programs)
    ran = {batch: server.metric("xlaserve_bucket_batches_total", bucket=f"{batch}x32x32") for batch in range(1, 7)}
    assert sum(ran.values()) == sum(ran[batch] for batch in kept) > 0
