"""Messages that are wrong by a little, and bytes that are no messages."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from google.protobuf.message import Message
from tests.attack import samples
from tests.attack.client import HEALTH, INFERENCE, LOST, PREDICTION, SERVING_MODELS, VISION, Call, Client, leak
from tests.attack.registry import BUSY, OK, REFUSED, Round, attack

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import tensorflow_messages_pb2 as tensorflow
from xlaserve_proto import vision_pb2 as vision

IN_FLIGHT: Final = 16
ALLOWED: Final = REFUSED | {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
"""DEADLINE_EXCEEDED for a mutated `timeout`, RESOURCE_EXHAUSTED for a message that grew too large."""
METHODS: Final[dict[str, Message]] = {
    f"{INFERENCE}ServerLive": oip.ServerLiveRequest(),
    f"{INFERENCE}ServerReady": oip.ServerReadyRequest(),
    f"{INFERENCE}ServerMetadata": oip.ServerMetadataRequest(),
    f"{INFERENCE}ModelReady": oip.ModelReadyRequest(name="digits"),
    f"{INFERENCE}ModelMetadata": oip.ModelMetadataRequest(name="digits"),
    f"{INFERENCE}ModelConfig": oip.ModelConfigRequest(name="digits", version="1"),
    f"{INFERENCE}ModelStatistics": oip.ModelStatisticsRequest(name="digits"),
    f"{INFERENCE}RepositoryIndex": oip.RepositoryIndexRequest(ready=True),
    f"{INFERENCE}TraceSetting": oip.TraceSettingRequest(model_name="digits"),
    f"{INFERENCE}LogSettings": oip.LogSettingsRequest(),
    f"{INFERENCE}SystemSharedMemoryStatus": oip.SystemSharedMemoryStatusRequest(name="region"),
    f"{VISION}ListModels": vision.ListModelsRequest(),
    f"{VISION}Embed": vision.EmbedRequest(model="digits", images=[b"x"]),
    f"{VISION}Transcribe": vision.TranscribeRequest(model="digits", images=[b"x"]),
    f"{VISION}Locate": vision.LocateRequest(model="digits", images=[b"x"]),
    f"{VISION}Detect": vision.DetectRequest(model="digits", images=[b"x"]),
    f"{PREDICTION}GetModelMetadata": tensorflow.GetModelMetadataRequest(metadata_field=["signature_def"]),
    f"{PREDICTION}Regress": tensorflow.RegressionRequest(),
    f"{PREDICTION}MultiInference": tensorflow.MultiInferenceRequest(),
    f"{SERVING_MODELS}GetModelStatus": tensorflow.GetModelStatusRequest(),
    f"{SERVING_MODELS}HandleReloadConfigRequest": tensorflow.ReloadConfigRequest(),
}
"""Requests that change nothing, in addition to those of `samples`."""


class Window:
    """Calls under way, a bounded number, settled in their order."""

    def __init__(self, round: Round) -> None:
        self._round = round
        self._calls: deque[tuple[Call, str, dict[str, Any]]] = deque()

    def add(self, call: Call, what: str, **settle: Any) -> None:
        """Adds a call, to be settled as `Round.settle` takes it; settles the first where there are too many."""
        self._calls.append((call, what, settle))
        if len(self._calls) >= IN_FLIGHT:
            self._settle()

    def finish(self) -> None:
        """Settles them all."""
        while self._calls:
            self._settle()

    def _settle(self) -> None:
        call, what, settle = self._calls.popleft()
        self._round.settle(call, what, **settle)


@attack(allowed=ALLOWED, weight=3)
def mutated_messages(round: Round) -> None:
    """Valid requests with a field or two changed, among valid ones, which must be answered correctly."""
    with Client(round.server.grpc) as client:
        window, number = Window(round), 0
        while round.has_time:
            number += 1
            valid = samples.anything(round.random, has_shapes=round.has_shapes)
            name = f"message {number}: {valid.method.rpartition('/')[2]}"
            if round.random.random() < 0.3:
                call = client.send(valid.method, valid.message.SerializeToString())
                window.add(call, f"{name}, right", allowed=BUSY, check=valid.check)
                continue
            message = type(valid.message).FromString(valid.message.SerializeToString())
            for _ in range(round.random.choice((1, 1, 1, 2, 3))):
                samples.mutate(message, round.random)
            window.add(client.send(valid.method, message.SerializeToString()), f"{name}, mutated")
        window.finish()


@attack(allowed=ALLOWED, weight=2)
def damaged_bytes(round: Round) -> None:
    """Valid requests whose bytes are damaged, and noise, for every method."""
    with Client(round.server.grpc) as client:
        window, number = Window(round), 0
        while round.has_time:
            number += 1
            if round.random.random() < 0.6:
                valid = samples.anything(round.random, has_shapes=round.has_shapes)
                method, data = valid.method, valid.message.SerializeToString()
            else:
                method, message = round.random.choice(list(METHODS.items()))
                data = message.SerializeToString()
            if round.random.random() < 0.8:
                data = samples.damage(data, round.random)
            else:
                data = round.random.randbytes(round.random.choice((1, 3, 50, 5000, 100_000)))
            window.add(client.send(method, data), f"bytes {number}: {method.rpartition('/')[2]}")
        window.finish()


@attack(allowed=ALLOWED | {"UNIMPLEMENTED"})
def health_and_unknown_methods(round: Round) -> None:
    """Noise for health checks, and methods, names and paths that nobody has."""
    paths = (f"{HEALTH}Check", f"{HEALTH}Check", f"{VISION}Nope", "/", "/a", "//", "/a/b/c", f"/{'x' * 5000}/y", "/é/ü")
    with Client(round.server.grpc) as client:
        for number in range(100 if round.is_short else 1000):
            if not round.has_time:
                break
            path = round.random.choice(paths)
            if path.isascii():
                data = round.random.choice((b"", b"\xff\xff\xff", b"\x0a\x06digits", b"\x0a\x02\xff\xfe"))
                round.settle(client.send(path, data), f"path {number}: {path[:40]} {data!r}")


@attack(allowed=ALLOWED)
def streams(round: Round) -> None:
    """Streams of valid, wrong and damaged messages: as many answers as messages, in order, the valid ones correct."""
    with Client(round.server.grpc) as client:
        number = 0
        while round.has_time:
            number += 1
            sent: list[tuple[samples.Valid | None, bytes]] = []
            for _ in range(round.random.choice((0, 1, 3, 12))):
                valid = samples.infer(round.random, samples.digits(round.random))
                data = valid.message.SerializeToString()
                if round.random.random() < 0.5:
                    sent.append((valid, data))
                else:
                    sent.append((None, samples.damage(data, round.random)))
            _settle_stream(round, client, sent, f"stream {number}")


def _settle_stream(round: Round, client: Client, sent: list[tuple[samples.Valid | None, bytes]], what: str) -> None:
    answers = []
    try:
        answers.extend(client.stream(f"{INFERENCE}ModelStreamInfer", [data for _, data in sent]))
    except Exception as error:
        code = getattr(error, "code", lambda: None)()
        round.count(code.name if code else LOST, what, frozenset({OK}))
        return
    if len(answers) != len(sent):
        round.count(LOST, f"{what}: {len(sent)} messages, {len(answers)} answers")
        return
    for (valid, _), data in zip(sent, answers, strict=True):
        answer = oip.ModelStreamInferResponse.FromString(data)
        outcome = answer.error_message.partition(":")[0] or OK
        wrong = leak(answer.error_message)
        if valid is not None and outcome == OK:
            wrong = valid.check(answer.infer_response.SerializeToString())
        round.count(outcome, what, BUSY if valid else None, wrong)
