from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
from bench.bare import answer, handler
from bench.generator import closed_loop, pixels_request

from xlaserve_proto import open_inference_pb2 as pb


def test_requests_take_turns_on_connections() -> None:
    peers: Counter[str] = Counter()

    def infer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        peers[context.peer()] += 1
        return answer(request, context)

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((handler(infer),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        load = closed_loop(f"127.0.0.1:{port}", pixels_request("noop", 8), 2, requests=30, connections=3)
        server.stop(None).wait()
    assert load.requests >= 30
    assert len(peers) == 3
    assert max(peers.values()) - min(peers.values()) <= 1
