from __future__ import annotations

import base64
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest

from xlaserve.config import PixelRange
from xlaserve.errors import InvalidArgument
from xlaserve.pipeline.request_inputs import Pending
from xlaserve.wire.http import json_numbers, serving_body
from xlaserve.wire.http.message import HttpRequest
from xlaserve.wire.shared.input_tensors import images_of

SMALL = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 3))
LARGE = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3))
MIXED = np.concatenate([np.full((1, 10, 10, 3), 1), np.full((1, 10, 10, 3), 200)])
"""Rows of which one is short in JSON and the other is long."""
IMAGE = bytes(range(256)) * 8


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


def images(body: object, input_name: str = "") -> Any:
    parsed = serving_body.parse(json_numbers.loads(json.dumps(body).encode()), input_name)
    found = images_of(parsed.inputs, PixelRange.LEVELS)
    return pickle.loads(pickle.dumps(found)).check() if isinstance(found, Pending) else found


@pytest.mark.parametrize("pixels", [SMALL, LARGE, MIXED], ids=["small", "large", "mixed"])
@pytest.mark.parametrize("dtype", [int, float])
def test_pixels_are_the_same_in_rows_and_in_columns(pixels: Any, dtype: type) -> None:
    listed = pixels.astype(dtype).tolist()
    for body in (
        {"instances": listed},
        {"instances": [{"pixels": one} for one in listed]},
        {"inputs": listed},
        {"inputs": {"pixels": listed}, "signature_name": "serving_default"},
    ):
        np.testing.assert_array_equal(images(body), pixels)


def test_a_name_of_another_server_is_that_of_either_input() -> None:
    for body, expected in (
        ({"instances": [{"input_1": one} for one in SMALL.tolist()]}, SMALL.tolist()),
        ({"inputs": {"input_1": SMALL.tolist()}}, SMALL.tolist()),
        ({"instances": [{"input_1": b64(b"a")}, {"input_1": b64(b"b")}]}, [b"a", b"b"]),
        ({"inputs": {"input_1": [b64(b"a")]}}, [b"a"]),
        ({"inputs": {"image": [b64(b"a")]}}, [b"a"]),
    ):
        assert [
            bytes(one) if isinstance(expected[0], bytes) else one.tolist() for one in images(body, "input_1")
        ] == expected


@pytest.mark.parametrize("data", [b"short", IMAGE], ids=["short", "long"])
def test_images_are_the_same_in_rows_and_in_columns(data: bytes) -> None:
    one = b64(data)
    for body in (
        {"instances": [one, one]},
        {"instances": [{"image": one}, {"image": one}]},
        {"inputs": [one, one]},
        {"inputs": {"image": [one, one]}},
        {"inputs": {"image": [[one], [one]]}},
    ):
        assert [*map(bytes, images(body))] == [data, data]
    assert [*map(bytes, images({"inputs": {"image": one}}))] == [data]


