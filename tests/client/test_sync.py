from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.client.conftest import Puppet

from xlaserve_client import (
    Box,
    Category,
    DeadlineExceeded,
    Detection,
    InvalidReply,
    InvalidRequest,
    Keypoint,
    Keypoints,
    ModelFailed,
    ModelNotFound,
    Overloaded,
    ServerError,
    Transcription,
    Unavailable,
    VisionClient,
)
from xlaserve_client.connection import MAX_ATTEMPTS

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "draining")
EXHAUSTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")


@pytest.fixture
def client(puppet: Puppet) -> Iterator[VisionClient]:
    with VisionClient(puppet.target, deadline_s=5) as client:
        yield client


def test_encoded_bytes_are_classified(client: VisionClient, puppet: Puppet) -> None:
    result = client.classify(b"\x03png", model="digits", top_k=2)
    (classification,) = result.classifications
    assert [category.index for category in classification.categories] == [3, 4]
    assert classification.top.label == "class 3"
    assert (result.model, result.version, result.mode) == ("digits", "1", "xla")
    assert result.timings is not None
    assert result.timings.total_s == 0.5


def test_a_path_is_read_and_sent(client: VisionClient, puppet: Puppet, tmp_path: Path) -> None:
    path = tmp_path / "three.png"
    path.write_bytes(b"\x03png")
    for argument in (path, str(path)):
        assert client.classify(argument, model="digits").classifications[0].top.index == 3
    assert puppet.seen[0].images == [b"\x03png"]


def test_a_list_keeps_its_order(client: VisionClient, tmp_path: Path) -> None:
    path = tmp_path / "two.png"
    path.write_bytes(b"\x02")
    result = client.classify([b"\x01", path, b"\x03"], model="digits", mode="graph")
    assert [item.top.index for item in result.classifications] == [1, 2, 3]
    assert result.mode == "graph"


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_pixels_are_classified(client: VisionClient, puppet: Puppet, dtype: type[np.uint8 | np.float32]) -> None:
    pixels = np.full((2, 8, 9, 3), 2.25, np.float32).astype(dtype)
    result = client.classify(pixels, model="digits", top_k=3, mode="xla")
    assert [item.top.index for item in result.classifications] == [2, 2]
    sent = puppet.seen[0].pixels
    assert (sent.images, sent.height, sent.width, sent.rgb) == (2, 8, 9, b"\2" * (2 * 8 * 9 * 3))


@pytest.mark.parametrize("level", [-1.0, 255.5, np.nan])
def test_pixels_that_are_no_levels_are_not_sent(client: VisionClient, puppet: Puppet, level: float) -> None:
    with pytest.raises(ValueError, match="expected values from 0 to 255"):
        client.detect(np.full((1, 8, 8, 3), level, np.float32), model="shapes")
    assert not puppet.seen


def test_fractions_are_not_sent_as_black_images(client: VisionClient, puppet: Puppet) -> None:
    with pytest.raises(ValueError, match="multiply them by 255"):
        client.detect(np.linspace(0, 1, 192, dtype=np.float32).reshape(1, 8, 8, 3), model="shapes")
    assert not puppet.seen


def test_objects_come_with_their_boxes(client: VisionClient, puppet: Puppet) -> None:
    result = client.detect([b"\x02", b"\x00"], model="shapes", min_score=0.25, max_detections=7, mode="graph")
    first, second = result.results
    assert first.detections == (Detection(2, "class 2", 0.5, Box(1, 2, 4, 8)),)
    assert (first.height, first.width, second.detections) == (10, 20, ())
    assert result.timings is not None
    assert (result.model, result.mode, result.timings.total_s) == ("shapes", "graph", 0.5)
    assert (puppet.seen[0].min_score, puppet.seen[0].max_detections) == (0.25, 7)
    client.detect(b"\x02", model="shapes")
    assert (puppet.seen[1].min_score, puppet.seen[1].max_detections) == (0.0, 0)


def test_a_class_map_is_an_array_of_the_originals_size(client: VisionClient) -> None:
    (class_map,) = client.segment(b"\x02", model="shapes").maps
    assert class_map.classes.dtype == np.uint8
    assert class_map.classes.tolist() == [[0, 0, 0], [2, 2, 2]]
    assert class_map.counts() == {0: 3, 2: 3}
    assert (class_map.label(2), class_map.label(9)) == ("dog", "9")


