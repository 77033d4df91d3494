"""How requests are distributed over connections, over real sockets on loopback."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from xlaserve_loadtest import cli
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.answers import Answer
from xlaserve_loadtest.targets.channel import Transport
from xlaserve_loadtest.targets.grpc_target import GrpcTarget
from xlaserve_loadtest.targets.target import ModelInfo

METHOD = "/test.Service/Answer"


class Peers(grpc.GenericRpcHandler):
    """Answers, and counts who asks."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            self.asked[context.peer()] += 1
            return data

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_requests_take_turns_over_all_connections_to_all_addresses(model_info: ModelInfo) -> None:
    served = [Peers(), Peers()]
    servers = [grpc.aio.server() for _ in served]
    addresses = []
    for server, peers in zip(servers, served, strict=True):
        server.add_generic_rpc_handlers((peers,))
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
    info = replace(model_info, transport=Transport(connections=3))
    try:
        async with GrpcTarget(METHOD, lambda data, info: Answer([]), 10.0).connect([info], addresses) as connection:
            replies = [await connection.send(Request(b"", 1, "xla")) for _ in range(12)]
    finally:
        for server in servers:
            await server.stop(None)
    assert [reply.target for reply in replies] == [0, 1] * 6
    assert [sorted(peers.asked.values()) for peers in served] == [[2, 2, 2]] * 2


@pytest.mark.parametrize("given", ["0", "-1", "1025", "many"])
def test_a_number_of_connections_that_makes_no_sense_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--target", "127.0.0.1:1", "--model", "m", "--connections", given])
    assert f"from 1 to 1,024, got {given!r}" in capsys.readouterr().err