def test_a_request_in_rows_is_known_as_such() -> None:
    assert serving_body.parse({"instances": SMALL.tolist()}).is_rows
    assert not serving_body.parse({"inputs": SMALL.tolist()}).is_rows


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"instances": [], "inputs": []}, "body"),
        ({"instances": []}, "instances"),
        ({"instances": 7}, "instances"),
        ({"instances": [b64(IMAGE), 7]}, "instances[1]"),
        ({"instances": [{"image": b64(IMAGE)}, {"pixels": 7}]}, "instances[1]"),
        ({"instances": ["text"]}, "instances"),
        ({"instances": [{"b64": "#"}]}, "instances[0].b64"),
        ({"instances": [{"image": 7}]}, "instances[0].image"),
        ({"inputs": {"pixels": [[1], [1, 2]]}}, "inputs.pixels"),
        ({"inputs": {"pixels": [[1] * 999, "text"]}}, "inputs.pixels"),
        ({"instances": [{"pixels": [1] * 999}, {"pixels": [1] * 1000}]}, "instances.pixels"),
        ({"inputs": {"pixels": SMALL[0].tolist()}}, "pixels.shape"),
        ({"inputs": {"pixels": SMALL.tolist(), "image": [b64(IMAGE)]}}, "inputs"),
        ({"inputs": {"other": SMALL.tolist()}}, "inputs"),
        ({"inputs": (SMALL + 1000).tolist()}, "pixels"),
        ({"inputs": (LARGE - 1000).tolist()}, "pixels"),
        ({"inputs": (LARGE / 255).tolist()}, "pixels"),
        ({"instances": SMALL.tolist(), "signature_name": "other"}, "signature_name"),
        ({"instances": SMALL.tolist(), "signature_name": 7}, "body.signature_name"),
    ],
)
def test_what_is_wrong_is_named(body: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        images(body)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"instances": []}, "instances: expected a list of at least one image, got an empty list"),
        ({"instances": [{}]}, "instances: expected 'pixels' or 'image' by name, got an empty object"),
        ({"inputs": {}}, "inputs: expected 'pixels' or 'image' by name, got an empty object"),
        ({"instances": ["text"]}, "got 'text'"),
        ({"instances": [[[["a"]]]]}, "got 'a'"),
        ({"instances": [None]}, "got nothing"),
        ({"instances": [{"b64": None}]}, "instances[0].b64: expected an image in base64, got nothing"),
        ({"instances": [{"b64": 7}]}, "instances[0].b64: expected an image in base64, got 7"),
        ({"instances": [{"image": None}]}, 'instances[0].image: expected {"b64": ...}, got nothing'),
        ({"instances": [{"image": {}}]}, 'instances[0].image: expected {"b64": ...}, got an empty object'),
        ({"instances": [{"image": {"b65": ""}}]}, "got an object of 'b65'"),
        ({"inputs": {"image": None}}, 'inputs.image: expected a list of {"b64": ...}, got nothing'),
        ({"inputs": {"image": [b64(IMAGE), {}]}}, 'inputs.image[1]: expected {"b64": ...}, got an empty object'),
        ({"instances": [{"b64": None}]}, "instances[0].b64: expected an image in base64, got "),
        ({"instances": [{"b64": "https://example.org/a.png"}]}, "got an address, and the server fetches none"),
        (
            {"instances": [{"image": b64(IMAGE)}, {"imag": 1}]},
            "instances[1]: expected an object of 'image', as in instances[0], got an object of 'imag'",
        ),
    ],
)
def test_what_came_is_said_in_the_words_of_json(body: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        images(body)


def test_an_input_by_its_other_name_is_refused_by_that_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        images({"inputs": {"flowers": ["text"]}}, "flowers")
    assert refused.value.field == "inputs.flowers"


def request(body: bytes) -> HttpRequest:
    return HttpRequest({}, {}, {}, memoryview(body))


def test_examples_are_told_from_images() -> None:
    assert serving_body.has_examples(request(b' \n{"signature_name": "x", "examples": []}'))
    assert not serving_body.has_examples(request(b'{"image": "examples"}'))
    assert not serving_body.has_examples(request(b'\xff\xd8\xff{"examples"'))


def test_examples_hold_one_image_each() -> None:
    assert serving_body.examples({"examples": [{"image": b64(IMAGE), "label": 3}]}) == [IMAGE]
    wrongs: list[dict[str, Any]] = [{}, {"examples": []}, {"examples": [{}]}, {"examples": [{"image": "text"}]}]
    for wrong in wrongs:
        with pytest.raises(InvalidArgument):
            serving_body.examples(wrong)
    assert len(serving_body.examples({"examples": [{"image": b64(IMAGE)}] * 100})) == 100


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (3, "examples: expected a list of JSON objects, got 3"),
        ([], "examples: expected at least one and at most 4096, got none"),
        ([{"image": b64(IMAGE)}, {"imag": 1}], 'examples[1].image: expected {"b64": ...}, got an object without image'),
        ([{"image": None}], 'examples[0].image: expected {"b64": ...}, got nothing'),
        ([{"image": b64(IMAGE)}] * 4097, "examples: expected at most 4096 JSON objects, got 4097"),
    ],
)
def test_the_example_that_is_wrong_is_named(examples: object, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        serving_body.examples({"examples": examples})


def numbers(body: object, shape: tuple[int, ...], dtype: str, **inputs: bool) -> Any:
    (tensor,) = serving_body.parse(json_numbers.loads(json.dumps(body).encode()), "", inputs).inputs
    return tensor.numbers(shape, np.dtype(dtype))


def test_names_of_a_model_s_own_inputs_tell_nothing_of_what_was_sent() -> None:
    given = {"inputs": {"image": SMALL.tolist(), "pixels": [b64(IMAGE), b64(IMAGE)]}}
    parsed = serving_body.parse(json_numbers.loads(json.dumps(given).encode()), "", {"image": False, "pixels": False})
    found = {tensor.name: tensor for tensor in parsed.inputs}
    assert {name: tensor.datatype for name, tensor in found.items()} == {"image": "INT32", "pixels": "BYTES"}
    np.testing.assert_array_equal(found["image"].values(SMALL.shape), SMALL)
    assert [*map(bytes, found["pixels"].elements())] == [IMAGE, IMAGE]


def test_true_and_false_are_for_inputs_that_take_them_alone() -> None:
    flags = [[True, False], [False, True]]
    for body in ({"inputs": {"mask": flags}}, {"instances": [{"mask": row} for row in flags]}, {"inputs": flags}):
        found = numbers(body, (2, 2), "bool", mask=True)
        assert found.dtype == np.bool_
        assert found.tolist() == flags
        with pytest.raises(InvalidArgument):
            numbers(body, (2, 2), "float32", mask=False)
