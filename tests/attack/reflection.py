"""Reflection: what it answers is made of what clients ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2
from tests.attack import samples
from tests.attack.client import LOST, Client, leak
from tests.attack.connections import check_serving, serving
from tests.attack.fuzz import ALLOWED
from tests.attack.registry import BUSY, OK, Round, attack

REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NAMES: Final = (
    *("xlaserve.v1.Vision", "inference.GRPCInferenceService", "grpc.health.v1.Health"),
    *("inference.ModelInferRequest", "open_inference.proto", "vision.proto", "google/protobuf/descriptor.proto"),
    *("", ".", "..", "/etc/passwd", "../../etc/passwd", "nope", "a.b.c.d", "xlaserve.v1.Vision.Nope", "\0", "é"),
)
FLOOD: Final = 500


@attack(allowed=ALLOWED)
def reflection(round: Round) -> None:
    """Random, damaged and large requests, and symbols that do not exist: each is answered, or the stream refused."""
    with serving(round) as client:
        number = 0
        while round.has_time:
            number += 1
            _ask(round, client, [_reflection(round) for _ in range(round.random.choice((0, 1, 3, 20)))], f"{number}")
            if number % 20 == 0:
                check_serving(round, client)


@attack(allowed=BUSY)
def reflection_floods(round: Round) -> None:
    """Streams of thousands of requests for the largest file, several at a time."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
    sent = [request.SerializeToString()] * (FLOOD // 10 if round.is_short else FLOOD)

    def flood(number: int) -> None:
        with Client(round.server.grpc) as client:
            _ask(round, client, sent, f"flood {number}")

    with serving(round) as client, ThreadPoolExecutor(4) as pool:
        while round.has_time:
            floods = [pool.submit(flood, number) for number in range(4)]
            check_serving(round, client)
            for each in floods:
                each.result()


def _reflection(round: Round) -> bytes:
    message = reflection_pb2.ServerReflectionRequest(host=round.random.choice(("", "x", "y" * 1000)))
    field = round.random.choice(message.DESCRIPTOR.oneofs_by_name["message_request"].fields)
    name = round.random.choice((*NAMES, "x" * 20_000))
    if field.message_type is not None:
        getattr(message, field.name).containing_type = name
        getattr(message, field.name).extension_number = round.random.choice((0, 1, -1, 2**31 - 1))
    else:
        setattr(message, field.name, name)
    return _bytes(round, message)


def _bytes(round: Round, message: Message) -> bytes:
    data = message.SerializeToString()
    kind = round.random.random()
    if kind < 0.7:
        return data
    if kind < 0.9:
        return samples.damage(data, round.random)
    return round.random.randbytes(round.random.choice((1, 50, 100_000)))


def _ask(round: Round, client: Client, sent: list[bytes], what: str) -> None:
    answers = []
    try:
        answers.extend(client.stream(REFLECTION, sent))
    except Exception as error:
        code, details = (getattr(error, name, lambda: None)() for name in ("code", "details"))
        round.count(code.name if code else LOST, f"{what}: {details}", wrong=leak(details or ""))
        return
    complete = len(answers) == len(sent)
    round.count(OK if complete else LOST, f"{what}: {len(sent)} requests, {len(answers)} answers")