def test_a_class_map_of_many_classes_has_wider_elements(client: VisionClient, puppet: Puppet) -> None:
    puppet.runs = [300, 4, 7, 2]
    (class_map,) = client.segment(b"\x02", model="shapes").maps
    assert class_map.classes.dtype == np.uint16
    assert class_map.classes.tolist() == [[300, 300, 300], [300, 7, 7]]


@pytest.mark.parametrize("runs", [[0, 5], [0, 7], [0, 3, 1], [0, 2**32 - 1, 1, 7]])
def test_run_lengths_that_do_not_fill_the_image_are_no_answer(
    client: VisionClient, puppet: Puppet, runs: list[int]
) -> None:
    puppet.runs = runs
    with pytest.raises(InvalidReply, match="expected run lengths of 2 x 3 pixels"):
        client.segment(b"\x02", model="shapes")


def test_an_embedding_is_an_array_with_a_row_for_each_image(client: VisionClient) -> None:
    result = client.embed([b"\x01", b"\x02"], model="features")
    assert result.vectors.dtype == np.float32
    np.testing.assert_array_equal(result.vectors, [[0.5] * 5 + [1], [0.5] * 5 + [2]])


def test_a_transcription_is_the_text_and_its_classes(client: VisionClient) -> None:
    one, two = client.transcribe([b"\x01", b"\x02"], model="plates").transcriptions
    assert one == Transcription("class 1", 0.5, (Category(1, "class 1", 0.75),))
    assert two.text == "class 2"


def test_keypoints_have_places_and_perhaps_scores(client: VisionClient, puppet: Puppet) -> None:
    (found,) = client.locate(b"\x01", model="faces", min_score=0.25).results
    assert found == Keypoints((Keypoint(1, "class 1", 0.5, 1, 2), Keypoint(9, "9", None, -1, 4)), 10, 20)
    assert puppet.seen[-1].min_score == 0.25


@pytest.mark.parametrize("verb", ["classify", "detect", "segment", "embed", "transcribe", "locate"])
def test_every_kind_of_inference_is_retried(client: VisionClient, puppet: Puppet, verb: str) -> None:
    puppet.failures = [UNAVAILABLE]
    getattr(client, verb)(b"\x01", model="m")
    assert len(puppet.seen) == 2


def test_one_image_without_a_batch_dimension_is_a_batch_of_one(client: VisionClient, puppet: Puppet) -> None:
    result = client.infer(np.ones((8, 8, 3), np.uint8), model="digits")
    assert puppet.seen[0].inputs[0].shape == [1, 8, 8, 3]
    np.testing.assert_array_equal(result.scores, [[0, 1, 0, 0]])


def test_a_strided_array_is_sent_in_row_major_order(client: VisionClient) -> None:
    pixels = np.zeros((8, 8, 3, 2), np.uint8)
    pixels[..., 1] = 3
    np.testing.assert_array_equal(client.infer(np.moveaxis(pixels, 3, 0), model="m").scores.argmax(axis=1), [0, 3])


def test_infer_takes_encoded_images_and_gives_timings_and_mode(client: VisionClient, puppet: Puppet) -> None:
    result = client.infer([b"\x02", b"\x02"], model="digits", mode="eager")
    assert puppet.seen[0].inputs[0].datatype == "BYTES"
    assert result.scores.argmax(axis=1).tolist() == [2, 2]
    assert result.mode == "eager"
    assert result.timings is not None
    assert result.timings.execute_s == 0.25


def test_models_are_listed_with_their_state(client: VisionClient) -> None:
    digits, broken = client.models()
    assert (digits.name, digits.state, digits.modes) == ("digits", "ready", ("xla", "graph"))
    assert digits.programs[0].bucket == digits.buckets[0]
    assert (broken.state, broken.reason) == ("failed", "no such file")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, ModelNotFound),
        (grpc.StatusCode.FAILED_PRECONDITION, ModelFailed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.INTERNAL, ServerError),
    ],
)
def test_a_status_becomes_an_error_that_carries_it(
    client: VisionClient, puppet: Puppet, status: grpc.StatusCode, error: type[ServerError]
) -> None:
    puppet.failures = [(status, "because")]
    with pytest.raises(error, match=f"{puppet.target}: {status.name}: because") as caught:
        client.classify(b"x", model="digits")
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.message) == (status, "because")
    assert len(puppet.seen) == 1


