from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xlaserve_loadtest.schedule import payload
from xlaserve_loadtest.schedule.mix import DISTINCT_REQUESTS, MIXED_REQUESTS, Kind
from xlaserve_loadtest.schedule.payload import Form, ImageMaker, PayloadError, Picture, Request
from xlaserve_proto import open_inference_pb2 as oip

SIZE = (24, 32)


@pytest.fixture
def pictures() -> list[Picture]:
    return payload.synthetic(DISTINCT_REQUESTS, size=SIZE, seed=1)


def made(
    *kinds: Kind, form: Form = "pixels", modes: Sequence[str] = ("xla",), folder: Path | None = None
) -> dict[str, tuple[Request, ...]]:
    makers = [ImageMaker(name, form, folder=folder, size=SIZE, seed=1) for name in ("m", "n")]
    return payload.for_modes(payload.make_bodies(kinds, makers), modes)


def decoded(request: Request) -> oip.ModelInferRequest:
    return oip.ModelInferRequest.FromString(request.data)


def elements(raw: bytes) -> Iterator[bytes]:
    while raw:
        length = int.from_bytes(raw[:4], "little")
        yield raw[4 : 4 + length]
        raw = raw[4 + length :]


def test_images_are_the_same_for_the_same_seed(pictures: list[Picture]) -> None:
    again, other = (payload.synthetic(len(pictures), size=SIZE, seed=seed) for seed in (1, 2))
    for picture, same, different in zip(pictures, again, other, strict=True):
        assert picture.encoded == same.encoded
        assert (picture.pixels != different.pixels).any()
        assert picture.pixels.shape == (24, 32, 3)
        assert picture.pixels.dtype == np.uint8
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture.encoded))), picture.pixels)


@pytest.mark.parametrize("per_request", [1, 3, 18])
@pytest.mark.parametrize("form", payload.FORMS)
def test_requests_take_turns_in_the_images(pictures: list[Picture], form: Form, per_request: int) -> None:
    (sent,) = made(*[Kind(images=per_request)] * 20, form=form).values()
    assert len(sent) == 20
    for start, request in enumerate(sent):
        expected = [pictures[(start + offset) % len(pictures)] for offset in range(per_request)]
        message = decoded(request)
        assert request.images == per_request
        (tensor,) = message.inputs
        (raw,) = message.raw_input_contents
        if form == "pixels":
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("pixels", "UINT8", [per_request, *SIZE, 3])
            got = np.frombuffer(raw, np.uint8).reshape(per_request, *SIZE, 3)
            np.testing.assert_array_equal(got, np.stack([picture.pixels for picture in expected]))
        else:
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", "BYTES", [per_request])
            assert list(elements(raw)) == [picture.encoded for picture in expected]


def test_modes_differ_in_nothing_but_the_mode() -> None:
    requests = made(*[Kind(images=2)] * 3, modes=("xla", "graph"))
    for xla, graph in zip(requests["xla"], requests["graph"], strict=True):
        first, second = decoded(xla), decoded(graph)
        assert (first.parameters["mode"].string_param, xla.mode) == ("xla", "xla")
        assert (second.parameters["mode"].string_param, graph.mode) == ("graph", "graph")
        first.parameters["mode"].string_param = "graph"
        assert first == second


def test_each_request_is_of_its_kind() -> None:
    kinds = [Kind(), Kind(1, 3, (8, 8)), Kind(1), Kind(0, 2, (8, 8))]
    (sent,) = made(*kinds).values()
    messages = [decoded(request) for request in sent]
    assert [message.model_name for message in messages] == ["m", "n", "n", "m"]
    assert [request.model for request in sent] == [0, 1, 1, 0]
    assert [[*message.inputs[0].shape] for message in messages] == [
        [1, *SIZE, 3],
        [3, 8, 8, 3],
        [1, *SIZE, 3],
        [2, 8, 8, 3],
    ]


def test_what_is_sent_often_is_held_once() -> None:
    kinds = [Kind(images=count, size=size) for count in (1, 2) for size in ((8, 8), (4, 4), None)] * 100
    (sent,) = made(*kinds).values()
    assert len(sent) == 600
    assert 6 < len({id(request) for request in sent}) <= MIXED_REQUESTS


def test_the_images_of_a_folder_are_sent_as_they_are_or_fitted(tmp_path: Path) -> None:
    for name, size in (("b.jpg", (40, 30)), ("a.png", (10, 20)), ("c.webp", (5, 5))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    as_they_are = payload.from_folder(tmp_path, size=None)
    assert [picture.encoded for picture in as_they_are] == [
        (tmp_path / name).read_bytes() for name in ("a.png", "b.jpg", "c.webp")
    ]
    fitted = payload.from_folder(tmp_path, size=(16, 24))
    assert {picture.pixels.shape for picture in fitted} == {(16, 24, 3)}
    assert [picture.encoded for picture in fitted] == [picture.encoded for picture in as_they_are]


def test_a_folder_without_images_and_a_broken_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="holds no file"):
        payload.from_folder(tmp_path, size=None)
    (tmp_path / "broken.png").write_bytes(b"not a png")
    with pytest.raises(PayloadError, match=r"broken\.png"):
        payload.from_folder(tmp_path, size=None)


def test_a_mode_that_is_empty_is_not_sent() -> None:
    (request,) = made(Kind(), modes=("",))[""]
    assert not decoded(request).parameters


def test_a_large_folder_is_sampled_by_the_seed(tmp_path: Path) -> None:
    for number in range(payload.MAX_FILES + 20):
        Image.new("RGB", (2, 2), (number % 256, number // 256, 0)).save(tmp_path / f"{number:04}.png")
    one, again, other = (payload.from_folder(tmp_path, size=None, seed=seed) for seed in (0, 0, 1))
    assert len(one) == payload.MAX_FILES == len({picture.encoded for picture in one})
    assert [picture.encoded for picture in one] == [picture.encoded for picture in again]
    assert [picture.encoded for picture in one] != [picture.encoded for picture in other]
