"""Callers' limits, and what says when to come again, as stock clients see them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from tests.integration.conftest import Server, StartServer

from xlaserve_client import AsyncVisionClient, Overloaded, VisionClient
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

SIDE = 224
NOOP = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2]}
CALLERS = {"slow": 4.0, "slower": 4.0, "retrying": 4.0, "patient": 10.0, "async": 10.0, "http": 4.0, "stream": 0.1}
"""Each test has a caller of its own, with this many images a second and bursts of one."""


def key_of(name: str) -> str:
    return f"xla_{name}"


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    file: Path = tmp_path_factory.mktemp("access") / "access.yaml"
    callers: list[dict[str, Any]] = [
        {
            "name": name,
            "key_sha256": hashlib.sha256(key_of(name).encode()).hexdigest(),
            "roles": ["infer"],
            "limits": [{"images_per_s": rate, "burst_images": 1}],
        }
        for name, rate in CALLERS.items()
    ]
    anybody = {"limits": [{"images_per_s": 0.1, "burst_images": 20}]}
    file.write_text(json.dumps({"callers": callers, "anybody": anybody}))
    return start_module_server({"models": [NOOP], "access": str(file)})


def metadata(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key_of(name)}"),)


def request(images: int = 1) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="noop", raw_input_contents=[bytes(images * SIDE * SIDE * 3)])
    found.inputs.add(name="pixels", datatype="UINT8", shape=[images, SIDE, SIDE, 3])
    return found


def refused(stub: GRPCInferenceServiceStub, name: str, images: int = 1) -> tuple[grpc.Call, float]:
    """Asks until the caller is over its limit; returns the failed call and when it was told to come again."""
    with pytest.raises(grpc.RpcError) as error:
        for _ in range(1000):
            stub.ModelInfer(request(images), metadata=metadata(name), timeout=30)
    call: Any = error.value
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, call.details()
    details = Status.FromString(dict(call.trailing_metadata())["grpc-status-details-bin"])
    assert (details.code, details.message) == (call.code().value[0], call.details())
    retry = RetryInfo()
    assert details.details[0].Unpack(retry)
    return call, retry.retry_delay.ToNanoseconds() / 1e9


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc, options=[("grpc.enable_retries", 0)]) as channel:
        yield GRPCInferenceServiceStub(channel)


def test_a_stock_client_that_comes_when_it_is_told_is_served(server: Server, stub: GRPCInferenceServiceStub) -> None:
    call, wait_s = refused(stub, "slow")
    assert 0 < wait_s <= 0.25
    trailing = dict(call.trailing_metadata())
    assert trailing["retry-after"] == "1"
    assert trailing["grpc-retry-pushback-ms"] == str(math.ceil(wait_s * 1000))
    assert call.details().startswith("1 more images exceed images_per_s 4 of this caller")
    time.sleep(wait_s)
    stub.ModelInfer(request(), metadata=metadata("slow"), timeout=30)
    assert server.metric("xlaserve_requests_limited_total", caller="slow", limit="images_per_s") == 1


def test_a_file_that_is_read_again_gives_nobody_more(start_server: StartServer, tmp_path: Path) -> None:
    file, key = tmp_path / "access.yaml", hashlib.sha256(key_of("shop").encode()).hexdigest()

    def write(images_per_s: float, models: list[str]) -> None:
        limits = [{"images_per_s": images_per_s, "burst_images": 1}]
        callers = [{"name": "shop", "key_sha256": key, "models": models, "limits": limits}]
        (tmp_path / "partial").write_text(json.dumps({"callers": callers}))
        (tmp_path / "partial").replace(file)

    write(0.001, ["noop"])
    server = start_server({"models": [NOOP], "access": str(file)})
    with grpc.insecure_channel(server.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert refused(stub, "shop")[1] > 500
        write(0.002, ["*"])
        readers = int(os.environ.get("FRONTS", "1"))  # each front reads it
        server.wait_for(lambda: server.stderr.count("access: read again") == readers, "the file was not read again")
        _, wait_s = refused(stub, "shop")
        assert 250 < wait_s <= 500
    assert server.metric("xlaserve_requests_limited_total", caller="shop") == 2


def test_a_large_request_is_taken_and_paid_for(stub: GRPCInferenceServiceStub) -> None:
    _, wait_s = refused(stub, "slower", images=20)
    assert 1 < wait_s <= 5  # the burst of 1 is missing, and the 20 that were taken


def test_grpc_s_own_retries_come_when_they_are_told(server: Server) -> None:
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "30s",
        "maxBackoff": "30s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    with grpc.insecure_channel(server.grpc, options=[("grpc.service_config", config)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for _ in range(4):
            stub.ModelInfer(request(), metadata=metadata("retrying"), timeout=20)


def test_the_client_waits_and_keeps_its_rate(server: Server) -> None:
    pixels = np.zeros((1, SIDE, SIDE, 3), np.uint8)
    with VisionClient(server.grpc, token=key_of("patient"), retry_overload=True, deadline_s=30) as client:
        began = time.monotonic()
        for _ in range(6):
            client.infer(pixels, model="noop")
        assert time.monotonic() - began >= 5 / CALLERS["patient"]
    with VisionClient(server.grpc, token=key_of("patient")) as hasty, pytest.raises(Overloaded) as error:
        for _ in range(100):
            hasty.infer(pixels, model="noop")
    assert 0 < (error.value.retry_after_s or 0) <= 1 / CALLERS["patient"]


async def test_the_asynchronous_client_waits_as_well(server: Server) -> None:
    pixels = np.zeros((1, SIDE, SIDE, 3), np.uint8)
    async with AsyncVisionClient(server.grpc, token=key_of("async"), retry_overload=True, deadline_s=60) as client:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(client.infer(pixels, model="noop"))
        assert time.monotonic() - began >= 5 / CALLERS["async"]


def infer_over_http(server: Server, times: int, address: str = "127.0.0.1", **headers: str) -> list[HTTPResponse]:
    """Sends 20 images in each request, over one connection from one of loopback's addresses; returns the answers."""
    raw = bytes(20 * SIDE * SIDE * 3)
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [20, SIDE, SIDE, 3]}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    host, port = server.http.rsplit(":", 1)
    connection = HTTPConnection(host, int(port), timeout=60, source_address=(address, 0))
    replies = []
    for _ in range(times):
        headers["inference-header-content-length"] = str(len(text))
        connection.request("POST", "/v2/models/noop/infer", text + raw, headers)
        replies.append(connection.getresponse())
        said = replies[-1].read()
        assert replies[-1].status == 200 or b"images_per_s" in said, said
    connection.close()
    return replies


