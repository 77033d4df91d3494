"""What tritonclient's users call, in an environment of its own: prints how each call ended, as JSON.

python tritonclient_calls.py HOST:PORT IMAGE.png
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from numpy.typing import NDArray

MODEL = "digits"
PNG = Path(sys.argv[2]).read_bytes()
SHAPE = [2, 32, 32, 3]


def pixels(dtype: type[np.generic] = np.uint8, datatype: str = "UINT8") -> triton.InferInput:
    tensor = triton.InferInput("pixels", SHAPE, datatype)
    tensor.set_data_from_numpy(np.full(SHAPE, 9, dtype))
    return tensor


def image(shape: list[int]) -> triton.InferInput:
    tensor = triton.InferInput("image", shape, "BYTES")
    tensor.set_data_from_numpy(np.array([PNG] * shape[0], np.object_).reshape(shape))
    return tensor


def scores(result: triton.InferResult) -> None:
    assert result.as_numpy("scores").shape == (2, 10)


def health(client: triton.InferenceServerClient) -> None:
    """`is_server_live`, `is_server_ready`, `is_model_ready`; false for an unknown model"""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("unknown")


def description(client: triton.InferenceServerClient) -> None:
    """`get_server_metadata`, `get_model_metadata`, `get_model_config`, `get_inference_statistics`"""
    assert client.get_server_metadata().name == "xlaserve"
    assert [one.name for one in client.get_model_metadata(MODEL).inputs] == ["pixels"]
    assert [one.name for one in client.get_model_config(MODEL).config.input] == ["pixels"]
    assert client.get_inference_statistics(MODEL).model_stats


def repository(client: triton.InferenceServerClient) -> None:
    """`get_model_repository_index`, `unload_model`, `load_model`"""
    assert MODEL in {one.name for one in client.get_model_repository_index().models}
    client.unload_model(MODEL)
    assert not client.is_model_ready(MODEL)
    client.load_model(MODEL)
    assert client.is_model_ready(MODEL)


def pixels_of_all_types(client: triton.InferenceServerClient) -> None:
    """`infer` with `pixels` as UINT8, INT32, FP16 and FP32"""
    for dtype, datatype in ((np.uint8, "UINT8"), (np.int32, "INT32"), (np.float16, "FP16"), (np.float32, "FP32")):
        scores(client.infer(MODEL, [pixels(dtype, datatype)]))


def images(client: triton.InferenceServerClient) -> None:
    """`infer` with `image`, `[n]` and `[n, 1]`"""
    scores(client.infer(MODEL, [image([2])]))
    scores(client.infer(MODEL, [image([2, 1])]))


def names(client: triton.InferenceServerClient) -> None:
    """`infer` with names that another server gave its tensors (`input_name`, `output_name`)"""
    metadata = client.get_model_metadata("digits-named")
    assert (metadata.inputs[0].name, metadata.outputs[0].name) == ("input_1", "probs")
    tensor = triton.InferInput("input_1", SHAPE, "FP32")
    tensor.set_data_from_numpy(np.full(SHAPE, 9, np.float32))
    result = client.infer("digits-named", [tensor], outputs=[triton.InferRequestedOutput("probs")])
    assert result.as_numpy("probs").shape == (2, 10)


def several_inputs(client: triton.InferenceServerClient) -> None:
    """`infer` of a model of several inputs: two images, as pixels and encoded, and numbers"""
    declared = {one.name: (one.datatype, [*one.shape]) for one in client.get_model_metadata("change").inputs}
    assert declared == {
        "before": ("UINT8", [-1, 32, 32, 3]),
        "after": ("UINT8", [-1, 32, 32, 3]),
        "weight": ("FP32", [-1, 1]),
    }
    values: dict[str, NDArray[Any]] = {
        "before": np.full(SHAPE, 3, np.uint8),
        "after": np.full(SHAPE, 9, np.uint8),
        "weight": np.array([[0.5], [2]], np.float32),
    }
    tensors = [triton.InferInput(name, [*value.shape], declared[name][0]) for name, value in values.items()]
    for tensor in tensors:
        tensor.set_data_from_numpy(values[tensor.name()])
    np.testing.assert_allclose(client.infer("change", tensors).as_numpy("change"), [[3] * 3, [12] * 3])
    encoded = triton.InferInput("after", [2], "BYTES")
    encoded.set_data_from_numpy(np.array([PNG] * 2, np.object_))
    assert client.infer("change", [tensors[0], encoded, tensors[2]]).as_numpy("change").shape == (2, 3)


def parameters(client: triton.InferenceServerClient) -> None:
    """`infer` with parameters and headers of its own, `timeout`, `request_id`, compression"""
    mine = {"mode": "graph", "my_own": "anything"}
    result = client.infer(
        MODEL,
        [pixels()],
        parameters=mine,
        headers={"x-my-own": "anything"},
        timeout=30_000_000,
        request_id="7",
        compression_algorithm="gzip",
    )
    scores(result)
    assert result.get_response().id == "7"


def classification(client: triton.InferenceServerClient) -> None:
    """`InferRequestedOutput(class_count=3)`"""
    wanted = [triton.InferRequestedOutput("scores", class_count=3)]
    assert client.infer(MODEL, [image([2])], outputs=wanted).as_numpy("scores").shape == (2, 3)


def callbacks(client: triton.InferenceServerClient) -> None:
    """`async_infer`"""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.async_infer(MODEL, [pixels()], lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=30)
    assert error is None, error
    scores(result)


def streams(client: triton.InferenceServerClient) -> None:
    """`async_stream_infer(enable_empty_final_response=True)`"""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer(MODEL, [pixels()], enable_empty_final_response=True)
        result, error = answers.get(timeout=30)
    finally:
        client.stop_stream()
    assert error is None, error
    scores(result)
    assert result.get_response().parameters["triton_final_response"].bool_param


def pings(client: triton.InferenceServerClient) -> None:
    """`KeepAliveOptions` with a ping each 2 s: a stream that says nothing for 9 s goes on"""
    every = triton.KeepAliveOptions(
        keepalive_time_ms=2000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    with triton.InferenceServerClient(sys.argv[1], keepalive_options=every) as pinging:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pinging.start_stream(lambda result, error: answers.put((result, error)))
        with suppress(queue.Empty):
            raise AssertionError(answers.get(timeout=9)[1])
        pinging.async_stream_infer(MODEL, [pixels()])
        result, error = answers.get(timeout=30)
        assert error is None, error
        scores(result)


def shared_memory(client: triton.InferenceServerClient) -> None:
    """`register_system_shared_memory`, `set_shared_memory` for the input and the output"""
    sent = np.full(SHAPE, 9, np.uint8)
    size_bytes = sent.nbytes + 80
    region = shm.create_shared_memory_region("region", "/xlaserve-client-test", size_bytes)
    try:
        shm.set_shared_memory_region(region, [sent])
        client.unregister_system_shared_memory()
        client.register_system_shared_memory("region", "/xlaserve-client-test", size_bytes)
        assert "region" in client.get_system_shared_memory_status().regions
        tensor = triton.InferInput("pixels", SHAPE, "UINT8")
        tensor.set_shared_memory("region", sent.nbytes)
        output = triton.InferRequestedOutput("scores")
        output.set_shared_memory("region", 80, offset=sent.nbytes)
        client.infer(MODEL, [tensor], outputs=[output])
        got = shm.get_contents_as_numpy(region, np.float32, [2, 10], offset=sent.nbytes)
        np.testing.assert_array_equal(got, client.infer(MODEL, [pixels()]).as_numpy("scores"))
        client.unregister_system_shared_memory("region")
    finally:
        shm.destroy_shared_memory_region(region)


def settings(client: triton.InferenceServerClient) -> None:
    """`get_trace_settings`, `get_log_settings`"""
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert client.get_log_settings().settings["log_error"].bool_param


CALLS: tuple[Callable[[triton.InferenceServerClient], None], ...] = (
    health,
    description,
    repository,
    pixels_of_all_types,
    images,
    names,
    several_inputs,
    parameters,
    classification,
    callbacks,
    streams,
    pings,
    shared_memory,
    settings,
)


def outcome(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    with triton.InferenceServerClient(sys.argv[1]) as client:
        json.dump({call.__name__: outcome(partial(call, client)) for call in CALLS}, sys.stdout)
