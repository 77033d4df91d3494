"""A scripted server: answers after a delay, fails, hangs, dies, never gets ready. Run as a process."""

# ruff: noqa: N802 (the methods of a gRPC servicer are named by its contract)

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, start_http_server

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Puppet(oip_grpc.GRPCInferenceServiceServicer):
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.count = self.under_way = 0
        self.random = random.Random(0)
        self.metrics = CollectorRegistry()
        self.compilations = Counter("xlaserve_compilations", "", ("model", "phase"), registry=self.metrics)
        self.xla_compilations = Counter("xlaserve_xla_compilations", "", ("phase",), registry=self.metrics)
        self.compilations.labels("digits", "warm_up").inc(4)
        self.xla_compilations.labels("expected").inc(4)
        self.xla_compilations.labels("serving")

    def latency_s(self) -> float:
        """From the three quantiles p50, p90 and p99 that were asked for, so that exactly these come out."""
        delays_s: list[float] | None = self.options.delays_s
        if not delays_s:
            return float(self.options.delay_s)
        place = self.random.random()
        return delays_s[0] if place < 0.7 else delays_s[1] if place < 0.95 else delays_s[2]

    def numbers(self, count: int) -> bytes:
        options = self.options
        if options.random_numbers:
            return struct.pack(f"<{count}f", *(self.random.random() for _ in range(count)))
        if options.differ_at_once and self.under_way >= options.differ_at_once:
            return struct.pack("<f", 1.0) * count
        # Bytes of 0xff are not a number.
        return (b"\xff" if options.wrong_numbers else b"\0") * (4 * count)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="puppet", version="1")

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        if request.name not in self.options.models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        side = -1 if self.options.any_size else 32
        metadata = oip.ModelMetadataResponse(
            name=request.name, properties={"modes": self.options.models[request.name], "buckets": "1x32x32,8x32x32"}
        )
        metadata.inputs.add(name="image", datatype="BYTES", shape=[-1])
        metadata.inputs.add(name="pixels", datatype="UINT8", shape=[-1, side, side, 3])
        metadata.outputs.add(name="scores", datatype="FP32", shape=[-1, 10])
        return metadata

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        options, received_ns = self.options, time.monotonic_ns()
        self.count += 1
        mode = request.parameters["mode"].string_param
        if mode == "eager":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "mode: expected xla or graph, got eager")
        if options.log:
            (tensor,) = request.inputs
            digest = hashlib.sha256(request.raw_input_contents[0]).hexdigest()
            with options.log.open("a") as log:
                log.write(
                    json.dumps([received_ns, request.model_name, mode, tensor.name, [*tensor.shape], digest]) + "\n"
                )
        if self.count == options.die_after:
            os._exit(9)
        if self.count == options.interrupt_after:
            os.kill(os.getppid(), signal.Signals[options.interrupt_with])
        if self.count == options.compile_after:
            self.compilations.labels("digits", "background").inc(2)
            self.compilations.labels("another", "background").inc(5)
            self.xla_compilations.labels("expected").inc(7)
        if self.count == options.recompile_after:
            self.xla_compilations.labels("serving").inc(3)
        if self.count == options.stop_after:
            # A stopped process can't wake itself.
            wake = f"sleep {options.stop_s}; kill -CONT {os.getpid()}"
            await asyncio.create_subprocess_exec("sh", "-c", wake)
            os.kill(os.getpid(), signal.SIGSTOP)
        if options.hang_after is not None and self.count > options.hang_after:
            await asyncio.Event().wait()
        if options.refuse:
            await context.abort(grpc.StatusCode[options.refuse], "on purpose")
        is_failing = bool(options.fail_every) and self.count % options.fail_every == 0
        is_failing |= options.fail_after is not None and self.count > options.fail_after
        if is_failing or self.count <= options.fail_first:
            await context.abort(grpc.StatusCode.INTERNAL, "broken on purpose")
        self.under_way += 1
        await asyncio.sleep(self.latency_s())
        if options.answer_log:
            with options.answer_log.open("a") as log:
                log.write(f"{received_ns} {time.monotonic_ns()}\n")
        images = request.inputs[0].shape[0]
        self.under_way -= 1
        response = oip.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.parameters["mode"].string_param = mode
        response.parameters["execute_s"].double_param = options.delay_s
        response.parameters["total_s"].double_param = options.delay_s
        rows = images + 1 if options.wrong_shape else images
        response.outputs.add(name="scores", datatype="FP32", shape=[rows, 10])
        response.raw_output_contents.append(self.numbers(10 * rows))
        return response


async def serve(options: argparse.Namespace) -> None:
    server = grpc.aio.server()
    puppet = Puppet(options)  # type: ignore[abstract]  # gRPC answers UNIMPLEMENTED for the other methods
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(puppet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http, _ = start_http_server(0, "127.0.0.1", puppet.metrics)
    stop = asyncio.Event()
    on_term = (lambda: None) if options.ignore_sigterm else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    if not options.never_ready:
        addresses = {"grpc": f"127.0.0.1:{port}", "metrics": f"127.0.0.1:{http.server_port}"}
        options.ready_file.write_text(json.dumps({**addresses, "pid": os.getpid()}))
    await stop.wait()
    await server.stop(grace=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--grpc-port")
    parser.add_argument("--http-port")
    parser.add_argument("--metrics-port")
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--delay-s", type=float, default=0.002)
    parser.add_argument("--interrupt-with", default="SIGINT")
    parser.add_argument("--stop-s", type=float, default=1.0)
    parser.add_argument("--fail-first", type=int, default=0, metavar="N")
    parser.add_argument("--differ-at-once", type=int, help="answers other numbers while so many others wait")
    parser.add_argument("--refuse", help="status of every inference")
    parser.add_argument("--fail-every", type=int, default=0, metavar="N")
    parser.add_argument("--fail-after-starts", nargs=2, metavar=("N", "FILE"))
    parser.add_argument("--delays-s", type=float, nargs=3)
    parser.add_argument("--models", type=json.loads, default={"digits": "xla,graph"}, help="modes by model, as JSON")
    parser.add_argument("--log", type=Path, help="gets a line for each request: when, model, mode, input, shape, hash")
    parser.add_argument("--answer-log", type=Path, help="gets a line for each answer: when it was asked for, and given")
    for what in ("die", "fail", "hang", "interrupt", "stop", "compile", "recompile"):
        parser.add_argument(f"--{what}-after", type=int)
    for flag in (
        "--any-size",
        "--wrong-shape",
        "--wrong-numbers",
        "--random-numbers",
        "--fail-at-start",
        "--interrupt-at-start",
        "--never-ready",
        "--ignore-sigterm",
    ):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.fail_after_starts:
        number, file = options.fail_after_starts
        with Path(file).open("a+") as starts:
            starts.write("x")
            options.fail_at_start = starts.tell() > int(number)
    if options.fail_at_start:
        sys.exit(f"no model could be loaded from {options.config.read_text()}")
    print("puppet: starting", flush=True)
    if options.interrupt_at_start:
        os.kill(os.getppid(), signal.SIGINT)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
