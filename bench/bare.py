"""The bare servicer: parses a ModelInferRequest and answers 1,000 floats, and does nothing else.

The yardstick of the server's overhead, in each flavour that grpcio offers.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import uvloop

from xlaserve_loadtest.targets.null_server import announce, serve_until_sigterm
from xlaserve_proto import open_inference_pb2 as pb

METHOD = "ModelInfer"
SERVICE = "inference.GRPCInferenceService"
SCORES = bytes(4000)
OPTIONS = (("grpc.max_receive_message_length", -1),)
THREADS = 16


def answer(request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
    """Returns the answer to anything."""
    response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.outputs.add(name="scores", datatype="FP32", shape=(1, 1000))
    response.raw_output_contents.append(SCORES)
    return response


def handler(method: object) -> grpc.GenericRpcHandler:
    """Returns the service with `method` as its only one."""
    unary = grpc.unary_unary_rpc_method_handler(
        method,  # type: ignore[arg-type]
        request_deserializer=pb.ModelInferRequest.FromString,
        response_serializer=pb.ModelInferResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: unary})


async def serve_asyncio(ready: Path) -> None:
    """Serves on the running loop until SIGTERM."""

    async def infer(request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        return answer(request, context)

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handler(infer),))
    await serve_until_sigterm(server, ready)


def serve_threads(ready: Path) -> None:
    """Serves on a thread pool until SIGTERM."""
    server = grpc.server(ThreadPoolExecutor(THREADS), options=OPTIONS)
    server.add_generic_rpc_handlers((handler(answer),))
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(ready, port)
    server.wait_for_termination()


if __name__ == "__main__":
    flavour, file = sys.argv[1], Path(sys.argv[2])
    if flavour == "threads":
        serve_threads(file)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if flavour == "uvloop" else None) as runner:
            runner.run(serve_asyncio(file))
