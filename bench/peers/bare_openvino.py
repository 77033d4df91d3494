"""What somebody builds who knows the CPU: a servicer of grpcio on asyncio and uvloop around OpenVINO, and nothing else.

`python -m bench.peers.bare_openvino SAVED PORT HINT`, in an environment of its own. An image a request, and no batches:
OpenVINO runs as many at a time as suits its performance hint.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any, Final

import grpc
import numpy as np
import openvino as ov
import uvloop

from bench.peers.compiled import SHAPE, compile_saved
from xlaserve_proto import open_inference_pb2 as pb

SERVICE: Final = "inference.GRPCInferenceService"
METHOD: Final = "ModelInfer"
OPTIONS: Final = (("grpc.max_receive_message_length", -1),)


async def serve(saved: str, port: int, hint: str) -> None:
    """Serves until SIGTERM."""
    loop = asyncio.get_running_loop()
    queue: Any = ov.AsyncInferQueue(compile_saved(saved, 1, PERFORMANCE_HINT=hint))
    free = asyncio.Semaphore(len(queue))

    def ran(request: Any, answered: asyncio.Future[bytes]) -> None:
        loop.call_soon_threadsafe(answered.set_result, request.get_output_tensor(0).data.tobytes())

    queue.set_callback(ran)

    async def infer(request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        pixels = np.frombuffer(request.raw_input_contents[0], np.uint8).reshape(1, *SHAPE)
        answered: asyncio.Future[bytes] = loop.create_future()
        async with free:  # else to start one would block the loop
            queue.start_async({0: pixels}, answered)
            scores = await answered
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="scores", datatype="FP32", shape=(1, len(scores) // 4))
        response.raw_output_contents.append(scores)
        return response

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.unary_unary_rpc_method_handler(
        infer,
        request_deserializer=pb.ModelInferRequest.FromString,
        response_serializer=pb.ModelInferResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    ending = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    await server.start()
    await ending.wait()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
