"""Several inputs in ONNX files, of two sizes, of sizes without buckets, in shared memory, and in methods of tasks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import Server, StartServer
from tests.server.models.sources import onnx_writer as onnx

from xlaserve_client import InvalidRequest, VisionClient
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

LEFT, RIGHT = (12, 10), (6, 8)
RANDOM = np.random.default_rng(3)
WEIGHTS = RANDOM.normal(size=(4, 3)).astype(np.float32)


def pair(keras: Any, left: tuple[int | None, ...], right: tuple[int | None, ...]) -> Any:
    """The differences of two images' means, `[n, 3]`."""
    images = [keras.Input((*sides, 3), name=name) for name, sides in (("left", left), ("right", right))]
    means = [keras.layers.GlobalAveragePooling2D()(one) for one in images]
    return keras.Model(images, keras.layers.Subtract(name="difference")(means))


def images(*sizes: tuple[int, int], count: int = 2) -> dict[str, Any]:
    return {
        name: RANDOM.integers(0, 256, (count, *size, 3), np.uint8)
        for name, size in zip(("left", "right"), sizes, strict=True)
    }


def difference(inputs: dict[str, Any]) -> Any:
    return inputs["left"].mean((1, 2)) - inputs["right"].mean((1, 2))


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "a front"])
def server(
    request: pytest.FixtureRequest, start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    from xlaserve.models.networks.keras_runtime import keras

    folder = tmp_path_factory.mktemp("kinds")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        pair(keras, LEFT, RIGHT).save(folder / "sizes.keras")
        pair(keras, (None, None), (None, None)).save(folder / "any.keras")
    (folder / "sum.onnx").write_bytes(
        onnx.model(
            [
                onnx.node("Transpose", ["photo"], ["first"], perm=[0, 3, 1, 2]),
                onnx.node("GlobalAveragePool", ["first"], ["pooled"]),
                onnx.node("Flatten", ["pooled"], ["means"]),
                onnx.node("MatMul", ["numbers", "weights"], ["weighted"]),
                onnx.node("Add", ["means", "weighted"], ["sums"]),
            ],
            pixels=("photo", [1, *LEFT, 3]),
            others=[("numbers", [1, 4])],
            scores=("sums", [1, 3]),
            weights=[onnx.tensor("weights", WEIGHTS)],
        )
    )
    common = {"buckets": [1, 4], "task": "tensors", "preprocess": "none"}
    sizes = str(folder / "sizes.keras")
    models = [
        {"name": "sizes", "source": sizes, "modes": ["xla", "graph"], **common},
        {"name": "classes", "source": sizes, "modes": ["graph"], **common, "task": "classification"},
        {
            "name": "any",
            "source": str(folder / "any.keras"),
            "resolutions": [[16, 16]],
            "unmatched": "background",
            **common,
        },
        {
            "name": "onnx",
            "source": str(folder / "sum.onnx"),
            "modes": ["xla", "graph", "openvino"],
            **common,
            "buckets": [1],
        },
    ]
    return start_module_server({"models": models, "fronts": request.param, "shared_memory": True})


@pytest.fixture
def client(server: Server) -> Iterator[VisionClient]:
    with VisionClient(server.grpc, deadline_s=60) as client:
        yield client


@pytest.mark.parametrize("mode", ["xla", "graph"])
def test_images_of_two_fixed_sizes_are_fitted_each_to_its_own(client: VisionClient, tmp_path: Path, mode: str) -> None:
    inputs = images(LEFT, RIGHT)
    got = client.infer(inputs=inputs, model="sizes", mode=mode).outputs["difference"]
    np.testing.assert_allclose(got, difference(inputs), atol=1e-3)
    files = {name: [tmp_path / f"{name}{row}.png" for row in range(2)] for name in inputs}
    for name, paths in files.items():
        for pixels, path in zip(inputs[name], paths, strict=True):
            Image.fromarray(pixels).save(path)
    for given in (files, {**inputs, "left": files["left"]}, {**inputs, "right": files["right"]}):
        got = client.infer(inputs=given, model="sizes", mode=mode).outputs["difference"]
        np.testing.assert_allclose(got, difference(inputs), atol=1e-3)


@pytest.mark.parametrize("mode", ["xla", "graph", "openvino"])
def test_an_onnx_file_takes_an_image_and_numbers(client: VisionClient, mode: str) -> None:
    photo, numbers = images(LEFT, RIGHT, count=3)["left"], RANDOM.normal(size=(3, 4)).astype(np.float32)
    got = client.infer(inputs={"numbers": numbers, "photo": photo}, model="onnx", mode=mode).outputs
    (sums,) = got.values()
    np.testing.assert_allclose(sums, photo.mean((1, 2)) + numbers @ WEIGHTS, atol=1e-3)


def test_pairs_of_a_size_without_buckets_run_at_once_and_get_buckets(server: Server, client: VisionClient) -> None:
    size = (20, 24)

    def mode() -> str:
        inputs = images(size, size)
        answer = client.infer(inputs=inputs, model="any")
        np.testing.assert_allclose(answer.outputs["difference"], difference(inputs), atol=1e-3)
        return answer.mode

    assert mode() == "graph"
    server.wait_for(lambda: mode() == "xla", "no buckets of that size", timeout_s=60)
    with pytest.raises(InvalidRequest, match="right: expected shape"):
        client.infer(inputs=images(size, (20, 20)), model="any")


def test_all_inputs_may_be_in_shared_memory(server: Server) -> None:
    inputs = images(LEFT, RIGHT)
    file = Path("/dev/shm") / f"xlaserve-test-inputs-{os.getpid()}"
    file.write_bytes(b"".join(one.tobytes() for one in inputs.values()))
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = GRPCInferenceServiceStub(channel)
            region = pb.SystemSharedMemoryRegisterRequest(
                name="pair", key=f"/{file.name}", byte_size=file.stat().st_size
            )
            stub.SystemSharedMemoryRegister(region)
            request, offset = pb.ModelInferRequest(model_name="sizes"), 0
            for name, one in inputs.items():
                parameters = request.inputs.add(name=name, datatype="UINT8", shape=one.shape).parameters
                parameters["shared_memory_region"].string_param = "pair"
                parameters["shared_memory_byte_size"].int64_param = one.nbytes
                parameters["shared_memory_offset"].int64_param = offset
                offset += one.nbytes
            answer = stub.ModelInfer(request, timeout=60)
            stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    finally:
        file.unlink()
    got = np.array(answer.outputs[0].contents.fp32_contents or np.frombuffer(answer.raw_output_contents[0], "<f4"))
    np.testing.assert_allclose(got.reshape(2, 3), difference(inputs), atol=1e-3)


def test_methods_of_tasks_say_which_method_takes_several_inputs(client: VisionClient) -> None:
    message = "expected a model of one image, got classes, whose inputs are left, right; use ModelInfer"
    for given in (b"any", np.zeros((*LEFT, 3), np.uint8)):
        with pytest.raises(InvalidRequest, match=message):
            client.classify(given, model="classes")
    inputs = images(LEFT, RIGHT)
    assert client.infer(inputs=inputs, model="classes").scores.shape == (2, 3)
