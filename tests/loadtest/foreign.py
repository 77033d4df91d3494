"""Somebody else's server: a model of text and a picture, without modes, that refuses what it did not declare.

Run as a process. It answers as typed numbers, as the protocol allows, and counts what it refused on standard error.
"""

# ruff: noqa: N802 (the methods of a gRPC servicer are named by its contract)

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

INPUTS: Final = {"ids": ("INT64", [-1, 16]), "photo": ("FP32", [-1, 3, 8, 8]), "hint": ("BYTES", [-1, 1])}
ITEM_BYTES: Final = {"ids": 8 * 16, "photo": 4 * 3 * 8 * 8}


class Foreign(oip_grpc.GRPCInferenceServiceServicer):
    def __init__(self, token: str | None) -> None:
        self._token = token

    def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Any) -> oip.ServerMetadataResponse:
        self._check_caller(context)
        return oip.ServerMetadataResponse(name="foreign", version="2")

    def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Any) -> oip.ModelMetadataResponse:
        self._check_caller(context)
        metadata = oip.ModelMetadataResponse(name=request.name)
        for name, (datatype, shape) in INPUTS.items():
            metadata.inputs.add(name=name, datatype=datatype, shape=shape)
        metadata.outputs.add(name="label", datatype="FP32", shape=[-1, 2])
        return metadata

    def ModelConfig(self, request: oip.ModelConfigRequest, context: Any) -> oip.ModelConfigResponse:
        self._check_caller(context)
        config = oip.ModelConfig(name=request.name, max_batch_size=8)
        for name in INPUTS:
            config.input.add(name=name, optional=name == "hint")
        return oip.ModelConfigResponse(config=config)

    def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        self._check_caller(context)
        if request.parameters:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown parameters: {sorted(request.parameters)}")
        images = request.inputs[0].shape[0]
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            datatype, shape = INPUTS[tensor.name]
            if (tensor.datatype, list(tensor.shape)) != (datatype, [images, *shape[1:]]):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{tensor.name}: {tensor.datatype} {tensor.shape}")
            if tensor.name in ITEM_BYTES and len(raw) != images * ITEM_BYTES[tensor.name]:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{tensor.name}: {len(raw)} bytes")
        if {"ids", "photo"} - {tensor.name for tensor in request.inputs}:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected ids and photo")
        response = oip.ModelInferResponse(model_name=request.model_name)
        output = response.outputs.add(name="label", datatype="FP32", shape=[images, 2])
        output.contents.fp32_contents.extend([0.25, 0.75] * images)
        return response

    def _check_caller(self, context: Any) -> None:
        if self._token and dict(context.invocation_metadata()).get("authorization") != self._token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected a token")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--token")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("KEY", "CERTIFICATE"))
    parser.add_argument("--trust", type=Path, help="certificates of clients, which must then have one")
    options = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(4))
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(Foreign(options.token), server)  # type: ignore[abstract]
    if options.tls:
        key, certificate = (path.read_bytes() for path in options.tls)
        trusted = options.trust.read_bytes() if options.trust else None
        credentials = grpc.ssl_server_credentials([(key, certificate)], trusted, trusted is not None)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    options.ready_file.write_text(json.dumps({"grpc": f"127.0.0.1:{port}", "pid": os.getpid()}))
    stop.wait()
    server.stop(grace=None)


if __name__ == "__main__":
    main()