@pytest.mark.parametrize("size_bytes", [10, 1_000_000])
def test_inference_is_retried_when_the_server_is_unavailable(
    client: VisionClient, puppet: Puppet, size_bytes: int
) -> None:
    puppet.failures = [UNAVAILABLE, UNAVAILABLE]
    assert client.classify(b"\x01" * size_bytes, model="digits").classifications[0].top.index == 1
    assert len(puppet.seen) == 3


def test_retries_are_bounded(client: VisionClient, puppet: Puppet) -> None:
    puppet.failures = [UNAVAILABLE] * 10
    with pytest.raises(Unavailable, match="draining"):
        client.infer(b"\x01", model="digits")
    assert len(puppet.seen) == 5


def test_retries_stay_within_the_deadline(client: VisionClient, puppet: Puppet) -> None:
    puppet.failures = [UNAVAILABLE] * 10
    before = time.monotonic()
    with pytest.raises(ServerError):
        client.infer(b"\x01", model="digits", deadline_s=0.2)
    assert time.monotonic() - before < 1
    assert len(puppet.seen) < 5


def test_overload_is_retried_only_when_asked_for(client: VisionClient, puppet: Puppet) -> None:
    puppet.failures = [EXHAUSTED]
    with pytest.raises(Overloaded):
        client.classify(b"\x01", model="digits")
    puppet.failures = [EXHAUSTED]
    with VisionClient(puppet.target, retry_overload=True) as patient:
        assert patient.classify(b"\x01", model="digits").classifications[0].top.index == 1


def test_a_server_that_says_when_to_come_again_is_obeyed(puppet: Puppet) -> None:
    waits_s = [0.2, 0.1, *[0.0] * MAX_ATTEMPTS]
    puppet.failures = [(*EXHAUSTED, wait_s) for wait_s in waits_s]
    with VisionClient(puppet.target, retry_overload=True, deadline_s=60) as patient:
        assert patient.classify(b"\x01", model="digits").classifications[0].top.index == 1
    gaps_s = [later - sooner for sooner, later in pairwise(puppet.seen_at)]
    assert [gap_s >= wait_s for gap_s, wait_s in zip(gaps_s, waits_s, strict=True)] == [True] * len(waits_s)


def test_nobody_waits_for_what_comes_after_the_deadline(puppet: Puppet) -> None:
    puppet.failures = [(*EXHAUSTED, 60.0)]
    with VisionClient(puppet.target, retry_overload=True, deadline_s=30) as patient:
        before = time.monotonic()
        with pytest.raises(Overloaded) as refused:
            patient.classify(b"\x01", model="digits")
    assert time.monotonic() - before < 20
    assert refused.value.retry_after_s == 60.0
    assert len(puppet.seen) == 1


def test_a_server_that_gives_no_retry_time_is_asked_a_few_times(puppet: Puppet) -> None:
    puppet.failures = [EXHAUSTED] * 10
    patient = VisionClient(puppet.target, retry_overload=True, deadline_s=60)
    with patient, pytest.raises(Overloaded) as refused:
        patient.infer(b"\x01", model="digits")
    assert refused.value.retry_after_s is None
    assert len(puppet.seen) == MAX_ATTEMPTS


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_loading_and_unloading_are_not_retried_when_there_is_no_room(puppet: Puppet, verb: str) -> None:
    puppet.failures = [(*EXHAUSTED, 0.0)]
    with VisionClient(puppet.target, retry_overload=True) as patient, pytest.raises(Overloaded):
        getattr(patient, verb)("digits")


