"""What clients may write into requests: each field of its type or refused, and never an error of another kind."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
import tracemalloc
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fakes import served_with

from xlaserve.errors import InvalidArgument, MessageTooLarge, QueueFull, RequestError
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Classification, Detection, Segmentation, Task
from xlaserve.pipeline.pipeline import Request
from xlaserve.pipeline.request_inputs import Pending
from xlaserve.wire.http import forms, json_numbers, json_tensors, serving_body, vision_methods
from xlaserve.wire.http.body import decompress, read_body
from xlaserve.wire.http.forms import MAX_OPTION_BYTES, MAX_OPTIONS, Form, read_form
from xlaserve.wire.http.http_calls import read_query
from xlaserve.wire.http.message import MAX_INLINE_BYTES, HttpRequest
from xlaserve.wire.shared import inference
from xlaserve.wire.shared.inference import check_parameters
from xlaserve.wire.shared.input_tensors import MAX_IMAGES, images_of

SIDE = 2
TASK = Classification(3)
LENGTH = "inference-header-content-length"
PNG = b"\x89PNG and so on"
LARGE_IMAGE = PNG * 20_000
IMAGE_TEXT = base64.b64encode(LARGE_IMAGE).decode()

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 300),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([10**400, -(10**400), 2**63, 1e308, "\ud800", "\0", "x" * 100_000, "9" * 5000, "nan", "inf"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ["name", "shape", "datatype", "data", "parameters", "binary_data_size", "binary_data", "b64", "timeout"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def http_request(body: bytes, query: str = "", **headers: str) -> HttpRequest:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest({"model": "m"}, read_query(query.encode("latin-1")), fields, memoryview(body))


def infer_body(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, SIDE, SIDE, 3], "data": [7] * 12}
    return {"inputs": [tensor], **changes}


def with_tensor(**changes: Any) -> dict[str, Any]:
    body = infer_body()
    body["inputs"][0].update(changes)
    return body


def parse(body: Any, binary: bytes = b"", task: Any = TASK, text: bytes | None = None) -> Request:
    """Parses an inference request as its method does; pixels that are left to a thread are read as well."""
    text = json.dumps(body).encode() if text is None else text
    request = http_request(text + binary, **({"inference_header_content_length": str(len(text))} if binary else {}))
    call: Any = SimpleNamespace(served=served_with(task, SIDE), deadline=9.0, began=1.0)
    size = json_tensors.json_bytes(request)
    sent = json_tensors.parse(asyncio.run(request.json(size)), request.body[size:])
    parsed, _ = inference.parse(sent, call, json_tensors.JsonListing())
    if isinstance(parsed.images, Pending):
        parsed.images.check()
    return parsed


def refused(body: Any, binary: bytes = b"", **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(body, binary, **more)
    assert len(str(caught.value)) < 500
    return str(caught.value)


def form_of(body: bytes, query: str = "", **headers: str) -> Form:
    return asyncio.run(read_form(http_request(body, query, **headers)))


def multipart(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    sent = [b"--B\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data for head, data in parts]
    return b"\r\n".join([*sent, end])


def read_parts(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> Form:
    return form_of(multipart(*parts, end=end), content_type="multipart/form-data; boundary=B")


@pytest.mark.parametrize("datatype", ["UINT8", "INT32", "FP32"])
@pytest.mark.parametrize("nested", [False, True])
def test_pixels_are_the_same_listed_flat_nested_and_in_binary(datatype: str, nested: bool) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, SIDE, SIDE, 3)
    data = pixels.tolist() if nested else pixels.reshape(-1).tolist()
    listed = parse(with_tensor(datatype=datatype, shape=list(pixels.shape), data=data))
    raw = pixels.astype({"UINT8": "u1", "INT32": "<i4", "FP32": "<f4"}[datatype]).tobytes()
    parameters = {"binary_data_size": len(raw)}
    tensor = {"name": "pixels", "datatype": datatype, "shape": [2, SIDE, SIDE, 3], "parameters": parameters}
    binary = parse({"inputs": [tensor]}, raw)
    for request in (listed, binary):
        np.testing.assert_array_equal(np.asarray(request.images), pixels)


def test_images_come_in_base64_and_in_binary() -> None:
    text = base64.b64encode(PNG).decode()
    for data in ([text, text], [[text], [text]], [{"b64": text}, text]):
        listed = parse(with_tensor(name="image", datatype="BYTES", shape=[2], data=data))
        assert [bytes(image) for image in as_encoded(listed)] == [PNG, PNG]
    raw = b"".join(struct.pack("<I", len(PNG)) + PNG for _ in range(2))
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2, 1], "parameters": {"binary_data_size": len(raw)}}
    assert [bytes(image) for image in as_encoded(parse({"inputs": [tensor]}, raw))] == [PNG, PNG]


def as_encoded(request: Request) -> list[Encoded]:
    assert isinstance(request.images, list)
    return request.images


def test_a_timeout_counts_from_when_the_call_began() -> None:
    assert parse(infer_body(parameters={"timeout": 2_000_000})).deadline == 3.0
    assert parse(infer_body()).deadline == 9.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "body: expected a JSON object"),
        ({}, "inputs: expected one tensor"),
        (infer_body(id=3), "body.id: expected a string, got 3"),
        (infer_body(id=["x"] * 1000), "body.id: expected a string, got a list"),
        (infer_body(parameters=3), "parameters: expected a JSON object, got 3"),
        (infer_body(parameters={"timeout": 0.5}), "parameters.timeout"),
        (infer_body(parameters={"timeout": True}), "parameters.timeout"),
        (infer_body(parameters={"binary_data_output": 1}), "parameters.binary_data_output"),
        (infer_body(parameters={"sequence_id": 7}), "sequences"),
        (infer_body(inputs={}), "inputs: expected a list"),
        (infer_body(inputs=[{}] * 10_000), "inputs: expected at most 64 JSON objects, got 10000"),
        (infer_body(inputs=[3]), "inputs[0]: expected a JSON object, got 3"),
        (infer_body(outputs=[{}]), "outputs.name: expected a string, got nothing"),
        (infer_body(outputs=[{"name": "nope"}]), "outputs: expected scores"),
        (infer_body(outputs=[{"name": "scores", "parameters": {"binary_data": 1}}]), "parameters.binary_data"),
        (with_tensor(name=None), "inputs.name"),
        (with_tensor(shape=[1, 2, 2, 3.0]), "shape: expected a list of integers of 64 bits, got 3.0 in it"),
        (with_tensor(shape=[1, 2, 2, True]), "got True in it"),
        (with_tensor(shape=[1, 2, 2, 10**30]), "shape"),
        (with_tensor(shape=[2**62, 2**62, 2**62, 3]), "data of pixels: expected"),
        (with_tensor(shape=[-1, 2, 2, 3]), "shape"),
        (with_tensor(data=None), "data, or binary_data_size"),
        (with_tensor(data=3), "data"),
        (with_tensor(data=[1, "2"] * 6), "numbers"),
        (with_tensor(data=[True] * 12), "numbers"),
        (with_tensor(data=[None] * 12), "numbers"),
        (with_tensor(data=[10**30] * 12), "numbers"),
        (with_tensor(data=[[1, 2], [3]]), "lists of several lengths"),
        (with_tensor(data=[[7] * 12]), "shape"),
        (with_tensor(data=[7] * 11), "11 values"),
        (with_tensor(data=[256] * 12), "255"),
        (with_tensor(data=[7.5] * 12), "integers"),
        (with_tensor(parameters={"binary_data_size": 0}), "both"),
        (with_tensor(name="image", datatype="BYTES", shape=[1], data=["&&&"]), "base64"),
        (with_tensor(name="image", datatype="BYTES", shape=[1], data=[3]), "base64"),
        (with_tensor(name="image", datatype="BYTES", shape=[1], data=[{}]), "base64"),
        (with_tensor(name="image", datatype="BYTES", shape=[1], data="abcd"), "list of images in base64, got 'abcd'"),
        (
            with_tensor(name="image", datatype="BYTES", shape=[1], data=[None]),
            "data of image[0]: expected an image in base64, got nothing",
        ),
        (with_tensor(data=[1, "2"] * 6), "got '2'"),
        (with_tensor(name="image", datatype="BYTES", shape=[2], data=["YWJj"]), "1 elements"),
    ],
)
def test_a_wrong_field_is_named(body: Any, said: str) -> None:
    assert said in refused(body)


@pytest.mark.parametrize("size", [-1, 13, 10**30, 1.0, "12", True, None, [12]])
def test_a_binary_size_is_a_number_of_bytes_that_came(size: Any) -> None:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2, 2, 3], "parameters": {"binary_data_size": size}}
    refused({"inputs": [tensor]}, bytes(12))


def test_nothing_may_stand_behind_what_binary_sizes_say() -> None:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2, 2, 3], "parameters": {"binary_data_size": 12}}
    assert "1 bytes more" in refused({"inputs": [tensor]}, bytes(13))


@pytest.mark.parametrize("length", ["-1", "3.5", "1e3", "99999", "", "x", "9" * 5000, "٣", "+3", " 3"])
def test_the_length_of_the_json_is_a_number_of_bytes_that_came(length: str) -> None:
    with pytest.raises(InvalidArgument, match=LENGTH):
        json_tensors.json_bytes(http_request(b'{"inputs": []}', inference_header_content_length=length))


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"\xff\xfe{",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"id": "\xff"}',
        b"9" * 5000,
        b'{"id": ' + b"9" * 5000 + b"}",
        b"nan",
        b"\0" * 100,
        b'"x"',
    ],
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    refused(None, text=text)


@given(st.dictionaries(st.sampled_from(["id", "parameters", "inputs", "outputs"]), VALUES), st.binary(max_size=20))
def test_any_json_is_parsed_or_refused(body: Any, binary: bytes) -> None:
    try:
        parse(body, binary)
    except RequestError as error:
        assert len(str(error)) < 800


@given(
    st.sampled_from(["name", "datatype", "shape", "data", "parameters"]),
    VALUES,
    st.sampled_from([with_tensor(), with_tensor(name="image", datatype="BYTES", shape=[1], data=["YWJj"])]),
)
@example("data", [[[[[1]]]]], with_tensor())
@example("data", [float("nan")] * 12, with_tensor(datatype="FP32"))
@example("data", [1e308] * 12, with_tensor(datatype="FP32"))
@example("data", [2**63, -1] * 6, with_tensor(datatype="INT32"))
def test_any_value_of_a_field_is_parsed_or_refused(key: str, value: Any, body: Any) -> None:
    body = {**body, "inputs": [{**body["inputs"][0], key: value}]}
    try:
        parse(body)
    except RequestError as error:
        assert len(str(error)) < 800


def test_outputs_are_bounded_before_they_are_read() -> None:
    refused(infer_body(outputs=[{"name": "scores"}] * 10_000))


# Forms.


def test_a_form_has_images_and_options() -> None:
    form = read_parts(
        ('name="image"; filename="a;b=\\"c.jpg"', PNG),
        ('name="top_k"', b"3"),
        ("name=images", PNG + b"2"),
        ('filename="; name=top_k"; name="image"', b""),
    )
    assert [bytes(image) for image in form.images] == [PNG, PNG + b"2", b""]
    assert form.count("top_k") == 3


def test_options_stand_in_the_query_too_and_the_body_overrules_it() -> None:
    form = form_of(PNG, "top_k=3&mode=xla&empty", content_type="image/png")
    assert (form.count("top_k"), form.text("mode"), [bytes(image) for image in form.images]) == (3, "xla", [PNG])
    body = json.dumps({"image": base64.b64encode(PNG).decode(), "top_k": 4}).encode()
    form = form_of(body, "top_k=3", content_type="application/json; charset=utf-8")
    assert (form.count("top_k"), [bytes(image) for image in form.images]) == (4, [PNG])


def test_json_is_told_by_its_first_byte_where_curl_calls_it_a_form() -> None:
    body = json.dumps({"image": base64.b64encode(PNG).decode()}).encode()
    form = form_of(body, "", content_type="application/x-www-form-urlencoded")
    assert [bytes(image) for image in form.images] == [PNG]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (multipart(("name=image", PNG)), "multipart/form-data"),
        (multipart(("name=image", PNG)), "multipart/form-data; boundary="),
        (multipart(("name=image", PNG)), "multipart/form-data; boundary*=utf-8''B"),
        (multipart(("name=image", PNG)), f"multipart/form-data; boundary={'B' * 1000}"),
        (multipart(("name=image", PNG), end=b""), "multipart/form-data; boundary=B"),
        (multipart(("name=image", PNG))[:-20], "multipart/form-data; boundary=B"),
        (multipart(("name=image", PNG)), "multipart/form-data; boundary=C"),
        (b"", "multipart/form-data; boundary=B"),
        (b"\r\n" * 1000, "multipart/form-data; boundary=B"),
        (b"--B\r\n" + b"x" * 100_000, "multipart/form-data; boundary=B"),
        (b"--B\r\n" + b"a: b\r\n" * 10_000, "multipart/form-data; boundary=B"),
        (b"--B\r\n: b\r\n\r\n--B--", "multipart/form-data; boundary=B"),
        (multipart(*[("name=image", b"")] * (MAX_IMAGES + 100)), "multipart/form-data; boundary=B"),
        (multipart(*[(f"name={number}", b"") for number in range(MAX_OPTIONS + 1)]), "multipart/form-data; boundary=B"),
        (multipart(("name=x", b"y" * (MAX_OPTION_BYTES + 1))), "multipart/form-data; boundary=B"),
        (multipart(("name=other; filename=a.jpg", PNG)), "multipart/form-data; boundary=B"),
        (b'{"image": 3}', "application/json"),
        (b'{"image": "YWJj", "images": "YWJj"}', "application/json"),
        (json.dumps({"images": ["YWJj"] * (MAX_IMAGES + 1)}).encode(), "application/json"),
    ],
)
def test_a_form_that_is_none_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(RequestError):
        form_of(body, content_type=content_type)


PIECES = st.sampled_from([b"\r\n--", b"\r\n", b"-", b"B", b"x", b"\r"])
IMAGES = st.lists(PIECES).map(b"".join).filter(lambda image: b"\r\n--B" not in b"\r\n" + image)


@given(st.lists(IMAGES, min_size=1), st.integers(1, 40))
def test_images_are_whole_wherever_the_form_is_cut(images: list[bytes], step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "_STEP_BYTES", step)
        form = read_parts(*(("name=image", image) for image in images))
    assert [bytes(image) for image in form.images] == images


def test_a_form_within_a_form_is_an_image() -> None:
    inner = multipart(("name=image", PNG)).replace(b"--B", b"--C")
    assert [bytes(image) for image in read_parts(('name="image"', inner)).images] == [inner]


def test_what_is_no_form_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for body in (b"--B\r\nxx", b"no", b"--B\r\n\xff: a\r\n\r\n"):
        with pytest.raises(RequestError):
            form_of(body, content_type="multipart/form-data; boundary=B")
    assert not caplog.records


RENDERINGS: dict[str, tuple[Task, Any]] = {
    "classify": (Classification(3), vision_methods._likeliest),
    "detect": (Detection(3, max_detections=3), vision_methods._objects),
    "segment": (Segmentation(3), lambda served, form: vision_methods._class_maps(served, form, 1000)),
}


@given(
    st.sampled_from(sorted(RENDERINGS)),
    st.dictionaries(
        st.sampled_from(["top_k", "min_score", "max_detections", "pixel_counts", "mode", "timeout_s", "image"]), VALUES
    ),
)
@example("classify", {"top_k": 10**400})
@example("detect", {"min_score": 10**400})
@example("classify", {"timeout_s": "1e999"})
def test_any_options_are_read_or_refused(method: str, options: Mapping[str, Any]) -> None:
    task, rendering = RENDERINGS[method]
    try:
        form = form_of(json.dumps(options).encode(), content_type="application/json")
        rendering(served_with(task), form)
        form.text("mode")
        assert form.timeout_s() > 0
    except RequestError as error:
        assert len(str(error)) < 800


@given(st.binary(max_size=200), st.text(max_size=30), st.text(max_size=30))
def test_any_bytes_are_a_form_or_refused(body: bytes, boundary: str, disposition: str) -> None:
    types = [
        f"multipart/form-data; boundary={boundary}",
        "multipart/form-data; boundary=B",
        "application/json",
        boundary,
    ]
    for content_type in types:
        for sent in (body, b"--B\r\n" + body, multipart((disposition, body))):
            try:
                form_of(sent, content_type=content_type.encode("latin-1", "replace").decode("latin-1"))
            except RequestError as error:
                assert len(str(error)) < 800


@pytest.mark.parametrize("value", [-1, 1.5, "x", None, [], True, 2**31, "", "-1"])
def test_a_count_that_is_none_is_refused_with_its_bounds(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^top_k: expected an integer from 0 to 2147483647, got "):
        form_of(json.dumps({"top_k": value}).encode(), content_type="application/json").count("top_k")


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (None, "image: expected an image in base64, got nothing"),
        ({}, "image: expected an image in base64, got an empty object"),
        (3, "image: expected an image in base64, got 3"),
        ([None], r"image\[0\]: expected an image in base64, got nothing"),
        ("https://example.org/a.png", "image: expected base64, .*got an address, and the server fetches none"),
    ],
)
def test_what_came_in_place_of_an_image_is_said(image: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        form_of(json.dumps({"image": image}).encode(), content_type="application/json")


def test_a_query_is_bounded() -> None:
    assert read_query(b"a=%ff&b=\xff&c&=") == {"a": "\ufffd", "b": "\xff", "c": "", "": ""}
    with pytest.raises(InvalidArgument, match="query"):
        read_query(b"&".join([b"a=1"] * 1000))


# What would take long or much memory, if it were read as it comes.


def test_strings_among_pixels_take_no_memory() -> None:
    """NumPy would make all of them as long as the longest: 1.3 GB."""
    data = [" " * 30_000, *[""] * 10_000]
    for refuse in (
        lambda: refused(with_tensor(data=data)),
        lambda: serving_body.parse({"inputs": {"pixels": data}}),
        lambda: serving_body.parse({"instances": [[0, *data], [1]]}),
    ):
        tracemalloc.start()
        try:
            with suppress(InvalidArgument):
                refuse()
            assert tracemalloc.get_traced_memory()[1] < 2_000_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [{"b64": IMAGE_TEXT, "x": 1}]},
        {"instances": [{"image": {"b64": IMAGE_TEXT}}, {"pixels": IMAGE_TEXT}]},
        {"instances": [IMAGE_TEXT]},
        {"instances": [{"image": [{"b64": IMAGE_TEXT}, {"b64": IMAGE_TEXT}]}]},
        {"inputs": {"image": IMAGE_TEXT}},
        {"inputs": {"pixels": [IMAGE_TEXT] * 2}},
    ],
)
def test_a_large_image_in_the_wrong_place_is_not_written_into_the_refusal(body: Any) -> None:
    value = json_numbers.loads(json.dumps(body).encode())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument) as caught:
            images_of(serving_body.parse(value).inputs)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["timeout", "mode", "pixel_range", "priority", "sequence_id"])
def test_a_large_image_as_a_parameter_is_not_written_into_the_refusal(key: str) -> None:
    body = asyncio.run(http_request(json.dumps(infer_body(parameters={key: IMAGE_TEXT})).encode()).json())
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            check_parameters(body["parameters"].items())
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300


def test_a_content_type_is_bounded() -> None:
    """`email` counts all quotes again at each semicolon: of 64 KiB that takes a second."""
    content_type = 'multipart/form-data; a="' + ";" * 60_000
    with pytest.raises(InvalidArgument, match="content-type: expected at most 512 characters"):
        form_of(b"", content_type=content_type)


@pytest.mark.parametrize("padding_bytes", [0, MAX_INLINE_BYTES])
@pytest.mark.parametrize(
    "text",
    [
        b'{"id": "a", "id": "b"}',
        b'{"a": [{"parameters": {"mode": "xla", "mode": "eager"}}]}',
        b'{"\\u0069d": "a", "id": "b"}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": "\xff"}',
        "\ufeff{}".encode(),
        "{}".encode("utf-16"),
        b"{",
        b'{"a":' * 5000,
    ],
)
async def test_json_of_any_length_is_refused_for_the_same(text: bytes, padding_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        await HttpRequest({}, {}, {}, memoryview(text + b" " * padding_bytes)).json()


def test_images_in_base64_are_counted_once_decoded() -> None:
    taken: list[int] = []
    body = json.dumps({"image": [IMAGE_TEXT, IMAGE_TEXT]}).encode()
    request = HttpRequest({}, {}, {"content-type": "application/json"}, memoryview(body), taken.append)
    form = asyncio.run(read_form(request))
    assert [bytes(image) for image in form.images] == [LARGE_IMAGE] * 2
    assert 0 <= sum(taken) - 2 * len(LARGE_IMAGE) < 6

    def full(size_bytes: int) -> None:
        raise QueueFull("full")

    with pytest.raises(QueueFull):
        asyncio.run(read_form(replace(request, take=full)))


@pytest.mark.parametrize("known", [True, False])
@given(sizes=st.lists(st.integers(0, 300_000), max_size=12))
def test_a_body_is_what_arrived(known: bool, sizes: list[int]) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    left = [*parts]

    async def receive() -> Any:
        part = left.pop(0) if left else b""
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    body = asyncio.run(read_body(receive, sum(sizes) or 1, sum(sizes) if known else 0))
    assert bytes(body) == b"".join(parts)


# Compressed bodies.


def unpack(body: bytes, max_bytes: int = 10**7) -> tuple[bytes, list[int]]:
    taken: list[int] = []
    return bytes(asyncio.run(decompress(memoryview(body), max_bytes, taken.append))), taken


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_compressed_body_is_the_same(compress: Any) -> None:
    data = np.random.default_rng(0).integers(0, 4, 3_000_000, np.uint8).tobytes()
    for each in (data, bytes(5_000_000), b"", b"x"):
        found, taken = unpack(compress(each))
        assert found == each
        assert sum(taken) == len(each)


def test_a_bomb_is_refused_at_the_bound() -> None:
    with pytest.raises(MessageTooLarge):
        unpack(gzip.compress(bytes(50_000_000)), max_bytes=2_000_000)

    def full(size_bytes: int) -> None:
        raise QueueFull("full")

    with pytest.raises(QueueFull):
        asyncio.run(decompress(memoryview(gzip.compress(bytes(100))), 1000, full))


@pytest.mark.parametrize(
    "body", [b"x", b"\x1f\x8b", gzip.compress(b"abc", mtime=0)[:-1], gzip.compress(b"abc", mtime=0) + b"x", PNG * 9]
)
def test_what_is_not_one_whole_stream_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="Content-Encoding"):
        unpack(body)
