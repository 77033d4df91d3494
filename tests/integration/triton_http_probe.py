"""What a stock tritonclient sees of a server over HTTP: runs in an environment of its own and prints JSON.

python triton_http_probe.py HOST:PORT IMAGE.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

SIDE = 32


def image_input(png: bytes, n: int = 1, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("image", [n], "BYTES")
    tensor.set_data_from_numpy(np.array([png] * n, dtype=np.object_), binary_data=binary)
    return tensor


def pixels_input(value: int, n: int = 1, datatype: str = "UINT8", binary: bool = True) -> triton.InferInput:
    shape = [n, SIDE, SIDE, 3]
    tensor = triton.InferInput("pixels", shape, datatype)
    pixels = np.full(shape, value, {"UINT8": np.uint8, "FP32": np.float32}[datatype])
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    return tensor


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str | None]:
    try:
        call(*arguments, **options)
    except InferenceServerException as failure:
        return [failure.status(), failure.message()]
    return [None, None]


def probe(client: triton.InferenceServerClient, png: bytes) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": {name: client.is_model_ready(name) for name in ("digits", "noop", "broken", "nope")},
        "server": client.get_server_metadata(),
        "index": client.get_model_repository_index(),
        "metadata": client.get_model_metadata("digits"),
        "config": client.get_model_config("digits", "1"),
    }
    result = client.infer("digits", [image_input(png, n=2)], request_id="mine", timeout=30_000_000)
    scores = result.as_numpy("scores")
    answer_id = result.get_response()["id"]
    seen["image"] = {"shape": list(scores.shape), "best": scores.argmax(axis=1).tolist(), "id": answer_id}
    answers = []
    for datatype in ("UINT8", "FP32"):
        for binary_in in (True, False):
            for binary_out in (True, False):
                outputs = [triton.InferRequestedOutput("scores", binary_data=binary_out)]
                tensor = pixels_input(9, 3, datatype, binary_in)
                answers.append(client.infer("digits", [tensor], outputs=outputs).as_numpy("scores"))
    seen["pixels"] = list(answers[0].shape)
    seen["types_agree"] = all(bool(np.allclose(answer, answers[0], atol=1e-5)) for answer in answers)
    classes = {}
    for binary in (True, False):
        wanted = [triton.InferRequestedOutput("scores", binary_data=binary, class_count=2)]
        answer = client.infer("digits", [image_input(png)], outputs=wanted, parameters={"mode": "graph"})
        found = answer.as_numpy("scores")[0]
        classes[str(binary)] = [text.decode() if isinstance(text, bytes) else str(text) for text in found]
    seen["classification"] = classes
    seen["mode"] = answer.get_response()["parameters"]["mode"]
    seen["compressed"] = {
        algorithm: list(
            client.infer(
                "digits",
                [pixels_input(0, 2)],
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            .as_numpy("scores")
            .shape
        )
        for algorithm in ("gzip", "deflate")
    }
    pending = [client.async_infer("digits", [image_input(png)]) for _ in range(8)]
    seen["async"] = [list(one.get_result().as_numpy("scores").shape) for one in pending]
    wrong = triton.InferInput("pixels", [1, 8, 8, 3], "UINT8")
    wrong.set_data_from_numpy(np.zeros((1, 8, 8, 3), np.uint8))
    seen["errors"] = {
        "unknown model": refusal(client.infer, "nope", [pixels_input(0)]),
        "wrong shape": refusal(client.infer, "digits", [wrong]),
        "sequence": refusal(client.infer, "digits", [pixels_input(0)], sequence_id=7, sequence_start=True),
        "shared memory": refusal(client.get_system_shared_memory_status),
        "load with a configuration": refusal(client.load_model, "noop", config="{}"),
        "broken": refusal(client.load_model, "broken"),
        "timeout": refusal(client.infer, "digits", [image_input(png, 64)], timeout=1),
    }
    client.unload_model("noop")
    seen["unloaded"] = client.is_model_ready("noop")
    client.load_model("noop")
    seen["loaded"] = client.is_model_ready("noop")
    seen["statistics"] = client.get_inference_statistics("digits")
    return seen


if __name__ == "__main__":
    with triton.InferenceServerClient(sys.argv[1], concurrency=4) as client:
        json.dump(probe(client, Path(sys.argv[2]).read_bytes()), sys.stdout)
