from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xlaserve_loadtest.schedule import payload
from xlaserve_loadtest.schedule.payload import Kind, Mix, PayloadError, Picture, Request
from xlaserve_proto import open_inference_pb2 as oip


@pytest.fixture
def pictures() -> list[Picture]:
    return payload.synthetic(4, size=(24, 32), seed=1)


def made(
    groups: Sequence[Sequence[Picture]], *, kind: Kind = "pixels", mix: str = "1", modes: Sequence[str] = ("xla",)
) -> dict[str, tuple[Request, ...]]:
    return payload.for_modes(payload.make_bodies(groups, model="m", kind=kind, mix=Mix.parse(mix), seed=0), modes)


def decoded(request: Request) -> oip.ModelInferRequest:
    return oip.ModelInferRequest.FromString(request.data)


def elements(raw: bytes) -> Iterator[bytes]:
    while raw:
        length = int.from_bytes(raw[:4], "little")
        yield raw[4 : 4 + length]
        raw = raw[4 + length :]


def test_images_are_the_same_for_the_same_seed(pictures: list[Picture]) -> None:
    again, other = (payload.synthetic(4, size=(24, 32), seed=seed) for seed in (1, 2))
    for picture, same, different in zip(pictures, again, other, strict=True):
        assert picture.encoded == same.encoded
        assert (picture.pixels != different.pixels).any()
        assert picture.pixels.shape == (24, 32, 3)
        assert picture.pixels.dtype == np.uint8
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(picture.encoded))), picture.pixels)


@pytest.mark.parametrize("per_request", [1, 3, 6])
@pytest.mark.parametrize("kind", payload.KINDS)
def test_requests_take_turns_in_the_images(pictures: list[Picture], kind: Kind, per_request: int) -> None:
    (sent,) = made([pictures], kind=kind, mix=str(per_request)).values()
    assert len(sent) == payload.DISTINCT_REQUESTS
    for start, request in enumerate(sent):
        expected = [pictures[(start + offset) % 4] for offset in range(per_request)]
        message = decoded(request)
        assert request.images == per_request
        (tensor,) = message.inputs
        (raw,) = message.raw_input_contents
        if kind == "pixels":
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("pixels", "UINT8", [per_request, 24, 32, 3])
            got = np.frombuffer(raw, np.uint8).reshape(per_request, 24, 32, 3)
            np.testing.assert_array_equal(got, np.stack([picture.pixels for picture in expected]))
        else:
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", "BYTES", [per_request])
            assert list(elements(raw)) == [picture.encoded for picture in expected]


def test_modes_differ_in_nothing_but_the_mode(pictures: list[Picture]) -> None:
    requests = made([pictures], mix="2", modes=("xla", "graph"))
    for xla, graph in zip(requests["xla"], requests["graph"], strict=True):
        first, second = decoded(xla), decoded(graph)
        assert (first.parameters["mode"].string_param, xla.mode) == ("xla", "xla")
        assert (second.parameters["mode"].string_param, graph.mode) == ("graph", "graph")
        first.parameters["mode"].string_param = "graph"
        assert first == second


def test_a_mix_of_counts_is_kept_to_the_share(pictures: list[Picture]) -> None:
    (sent,) = made([pictures], mix="1:0.7,8:0.3").values()
    counts = [request.images for request in sent]
    assert (counts.count(1), counts.count(8)) == (28, 12)
    assert counts != sorted(counts)
    assert [len(decoded(request).inputs[0].shape) for request in sent] == [4] * 40


def test_several_resolutions_take_turns(pictures: list[Picture]) -> None:
    small = payload.synthetic(4, size=(8, 8), seed=1)
    (sent,) = made([pictures, small]).values()
    sizes = [tuple(decoded(request).inputs[0].shape[1:3]) for request in sent]
    assert sizes == [(24, 32), (8, 8)] * 20


@pytest.mark.parametrize(("text", "shown"), [("8", "8"), ("1:0.7,8:0.3", "1:0.7,8:0.3"), ("1:3, 2:1", "1:0.75,2:0.25")])
def test_a_mix_is_read(text: str, shown: str) -> None:
    assert str(Mix.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "0", "1:", "1:0", "x", "1,1", "-1", "1:0.5,2:0"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Mix.parse(text)


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


def test_a_mode_that_is_empty_is_not_sent(pictures: list[Picture]) -> None:
    (request, *_) = made([pictures], modes=("",))[""]
    assert not decoded(request).parameters


def test_a_large_folder_is_sampled_by_the_seed(tmp_path: Path) -> None:
    for number in range(payload.MAX_FILES + 20):
        Image.new("RGB", (2, 2), (number % 256, number // 256, 0)).save(tmp_path / f"{number:04}.png")
    one, again, other = (payload.from_folder(tmp_path, size=None, seed=seed) for seed in (0, 0, 1))
    assert len(one) == payload.MAX_FILES == len({picture.encoded for picture in one})
    assert [picture.encoded for picture in one] == [picture.encoded for picture in again]
    assert [picture.encoded for picture in one] != [picture.encoded for picture in other]
