"""xlaserve.v1.Vision over a real socket."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from tests.integration.conftest import FRONTS
from tests.required import required

from xlaserve_proto import vision_pb2 as pb
from xlaserve_proto.vision_pb2_grpc import VisionStub


def best(response: pb.ClassifyResponse) -> list[str]:
    return [row.categories[0].label for row in response.classifications]


def test_one_image_is_classified(vision: VisionStub, scans: dict[str, bytes]) -> None:
    response = vision.Classify(pb.ClassifyRequest(model="digits", images=[scans["7"]]))
    (classification,) = response.classifications
    assert classification.categories[0].label == "7"
    assert classification.categories[0].index == 7
    assert (response.model, response.version, response.mode) == ("digits", "1", "xla")
    scores = [category.score for category in classification.categories]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert 0.5 < sum(scores) < 1.0001


def test_several_images_are_classified_in_their_order(vision: VisionStub, scans: dict[str, bytes]) -> None:
    digits = [*scans, *reversed(scans)]
    response = vision.Classify(pb.ClassifyRequest(model="digits", images=[scans[digit] for digit in digits]))
    assert best(response) == digits


@pytest.mark.parametrize(("top_k", "classes"), [(0, 5), (1, 1), (3, 3), (10, 10), (11, 10), (2**31 - 1, 10)])
def test_top_k_says_how_many_classes_come_back(
    vision: VisionStub, scans: dict[str, bytes], top_k: int, classes: int
) -> None:
    response = vision.Classify(pb.ClassifyRequest(model="digits", images=[scans["3"], scans["4"]], top_k=top_k))
    assert [len(row.categories) for row in response.classifications] == [classes] * 2
    assert best(response) == ["3", "4"]


@pytest.mark.parametrize("mode", ["xla", "graph", "eager"])
def test_a_request_chooses_its_mode(vision: VisionStub, scans: dict[str, bytes], mode: str) -> None:
    response = vision.Classify(pb.ClassifyRequest(model="digits", images=list(scans.values()), mode=mode, version="1"))
    assert response.mode == mode
    assert best(response) == list(scans)


def test_without_labels_the_index_is_the_label(vision: VisionStub, scans: dict[str, bytes]) -> None:
    response = vision.Classify(pb.ClassifyRequest(model="noop", images=[scans["3"]], top_k=3))
    categories = response.classifications[0].categories
    assert [category.label for category in categories] == [str(category.index) for category in categories]
    assert len(categories) == 3


def test_an_answer_says_where_the_time_went(vision: VisionStub, scans: dict[str, bytes]) -> None:
    timings = vision.Classify(pb.ClassifyRequest(model="digits", images=[scans["3"]])).timings
    stages = [timings.decode_s, timings.queue_s, timings.gather_s, timings.execute_s, timings.encode_s]
    assert min(stages) >= 0
    assert timings.decode_s > 0
    assert timings.execute_s > 0
    assert timings.encode_s > 0
    assert sum(stages) <= timings.total_s < 30


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"model": "nope"}, grpc.StatusCode.NOT_FOUND, "no model 'nope'; there are: broken, digits, noop"),
        ({"model": ""}, grpc.StatusCode.NOT_FOUND, "no model ''"),
        ({"model": "broken"}, grpc.StatusCode.FAILED_PRECONDITION, "model broken failed: source: "),
        ({"version": "2"}, grpc.StatusCode.NOT_FOUND, "version"),
        (
            {"images": []},
            grpc.StatusCode.INVALID_ARGUMENT,
            "images: expected at least one encoded image and at most 4096, got 0",
        ),
        ({"images": [b""]}, grpc.StatusCode.INVALID_ARGUMENT, "image: expected JPEG, PNG or WebP, got no bytes"),
        ({"images": [b"hello"]}, grpc.StatusCode.INVALID_ARGUMENT, "image: expected JPEG, PNG or WebP, got 5 bytes"),
        ({"top_k": -1}, grpc.StatusCode.INVALID_ARGUMENT, "top_k: expected a number of classes"),
        ({"mode": "turbo"}, grpc.StatusCode.INVALID_ARGUMENT, "mode: expected one of xla, graph, eager, got 'turbo'"),
    ],
)
def test_a_wrong_request_gets_a_clear_status(
    vision: VisionStub, scans: dict[str, bytes], change: dict[str, Any], code: grpc.StatusCode, says: str
) -> None:
    request = pb.ClassifyRequest(**{"model": "digits", "images": [scans["3"]], **change})
    with pytest.raises(grpc.RpcError) as caught:
        vision.Classify(request)
    assert caught.value.code() is code
    assert says in required(caught.value.details())


def test_one_bad_image_refuses_its_request_and_no_other(vision: VisionStub, scans: dict[str, bytes]) -> None:
    good = vision.Classify.future(pb.ClassifyRequest(model="digits", images=list(scans.values())))
    bad = vision.Classify.future(pb.ClassifyRequest(model="digits", images=[scans["3"], scans["4"][:60]]))
    assert bad.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "whole PNG" in required(bad.details())
    assert best(good.result()) == list(scans)


def test_bytes_that_are_no_request_are_refused(channel: grpc.Channel) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/xlaserve.v1.Vision/Classify")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\x0a\x02\xff\xfe")  # a model's name that is not UTF-8
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert required(caught.value.details()).startswith("message: expected ")


def test_models_are_listed_with_what_they_cost(vision: VisionStub) -> None:
    listed = vision.ListModels(pb.ListModelsRequest())
    assert listed.lanes >= 1
    assert listed.fronts == FRONTS
    digits, noop, broken = listed.models
    assert (digits.name, digits.version, digits.state, digits.reason) == ("digits", "1", pb.Model.STATE_READY, "")
    assert (digits.source, digits.weights, digits.task) == ("builtin:digits", "built in", "classification")
    assert digits.fit == "resize"
    assert (digits.resize, digits.resize_reason) == ("pillow bilinear, antialiased", "")
    assert (list(digits.modes), digits.default_mode) == (["xla", "graph", "eager"], "xla")
    assert [(b.batch, b.height, b.width) for b in digits.buckets] == [(n, 32, 32) for n in (1, 2, 4, 8)]
    assert digits.programs_total == len(digits.programs) == 12
    assert {(p.mode, p.bucket.batch) for p in digits.programs} == {
        (mode, batch) for mode in ("xla", "graph", "eager") for batch in (1, 2, 4, 8)
    }
    for program in digits.programs:
        assert program.run_s > 0
        assert program.run_loaded_s > 0
        # What a first run of a graph takes beyond later ones may be too little to see.
        assert program.compile_s > 0 or program.mode != "xla"
        assert not program.compile_s or program.mode != "eager"
    spent = sum(program.trace_s + program.compile_s for program in digits.programs)
    assert digits.compile_s == pytest.approx(spent)
    assert (noop.name, noop.state, noop.programs_total) == ("noop", pb.Model.STATE_READY, 3)
    assert (broken.name, broken.state, list(broken.programs)) == ("broken", pb.Model.STATE_FAILED, [])
    assert broken.source == "broken.keras"
    assert "does not exist" in broken.reason
