from __future__ import annotations

import io
import math
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


@pytest.mark.parametrize("form", payload.FORMS)
def test_a_stamped_request_is_unlike_any_other_and_holds_the_same_images(form: Form) -> None:
    makers = [ImageMaker("m", form, folder=None, size=SIZE, seed=1, has_stamp=True)]
    ((request,),) = payload.for_modes(payload.make_bodies([Kind(images=2)], makers), ["xla"]).values()
    stamped = [request.stamped(number) for number in (1, 2, 2**64 - 1)]
    assert len({one.data for one in (request, *stamped)}) == 4
    for one in stamped:
        assert (one.images, one.mode, len(one.data)) == (2, "xla", len(request.data))
        own, plain = decoded(one), decoded(request)
        assert own.parameters["mode"].string_param == "xla"
        assert own.inputs == plain.inputs
        (raw,), (before,) = own.raw_input_contents, plain.raw_input_contents
        assert raw[: -payload.STAMP_BYTES] == before[: -payload.STAMP_BYTES]
        if form == "encoded":
            for image, expected in zip(
                elements(raw), payload.synthetic(DISTINCT_REQUESTS, size=SIZE, seed=1), strict=False
            ):
                np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image))), expected.pixels)


def test_images_that_are_smaller_than_a_stamp_are_refused() -> None:
    makers = [ImageMaker("m", "pixels", folder=None, size=(1, 2), seed=1, has_stamp=True)]
    with pytest.raises(PayloadError, match="--distinct: expected images of 8 bytes"):
        payload.make_bodies([Kind()], makers)


@pytest.mark.parametrize("suffix", ["JPEG", "WEBP"])
def test_a_stamp_behind_a_file_is_not_part_of_its_image(pictures: list[Picture], suffix: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(pictures[0].pixels).save(buffer, suffix)
    plain, stamped = (
        np.asarray(Image.open(io.BytesIO(buffer.getvalue() + after))) for after in (b"", b"\xff\xd8\xff\xd9\0\0\0\1")
    )
    np.testing.assert_array_equal(plain, stamped)


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


def test_a_request_of_a_file_holds_it_as_often_as_it_has_images(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (10, 20), "red").save(path)
    own, other = Kind(images=3, file=str(path)), Kind()
    sent, synthetic, again = (decoded(request) for request in made(own, other, own, form="encoded")["xla"])
    assert [*elements(sent.raw_input_contents[0])] == [path.read_bytes()] * 3
    assert sent == again
    assert path.read_bytes() not in synthetic.raw_input_contents[0]
    fitted, sized = (decoded(one) for one in made(own, Kind(size=(4, 6), file=str(path)))["xla"])
    assert ([*fitted.inputs[0].shape], [*sized.inputs[0].shape]) == ([3, *SIZE, 3], [1, 4, 6, 3])
    assert {*sized.raw_input_contents[0][::3]} == {255}


def png_file(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a png", "expected JPEG, PNG or WebP, got another file or one that is damaged"),
        (b"", "expected JPEG, PNG or WebP, got an empty file"),
        (png_file(40, 40)[:-30], ""),
        (png_file(40, 40).replace(b"IDAT", b"I\0AT"), ""),
        (png_file(1, 1).replace(b"\0\0\0\1\0\0\0\1", b"\0\1\0\0\0\1\0\0"), ""),
    ],
    ids=["text", "empty", "cut off", "damaged", "too large"],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_broken_image_is_named_by_its_file_and_by_nothing_inside(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(content)
    with pytest.raises(PayloadError) as refusal:
        payload.from_folder(tmp_path, size=None)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path / 'cat.png'}: ")
    assert len(message) > len(f"{tmp_path / 'cat.png'}: ")
    assert reason in message
    assert "object at" not in message


@pytest.mark.parametrize("form", payload.FORMS)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"not an image")
    with pytest.raises(PayloadError, match=r"a\.png: cannot identify"):
        made(Kind(file=str(path)), form=form)


def test_files_without_a_size_are_sent_in_their_own(tmp_path: Path) -> None:
    Image.new("RGB", (10, 20), "red").save(tmp_path / "a.png")
    maker = ImageMaker("m", "pixels", folder=None, size=None, seed=1)
    (body,) = payload.make_bodies([Kind(file=str(tmp_path / "a.png"))], [maker])
    assert [*oip.ModelInferRequest.FromString(body.data).inputs[0].shape] == [1, 20, 10, 3]


def test_memory_is_checked_before_images_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "synthetic", lambda *_, **__: pytest.fail("was made"))
    with pytest.raises(PayloadError, match="a request would have"):
        made(Kind(size=(50_000, 50_000)))


@pytest.mark.parametrize(
    ("declared", "sent"),
    [
        ((-1, 20, 24, 1), (2, 20, 24, 1)),
        ((-1, 20, 24), (2, 20, 24)),
        ((-1, 3, 20, 24), (2, 3, 20, 24)),
        ((-1, 20, 24, 4), (2, 20, 24, 4)),
    ],
)
@pytest.mark.parametrize("form", payload.FORMS)
def test_images_are_sent_as_the_model_declares_them(
    declared: tuple[int, ...], sent: tuple[int, ...], form: Form
) -> None:
    layout = payload.Layout.of(declared)
    assert layout is not None
    maker = ImageMaker("m", form, folder=None, size=(20, 24), seed=1, layout=layout)
    message = oip.ModelInferRequest.FromString(maker.data(Kind(images=2), 0))
    if form == "pixels":
        assert tuple(message.inputs[0].shape) == sent
        assert len(message.raw_input_contents[0]) == math.prod(sent) == 2 * maker.item_bytes(Kind(images=2))
    else:
        (first, _) = elements(message.raw_input_contents[0])
        assert Image.open(io.BytesIO(first)).mode == {1: "L", 3: "RGB", 4: "RGBA"}[layout.channels]


@pytest.mark.parametrize("declared", [(-1, 20, 24, 5), (-1, 784), (-1, 2, 20, 24)])
def test_inputs_of_other_channels_are_no_images(declared: tuple[int, ...]) -> None:
    assert payload.Layout.of(declared) is None
