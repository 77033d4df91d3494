"""Padding and batch-mates never change an answer: the same image gives the same scores alone, in a full batch and among
garbage. Up to the order in which floats are added: on processors without AVX-512 it differs from place to place, and in
the last rows of one and the same batch it may differ from run to run, in XLA and in graph mode."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.integration.conftest import StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc

BUCKETS = (1, 3, 8)
MODELS = [*(("digits", mode) for mode in ("xla", "graph", "eager")), ("noop", "graph")]
SIDES = {"digits": 32, "noop": 224}
TOLERANCE = {"digits": 5e-6, "noop": 0.0}
"""Largest difference: of probabilities, and of a model that adds nothing up."""
PATIENCE_S = 60

Images = NDArray[np.uint8]
Scores = NDArray[np.float32]


class Client:
    """Asks models that have one bucket each, so that it is known which one an image is run in."""

    def __init__(self, channel: grpc.Channel, model: str, mode: str) -> None:
        self._stub = pb_grpc.GRPCInferenceServiceStub(channel)
        self._model = model
        self._mode = mode
        self.side = SIDES[model]
        self._tolerance = TOLERANCE[model]

    def send(self, images: Images, bucket: int) -> Any:
        request = pb.ModelInferRequest(model_name=f"{self._model}{bucket}")
        request.parameters["mode"].string_param = self._mode
        request.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
        request.raw_input_contents.append(images.tobytes())
        return self._stub.ModelInfer.future(request, timeout=PATIENCE_S)

    def ask(self, images: Images, bucket: int) -> Scores:
        return scores(self.send(images, bucket))

    def assert_same(self, answers: Scores, expected: Scores) -> None:
        np.testing.assert_allclose(answers, expected, rtol=0, atol=self._tolerance)

    def images(self, n: int, seed: int = 0) -> Images:
        """Returns blurred noise, which has more to tell apart than noise."""
        noise = np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), np.uint8)
        return noise.repeat(self.side // 4, axis=1).repeat(self.side // 4, axis=2)

    def garbage(self) -> list[Images]:
        """Returns what an image might share a batch with."""
        shape = (1, self.side, self.side, 3)
        noise = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        return [np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8), noise]


def scores(call: Any) -> Scores:
    response = call.result(timeout=PATIENCE_S)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


@pytest.fixture(scope="module")
def channel(start_module_server: StartServer) -> Any:
    def model(name: str, bucket: int) -> dict[str, Any]:
        modes = [mode for model, mode in MODELS if model == name]
        return {"name": f"{name}{bucket}", "source": f"builtin:{name}", "modes": modes, "buckets": [bucket]}

    server = start_module_server({"models": [model(name, bucket) for name in SIDES for bucket in BUCKETS]})
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture(params=MODELS, ids="-".join)
def client(channel: grpc.Channel, request: pytest.FixtureRequest) -> Client:
    return Client(channel, *request.param)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_an_image_alone_and_in_a_full_batch_gets_the_same_answer(client: Client, bucket: int) -> None:
    images = client.images(bucket)
    alone = np.concatenate([client.ask(images[row : row + 1], bucket) for row in range(bucket)])
    assert len(np.unique(alone, axis=0)) == bucket, "images that are answered alike prove nothing"
    client.assert_same(client.ask(images, bucket), alone)
    client.assert_same(client.ask(images[::-1], bucket), alone[::-1])


def test_an_image_beside_garbage_gets_the_same_answer(client: Client) -> None:
    bucket = BUCKETS[-1]
    image = client.images(1)
    alone = client.ask(image, bucket)
    for place in range(bucket):
        for garbage in client.garbage():
            batch = np.repeat(garbage, bucket, axis=0)
            batch[place] = image
            client.assert_same(client.ask(batch, bucket)[place], alone[0])


def test_images_of_different_requests_share_batches_unseen(client: Client) -> None:
    bucket = BUCKETS[-1]
    images = client.images(40)
    alone = np.concatenate([client.ask(images[row : row + 1], bucket) for row in range(len(images))])
    edges = np.cumsum([0, 1, 2, 1, 11, 5, 1, 1, 9, 3, 6])
    assert edges[-1] == len(images)
    calls = [client.send(images[start:stop], bucket) for start, stop in pairwise(edges)]
    client.assert_same(np.concatenate([scores(call) for call in calls]), alone)


def test_an_image_gets_the_same_answer_in_every_bucket_up_to_rounding(client: Client) -> None:
    images = client.images(20)
    answers = [client.ask(images, bucket) for bucket in BUCKETS]
    for answer in answers[1:]:
        client.assert_same(answer, answers[0])
