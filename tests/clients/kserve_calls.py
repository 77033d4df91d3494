"""What users of KServe's Python client call, in an environment of its own: prints how each call ended, as JSON.

python kserve_calls.py GRPC_HOST:PORT HTTP_HOST:PORT IMAGE.png
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest, InferResponse
from kserve.inference_client import InferenceRESTClient, RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from numpy.typing import NDArray

MODEL = "digits"
GRPC, HTTP = sys.argv[1], f"http://{sys.argv[2]}"
PNG = Path(sys.argv[3]).read_bytes()
SHAPE = [2, 32, 32, 3]


def request(tensor: InferInput, **others: object) -> InferRequest:
    return InferRequest(model_name=MODEL, infer_inputs=[tensor], **others)


def scores(response: InferResponse) -> None:
    assert response.outputs[0].name == "scores"
    assert response.outputs[0].as_numpy().shape == (2, 10)


async def health(client: InferenceGRPCClient) -> None:
    """`is_server_live`, `is_server_ready`, `is_model_ready`; false for an unknown model"""
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready(MODEL)
    assert not await client.is_model_ready("unknown")


async def from_numpy(client: InferenceGRPCClient) -> None:
    """`set_data_from_numpy` with UINT8, INT32, FP16 and FP32, which adds `binary_data_size`"""
    for dtype, datatype in ((np.uint8, "UINT8"), (np.int32, "INT32"), (np.float16, "FP16"), (np.float32, "FP32")):
        tensor = InferInput("pixels", SHAPE, datatype)
        tensor.set_data_from_numpy(np.full(SHAPE, 9, dtype))
        scores(await client.infer(request(tensor)))


async def from_lists(client: InferenceGRPCClient) -> None:
    """`InferInput(data=[...])`, typed contents"""
    scores(await client.infer(request(InferInput("pixels", SHAPE, "UINT8", data=[9] * 6144))))


async def images(client: InferenceGRPCClient) -> None:
    """`set_data_from_numpy` with `image`, BYTES"""
    tensor = InferInput("image", [2], "BYTES")
    tensor.set_data_from_numpy(np.array([PNG, PNG], np.object_))
    scores(await client.infer(request(tensor)))


def change(*, binary: bool) -> InferRequest:
    values: dict[str, tuple[NDArray[Any], str]] = {
        "before": (np.full(SHAPE, 3, np.uint8), "UINT8"),
        "after": (np.full(SHAPE, 9, np.uint8), "UINT8"),
        "weight": (np.array([[0.5], [2]], np.float32), "FP32"),
    }
    tensors = [InferInput(name, [*value.shape], datatype) for name, (value, datatype) in values.items()]
    for tensor in tensors:
        tensor.set_data_from_numpy(values[tensor.name][0], binary_data=binary)
    return InferRequest(model_name="change", infer_inputs=tensors)


async def several_inputs(client: InferenceGRPCClient) -> None:
    """`infer` of a model of several inputs, two images and numbers, over gRPC and REST"""
    answers = [await client.infer(change(binary=True))]
    answers += [await rest().infer(HTTP, change(binary=binary), model_name="change") for binary in (True, False)]
    for answer in answers:
        np.testing.assert_allclose(answer.outputs[0].as_numpy(), [[3] * 3, [12] * 3])


async def parameters(client: InferenceGRPCClient) -> None:
    """`InferRequest(parameters=..., request_outputs=...)` and headers of its own"""
    tensor = InferInput("pixels", SHAPE, "UINT8", parameters={"my_own": 7})
    tensor.set_data_from_numpy(np.full(SHAPE, 9, np.uint8))
    asked = request(
        tensor,
        request_id="7",
        parameters={"binary_data_output": True, "my_own": "anything"},
        request_outputs=[RequestedOutput("scores", {"binary_data": True})],
    )
    response = await client.infer(asked, headers=[("x-my-own", "anything")])
    scores(response)
    assert response.id == "7"


def rest() -> InferenceRESTClient:
    return InferenceRESTClient(RESTConfig(protocol="v2", timeout=30, retries=0))


async def rest_health(_: InferenceGRPCClient) -> None:
    """REST: `is_server_live`, `is_server_ready`, `is_model_ready`; false for an unknown model"""
    client = rest()
    assert await client.is_server_live(HTTP)
    assert await client.is_server_ready(HTTP)
    assert await client.is_model_ready(HTTP, MODEL)
    assert not await client.is_model_ready(HTTP, "unknown")


async def rest_infer(_: InferenceGRPCClient) -> None:
    """REST: `infer` with UINT8, FP32 and BYTES, in JSON and in binary; NOT FOUND for an unknown model"""
    client = rest()
    for binary in (True, False):
        for dtype, datatype in ((np.uint8, "UINT8"), (np.float32, "FP32")):
            tensor = InferInput("pixels", SHAPE, datatype)
            tensor.set_data_from_numpy(np.full(SHAPE, 9, dtype), binary_data=binary)
            answer = await client.infer(HTTP, request(tensor, request_id="mine"), model_name=MODEL)
            scores(answer)
            assert answer.id == "mine"
    image = InferInput("image", [2], "BYTES")
    image.set_data_from_numpy(np.array([PNG, PNG], np.object_), binary_data=True)
    answer = await client.infer(HTTP, request(image), model_name=MODEL)
    assert answer.outputs[0].as_numpy().argmax(axis=1).tolist() == [3, 3]
    try:
        await client.infer(HTTP, request(image), model_name="unknown")
    except httpx.HTTPStatusError as error:
        assert error.response.status_code == 404
    else:
        raise AssertionError("an unknown model answered")


CALLS: tuple[Callable[[InferenceGRPCClient], Awaitable[None]], ...] = (
    health,
    from_numpy,
    from_lists,
    images,
    several_inputs,
    parameters,
    rest_health,
    rest_infer,
)


async def outcome(call: Awaitable[None]) -> str:
    try:
        await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def main() -> dict[str, str]:
    async with InferenceGRPCClient(GRPC) as client:
        return {call.__name__: await outcome(call(client)) for call in CALLS}


if __name__ == "__main__":
    json.dump(asyncio.run(main()), sys.stdout)
