"""How long the largest valid requests keep others waiting: the longest ServerLive while each of them runs once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import grpc
import numpy as np
from grpc_reflection.v1alpha import reflection_pb2

from bench import http_stalls, processes
from bench.figures import Figure, at_most
from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import vision_pb2 as vision

SIDE: Final = http_stalls.SIDE
MAX_STALL_MS: Final = 20.0
"""Beyond what ServerLive takes on an idle server, and what grpcio takes to copy the message, which `bare` shows."""
UNLIMITED: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
OIP: Final = "/inference.GRPCInferenceService"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DEADLINE_S: Final = 120.0
SETTLE_S: Final = 0.2


def stalls(rounds: int) -> list[Figure]:
    """Milliseconds beyond the baseline, the median of `rounds`; `bare` is a servicer that does not even parse."""
    config = {
        "models": [
            {"name": "noop", "source": "builtin:noop", "buckets": (1, 16, 64)},
            {"name": "detector", "source": "builtin:shapes-detector", "max_detections": 1000},
            {"name": "segmenter", "source": "builtin:shapes-segmenter"},
        ]
    }
    figures = []
    with (
        processes.xlaserve(config) as server,
        processes.null() as bare,
        grpc.insecure_channel(server.address, UNLIMITED) as ours,
        grpc.insecure_channel(bare.address, UNLIMITED) as theirs,
    ):
        for over_http in http_stalls.cases():
            found = _longest(server.address, partial(http_stalls.send, server.http, over_http), rounds=rounds)
            print(f"  HTTP, {over_http.name}: {found[rounds // 2]:.1f} ms", flush=True)
            figures.append(at_most(f"stall of ServerLive, ms: HTTP, {over_http.name}", found, MAX_STALL_MS))
        for case in cases():
            to_bare = partial(_send, theirs, case._replace(method=f"{OIP}/ModelInfer"))
            floor = _longest(bare.address, to_bare, rounds=rounds, ping="ServerMetadata")
            found = _longest(server.address, partial(_send, ours, case), rounds=rounds)
            beyond = [max(0.0, ms - floor[rounds // 2]) for ms in found]
            print(
                f"  {case.name}: {found[rounds // 2]:.1f} ms, of which grpcio's own {floor[rounds // 2]:.1f}",
                flush=True,
            )
            figures.append(at_most(f"stall of ServerLive, ms: {case.name}", beyond, MAX_STALL_MS))
    return figures


class Case(NamedTuple):
    """What is sent while others wait."""

    name: str
    method: str
    payload: bytes
    at_once: int = 1
    """Calls side by side."""


def cases() -> Iterator[Case]:
    """Yields the largest valid requests; one whose image is none as well."""
    yield Case(
        "one Classify of 1,000 JPEGs, top_k 1000",
        "/xlaserve.v1.Vision/Classify",
        vision.ClassifyRequest(model="noop", images=[http_stalls.jpeg()] * 1000, top_k=1000).SerializeToString(),
    )
    yield Case("64 FP32 images", f"{OIP}/ModelInfer", _tensor("FP32", np.float32))
    yield Case("64 INT32 images", f"{OIP}/ModelInfer", _tensor("INT32", np.int32))
    yield Case("420 UINT8 images", f"{OIP}/ModelInfer", _tensor("UINT8", np.uint8, images=420))
    yield Case("13 typed FP32 images", f"{OIP}/ModelInfer", _typed("FP32", "fp32_contents"))
    yield Case("13 typed INT32 images", f"{OIP}/ModelInfer", _typed("INT32", "int_contents"))
    yield Case("13 typed INT32 images, 8 times at once", f"{OIP}/ModelInfer", _typed("INT32", "int_contents"), 8)
    yield Case(
        "classification of 400 images, 1000 classes",
        f"{OIP}/ModelInfer",
        _tensor("UINT8", np.uint8, images=400, classes=1000),
    )
    yield Case(
        "Detect in 1,000 images",
        "/xlaserve.v1.Vision/Detect",
        vision.DetectRequest(model="detector", images=[http_stalls.jpeg(128)] * 1000).SerializeToString(),
    )
    yield Case(
        "Segment of 1,000 images",
        "/xlaserve.v1.Vision/Segment",
        vision.SegmentRequest(
            model="segmenter", images=[http_stalls.jpeg(128)] * 1000, pixel_counts=True
        ).SerializeToString(),
    )
    yield Case(
        "60 MB that are no image",
        "/xlaserve.v1.Vision/Classify",
        vision.ClassifyRequest(model="noop", images=[bytes(60_000_000)]).SerializeToString(),
    )
    described = reflection_pb2.ServerReflectionRequest(host="h" * 16_000, file_containing_symbol=OIP[1:])
    yield Case("a reflection request with the largest answer", REFLECTION, described.SerializeToString())


def _request(datatype: str, images: int, classes: int) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name="noop")
    request.inputs.add(name="pixels", datatype=datatype, shape=(images, SIDE, SIDE, 3))
    if classes:
        request.outputs.add(name="scores").parameters["classification"].int64_param = classes
    return request


def _tensor(datatype: str, dtype: type[np.generic], images: int = 64, classes: int = 0) -> bytes:
    request = _request(datatype, images, classes)
    levels = np.random.default_rng(0).integers(0, 256, (images, SIDE, SIDE, 3), np.uint8)
    request.raw_input_contents.append(levels.astype(dtype).tobytes())
    return request.SerializeToString()


def _typed(datatype: str, field: str) -> bytes:
    images = 2**21 // (SIDE * SIDE * 3)
    request = _request(datatype, images, 0)
    levels = np.random.default_rng(0).integers(0, 256, images * SIDE * SIDE * 3, np.uint8)
    getattr(request.inputs[0].contents, field).extend(levels.tolist())
    return request.SerializeToString()


def _longest(address: str, send: Callable[[], None], *, rounds: int, ping: str = "ServerLive") -> list[float]:
    """Returns, in ascending order, the longest ping in milliseconds of each round, less the longest while idle."""
    longest = []
    with processes.asked(_ping, address, ping) as worst_ms:
        time.sleep(SETTLE_S)
        for _ in range(rounds):
            worst_ms()
            time.sleep(SETTLE_S)
            beside_nothing = worst_ms()
            send()
            longest.append(max(0.0, worst_ms() - beside_nothing))
    return sorted(longest)


def _send(channel: grpc.Channel, case: Case) -> None:
    if case.method == REFLECTION:
        ask: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(case.method)
        next(iter(ask(iter([case.payload]), timeout=DEADLINE_S)))
        return
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(case.method)
    for answer in [call.future(case.payload, timeout=DEADLINE_S) for _ in range(case.at_once)]:
        if (code := answer.code()) not in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT):
            raise RuntimeError(f"{case.name}: {code}")


def _ping(address: str, method: str, pipe: Connection) -> None:
    """Answers with the longest ping since it was last asked, in milliseconds."""
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., bytes] = channel.unary_unary(f"{OIP}/{method}")
        worst = 0.0
        while True:
            began = time.perf_counter()
            call(b"", timeout=DEADLINE_S, wait_for_ready=True)
            worst = max(worst, time.perf_counter() - began)
            if pipe.poll():
                pipe.recv()
                pipe.send(worst * 1000)
                worst = 0.0
