from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from xlaserve_loadtest.payload import make_requests, synthetic_images
from xlaserve_proto import open_inference_pb2 as oip


@pytest.fixture
def images():
    return synthetic_images(4, height=24, width=32, seed=1)


def decoded(request):
    return oip.ModelInferRequest.FromString(request.data)


def png_images(raw):
    while raw:
        length = int.from_bytes(raw[:4], "little")
        yield np.asarray(Image.open(io.BytesIO(raw[4 : 4 + length])))
        raw = raw[4 + length :]


def test_images_are_the_same_for_the_same_seed(images):
    np.testing.assert_array_equal(images, synthetic_images(4, height=24, width=32, seed=1))
    assert (images != synthetic_images(4, height=24, width=32, seed=2)).any()
    assert images.shape == (4, 24, 32, 3)
    assert images.dtype == np.uint8
    assert len(np.unique(images)) > 100


@pytest.mark.parametrize("per_request", [1, 3, 6])
@pytest.mark.parametrize("kind", ["pixels", "png"])
def test_requests_take_turns_in_the_images(images, kind, per_request):
    (sent,) = make_requests(images, model="m", modes=["xla"], kind=kind, images_per_request=per_request).values()
    assert len(sent) == 4
    for start, request in enumerate(sent):
        expected = images[np.arange(start, start + per_request) % 4]
        message = decoded(request)
        assert request.images == per_request
        (tensor,) = message.inputs
        if kind == "pixels":
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("pixels", "UINT8", [per_request, 24, 32, 3])
            got = np.frombuffer(message.raw_input_contents[0], np.uint8).reshape(expected.shape)
        else:
            assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", "BYTES", [per_request])
            got = np.stack(list(png_images(message.raw_input_contents[0])))
        np.testing.assert_array_equal(got, expected)


def test_modes_differ_in_nothing_but_the_mode(images):
    requests = make_requests(images, model="m", modes=["xla", "graph"], kind="pixels", images_per_request=2)
    for xla, graph in zip(requests["xla"], requests["graph"], strict=True):
        first, second = decoded(xla), decoded(graph)
        assert (first.parameters["mode"].string_param, xla.mode) == ("xla", "xla")
        assert (second.parameters["mode"].string_param, graph.mode) == ("graph", "graph")
        first.parameters["mode"].string_param = "graph"
        assert first == second