@pytest.mark.parametrize("details", [b"", b"\xff\xff", b"\x1a\x04\x0a\x02\xff\xff"])
def test_details_that_are_none_say_nothing(client: VisionClient, puppet: Puppet, details: bytes) -> None:
    puppet.details = details
    puppet.failures = [EXHAUSTED]
    with pytest.raises(Overloaded) as refused:
        client.classify(b"\x01", model="digits")
    assert refused.value.retry_after_s is None


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_loading_and_unloading_are_never_retried(client: VisionClient, puppet: Puppet, verb: str) -> None:
    puppet.failures = [UNAVAILABLE]
    with pytest.raises(Unavailable):
        getattr(client, verb)("digits")
    assert len(puppet.seen) == 1
    getattr(client, verb)("digits")
    assert puppet.seen[1].model_name == "digits"


def test_a_server_that_never_answers_runs_into_the_deadline(client: VisionClient, puppet: Puppet) -> None:
    puppet.hold = threading.Event()
    with pytest.raises(DeadlineExceeded):
        client.classify(b"\x01", model="digits", deadline_s=0.1)


def test_inference_has_the_client_s_priority(puppet: Puppet) -> None:
    with VisionClient(puppet.target, priority=3) as client:
        for name in ("classify", "detect", "segment", "embed", "transcribe", "locate"):
            ask = getattr(client, name)
            ask(b"\x01", model="digits")
            assert puppet.seen[-1].priority == 3
        client.infer(b"\x01", model="digits")
        assert puppet.seen[-1].parameters["priority"].int64_param == 3
        client.models()
        client.load("digits")
    with VisionClient(puppet.target) as client:
        client.infer(b"\x01", model="digits")
        assert "priority" not in puppet.seen[-1].parameters
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"^priority: expected .*, got {wrong}$"):
            VisionClient(puppet.target, priority=wrong)


@pytest.mark.parametrize("deadline_s", [0, -1, float("inf"), float("nan")])
def test_a_deadline_is_finite_and_positive(client: VisionClient, puppet: Puppet, deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        VisionClient(puppet.target, deadline_s=deadline_s)
    with pytest.raises(ValueError, match="deadline_s"):
        client.models(deadline_s=deadline_s)


def test_readiness_of_server_and_model(client: VisionClient, puppet: Puppet) -> None:
    puppet.ready_after = 1
    assert client.ready() is False
    assert client.ready() is True
    assert client.ready("digits") is True
    assert client.ready("other") is False


def test_an_unreachable_server_is_not_ready(closed_port: str) -> None:
    with VisionClient(closed_port) as client:
        assert client.ready() is False


def test_waiting_ends_when_the_server_is_ready(client: VisionClient, puppet: Puppet) -> None:
    puppet.ready_after = 2
    puppet.failures = [UNAVAILABLE]
    client.wait_until_ready(10)
    assert len(puppet.seen) == 4


def test_waiting_in_vain_ends_at_the_timeout(closed_port: str) -> None:
    with VisionClient(closed_port) as client, pytest.raises(DeadlineExceeded, match=r"not ready after 0\.3 s"):
        client.wait_until_ready(0.3)


def test_nothing_is_sent_when_the_arguments_are_wrong(client: VisionClient, puppet: Puppet, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.classify(tmp_path / "missing.png", model="digits")
    with pytest.raises(ValueError, match="top_k"):
        client.classify(b"x", model="digits", top_k=0)
    with pytest.raises(ValueError, match="max_detections"):
        client.detect(b"x", model="shapes", max_detections=0)
    with pytest.raises(ValueError, match="at least one"):
        client.classify([], model="digits")
    with pytest.raises(ValueError, match=r"\(8,\)"):
        client.infer(np.zeros(8, np.uint8), model="digits")
    with pytest.raises(TypeError, match="float64"):
        client.infer(np.zeros((8, 8, 3)), model="digits")
    with pytest.raises(TypeError, match="int"):
        client.infer([1], model="digits")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="int"):
        client.infer(1, model="digits")  # type: ignore[arg-type]
    assert puppet.seen == []


def test_the_port_of_http_is_named() -> None:
    is_over = threading.Event()

    def answer(listener: socket.socket) -> None:
        while not is_over.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1024)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            with VisionClient(target, deadline_s=20) as client, pytest.raises(Unavailable) as raised:
                client.models()
        finally:
            is_over.set()
            thread.join()
    assert "this port speaks HTTP/1" in raised.value.message
    assert "grpc_port" in raised.value.message
