"""What a stock tritonclient sees of a server: runs in an environment of its own and prints JSON.

python triton_probe.py HOST:PORT IMAGE.png
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

SIDE = 32


def image_input(png: bytes, n: int = 1) -> triton.InferInput:
    tensor = triton.InferInput("image", [n], "BYTES")
    tensor.set_data_from_numpy(np.array([png] * n, dtype=np.object_))
    return tensor


def pixels_input(value: int, n: int = 1, datatype: str = "UINT8") -> triton.InferInput:
    shape = [n, SIDE, SIDE, 3]
    tensor = triton.InferInput("pixels", shape, datatype)
    tensor.set_data_from_numpy(np.full(shape, value, {"UINT8": np.uint8, "FP32": np.float32}[datatype]))
    return tensor


def refusal(call: Any, *arguments: Any, **options: Any) -> list[str | None]:
    try:
        call(*arguments, **options)
    except InferenceServerException as failure:
        return [failure.status(), failure.message()]
    return [None, None]


def streamed(client: triton.InferenceServerClient, inputs: list[list[triton.InferInput]]) -> list[Any]:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        for number, tensors in enumerate(inputs):
            client.async_stream_infer("digits", tensors, request_id=str(number))
        seen = [answers.get(timeout=30) for _ in inputs]
    finally:
        client.stop_stream()
    return [error.message() if error else result.get_response().id for result, error in seen]


def asynchronous(client: triton.InferenceServerClient, png: bytes) -> list[int]:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.async_infer("digits", [image_input(png)], lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=30)
    assert error is None, error
    return list(result.as_numpy("scores").shape)


def probe(client: triton.InferenceServerClient, png: bytes) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": {name: client.is_model_ready(name) for name in ("digits", "noop", "broken", "unknown")},
        "server": client.get_server_metadata(as_json=True),
        "index": client.get_model_repository_index(as_json=True),
        "metadata": client.get_model_metadata("digits", as_json=True),
        "config": client.get_model_config("digits", as_json=True),
    }
    result = client.infer("digits", [image_input(png, n=2)], request_id="mine", timeout=30_000_000)
    scores = result.as_numpy("scores")
    answer_id = result.get_response().id
    seen["image"] = {"shape": list(scores.shape), "best": scores.argmax(axis=1).tolist(), "id": answer_id}
    uint8, fp32 = (client.infer("digits", [pixels_input(9, 3, datatype)]) for datatype in ("UINT8", "FP32"))
    seen["pixels"] = list(uint8.as_numpy("scores").shape)
    seen["types_agree"] = bool(np.allclose(uint8.as_numpy("scores"), fp32.as_numpy("scores"), atol=1e-5))
    wanted = [triton.InferRequestedOutput("scores", class_count=2)]
    classes = client.infer("digits", [image_input(png)], outputs=wanted, parameters={"mode": "graph"})
    seen["classification"] = [[text.decode() for text in row] for row in classes.as_numpy("scores")]
    seen["mode"] = classes.get_response().parameters["mode"].string_param
    compressed = client.infer("digits", [pixels_input(0)], compression_algorithm="gzip")
    seen["compressed"] = list(compressed.as_numpy("scores").shape)
    seen["async"] = asynchronous(client, png)
    wrong = triton.InferInput("pixels", [1, 8, 8, 3], "UINT8")
    wrong.set_data_from_numpy(np.zeros((1, 8, 8, 3), np.uint8))
    seen["stream"] = streamed(client, [[pixels_input(1)], [wrong], [image_input(png)]])
    seen["errors"] = {
        "unknown model": refusal(client.infer, "nope", [pixels_input(0)]),
        "wrong shape": refusal(client.infer, "digits", [wrong]),
        "sequence": refusal(client.infer, "digits", [pixels_input(0)], sequence_id=7, sequence_start=True),
        "shared memory": refusal(client.get_system_shared_memory_status),
        "load with a configuration": refusal(client.load_model, "noop", config="{}"),
        "broken": refusal(client.load_model, "broken"),
    }
    client.unload_model("noop")
    seen["unloaded"] = client.is_model_ready("noop")
    client.load_model("noop")
    seen["loaded"] = client.is_model_ready("noop")
    seen["statistics"] = client.get_inference_statistics("digits", as_json=True)
    return seen


if __name__ == "__main__":
    with triton.InferenceServerClient(sys.argv[1]) as client:
        json.dump(probe(client, Path(sys.argv[2]).read_bytes()), sys.stdout)