def test_who_shows_no_credentials_is_limited_by_address(server: Server, stub: GRPCInferenceServiceStub) -> None:
    first, second = infer_over_http(server, 2, "127.0.0.2")
    assert (first.status, second.status) == (200, 429)
    assert 100 < int(second.getheader("retry-after") or 0) <= 200
    assert infer_over_http(server, 1, "127.0.0.3")[0].status == 200
    stub.ModelInfer(request(20), timeout=30)
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request(1), timeout=30)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.metric("xlaserve_requests_limited_total", caller="(others)", limit="images_per_s") == 2
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request(1), metadata=metadata("nobody"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as refused:
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="noop"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_http_says_when_to_come_again(server: Server) -> None:
    first, second = infer_over_http(server, 2, authorization=f"Bearer {key_of('http')}")
    assert (first.status, second.status) == (200, 429)
    assert 1 < int(second.getheader("retry-after") or 0) <= 5


def test_an_error_in_a_stream_says_when_to_come_again(stub: GRPCInferenceServiceStub) -> None:
    answers = stub.ModelStreamInfer(iter([request()] * 3), metadata=metadata("stream"), timeout=30)
    first, *rest = answers
    assert not first.error_message
    for answer in rest:
        assert answer.error_message.startswith("RESOURCE_EXHAUSTED")
        assert 0 < answer.infer_response.parameters["retry_after_s"].double_param <= 10
