from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.calls import Admissions, CallAdmission
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import ModelNotFound, status_of
from xlaserve.wire.grpc import handlers, streaming, wire_format
from xlaserve.wire.grpc.infer_message import InferMessages
from xlaserve.wire.grpc.wire_format import LARGE_BYTES
from xlaserve_proto import open_inference_pb2 as oip_pb2
from xlaserve_proto import vision_pb2

OIP = oip_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICES = [
    OIP,
    vision_pb2.DESCRIPTOR.services_by_name["Vision"],
]


class Server:
    def __init__(self) -> None:
        self.generic: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.generic += handlers

    def found(self, service: Any) -> dict[str, Any]:
        """Returns the handlers of the methods of `service` as grpcio looks them up."""
        (handler,) = self.generic
        paths = {method.name: f"/{service.full_name}/{method.name}" for method in service.methods}
        return {
            name: handler.service(SimpleNamespace(method=path, invocation_metadata=())) for name, path in paths.items()
        }


class Servicer:
    """Has every method that it is asked for, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        async def method(message: Any, context: Any) -> Any:
            self.asked.append((name, message))
            answer = self.answers.get(name)
            return await answer(message) if callable(answer) else answer

        return method


class Aborted(Exception):
    pass


class Context:
    """A call whose client sends `messages`."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = [*messages]
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: Any = ()

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.trailing = metadata

    async def read(self) -> Any:
        return self.messages.pop(0) if self.messages else grpc.aio.EOF

    def trailing_metadata(self) -> None:
        pass

    async def abort(self, status: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self.status, self.details = status, details
        self.error = Aborted()  # as grpcio keeps it: with its traceback it holds each frame that it left
        raise self.error


@pytest.fixture(params=["received", "asked for"])
def message_memory(request: pytest.FixtureRequest) -> MessageMemory:
    """While many messages arrive, a handler asks for its own; else gRPC receives it before it calls the handler."""
    message_memory = MessageMemory(max_bytes=1_000_000, max_message_bytes=100_000, max_resident_bytes=10**12)
    message_memory.expect(10 if request.param == "asked for" else 0)
    return message_memory


async def call(handler: Any, context: Context) -> Any:
    """Calls a unary method's handler as grpcio does."""
    if handler.request_streaming:
        return await handler.stream_unary(None, context)
    data = await context.read()
    if data is grpc.aio.EOF:
        raise asyncio.CancelledError
    answered = handler.unary_unary(data, context)
    del data
    return await answered


def admit(max_calls: int = 100, max_transfer_s: float = 100.0, crowded_s: float = 10.0) -> Admissions:
    return Admissions(*(CallAdmission(max_calls, max_transfer_s, crowded_s) for _ in Admissions._fields))


def add(service: Any, servicer: Any, message_memory: MessageMemory, **options: Any) -> dict[str, Any]:
    server = Server()
    handlers.add(
        servicer, service, cast(Any, server), message_memory, admit(), authenticator=Authenticator(None), **options
    )
    assert [handler.service_name() for handler in server.generic] == [service.full_name]
    return server.found(service)


@pytest.mark.parametrize("service", SERVICES)
async def test_every_method_of_a_service_is_answered_by_the_one_of_its_name(
    service: Any, message_memory: MessageMemory
) -> None:
    servicer = Servicer()
    found = add(service, servicer, message_memory)
    for method in service.methods:
        handler = found[method.name]
        assert handler.response_streaming == method.server_streaming
        servicer.answers[method.name] = GetMessageClass(method.output_type)()
        await (handler.stream_stream(None, Context(b"")) if method.server_streaming else call(handler, Context(b"")))
    assert [name for name, _ in servicer.asked] == [method.name for method in service.methods]


async def test_methods_of_generated_code_are_left_to_grpc(message_memory: MessageMemory) -> None:
    service: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]

    class Health(health_pb2_grpc.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - named as in the contract
            raise AssertionError("not called")

    assert [name for name, handler in add(service, Health(), message_memory).items() if handler is not None] == [
        "Check"
    ]


@pytest.mark.parametrize("service", SERVICES)
async def test_messages_are_parsed_and_what_is_none_is_refused(service: Any, message_memory: MessageMemory) -> None:
    servicer = Servicer()
    for method in service.methods:
        servicer.answers[method.name] = GetMessageClass(method.output_type)()
    for name, handler in add(service, servicer, message_memory).items():
        if handler.response_streaming:
            continue
        assert await call(handler, Context(b"")) == b""
        assert servicer.asked[-1][0] == name
        asked = len(servicer.asked)
        for data in (b"\xff\xff\xff", b"\x0a\xff", b"\x0b" * LARGE_BYTES):
            context = Context(data)
            with pytest.raises(Aborted):
                await call(handler, context)
            assert context.status is grpc.StatusCode.INVALID_ARGUMENT
            assert len(servicer.asked) == asked
            assert message_memory.held_bytes == 0


async def test_messages_and_answers_are_those_of_the_method(message_memory: MessageMemory) -> None:
    servicer = Servicer()
    handler = add(vision_pb2.DESCRIPTOR.services_by_name["Vision"], servicer, message_memory)["Classify"]
    request = vision_pb2.ClassifyRequest(model="digits", images=[b"png"])
    response = servicer.answers["Classify"] = vision_pb2.ClassifyResponse(model="digits")
    assert await call(handler, Context(request.SerializeToString())) == response.SerializeToString()
    assert servicer.asked[-1] == ("Classify", request)
    with pytest.raises(Aborted):
        await call(handler, Context(b"\x0a\x02\xff\xfe"))  # a name that is not UTF-8


async def test_messages_and_large_answers_are_counted_while_they_are_held(message_memory: MessageMemory) -> None:
    servicer = Servicer()
    handler = add(vision_pb2.DESCRIPTOR.services_by_name["Vision"], servicer, message_memory)["Classify"]
    data = vision_pb2.ClassifyRequest(model="digits", images=[bytes(20_000)]).SerializeToString()
    held = []

    async def answer(request: vision_pb2.ClassifyRequest) -> vision_pb2.ClassifyResponse:
        held.append(message_memory.held_bytes)
        return vision_pb2.ClassifyResponse(model="m" * 50_000)

    async def answer_and_send() -> bytes:
        response = await call(handler, Context(data))
        assert message_memory.held_bytes == len(response)
        return bytes(response)

    servicer.answers["Classify"] = answer
    response = await asyncio.create_task(answer_and_send())
    assert vision_pb2.ClassifyResponse.FromString(response).model == "m" * 50_000
    assert held == [len(data)]
    await asyncio.sleep(0)
    assert message_memory.held_bytes == 0


async def test_unknown_fields_count(message_memory: MessageMemory) -> None:
    servicer = Servicer()
    handler = add(OIP, servicer, message_memory, parsers={"ModelInferRequest": InferMessages().parse})["ModelInfer"]
    held = []

    async def answer(request: Any) -> oip_pb2.ModelInferResponse:
        held.append(message_memory.held_bytes)
        return oip_pb2.ModelInferResponse()

    servicer.answers["ModelInfer"] = answer
    data = oip_pb2.ModelInferRequest(model_name="digits").SerializeToString() + b"\xb2\x06\xd0\x86\x03" + bytes(50_000)
    await call(handler, Context(data))
    assert held == [len(data)]
    assert message_memory.held_bytes == 0


async def test_a_method_that_raises_or_is_cancelled_releases_its_message(message_memory: MessageMemory) -> None:
    servicer = Servicer()
    handler = add(OIP, servicer, message_memory)["ModelReady"]

    async def fail(request: Any) -> None:
        raise asyncio.CancelledError if request.name == "c" else ModelNotFound("no such model")

    servicer.answers["ModelReady"] = fail
    for name, error in (("c", asyncio.CancelledError), ("a", Aborted)):
        with pytest.raises(error):
            await call(handler, Context(oip_pb2.ModelReadyRequest(name=name).SerializeToString()))
    assert message_memory.held_bytes == 0


async def test_a_method_may_answer_in_parts_of_the_message_on_the_wire(message_memory: MessageMemory) -> None:
    servicer = Servicer()
    handler = add(OIP, servicer, message_memory)["ModelReady"]
    for size in (3, LARGE_BYTES, wire_format.MAX_INLINE_BYTES):
        servicer.answers["ModelReady"] = [b"first", memoryview(bytes(size))]
        assert await call(handler, Context(b"")) == b"first" + bytes(size)


TOO_MUCH = oip_pb2.ModelInferRequest(raw_input_contents=[bytes(2_000_000)]).SerializeToString()
BEYOND_BOUNDS = [
    b"\x3a\x00" * 50_000,
    b"\x78\x00" * 50_000,
    oip_pb2.ModelReadyRequest(name="m" * 70_000).SerializeToString(),
]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady"])
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (TOO_MUCH, grpc.StatusCode.RESOURCE_EXHAUSTED),
        *[(data, grpc.StatusCode.INVALID_ARGUMENT) for data in BEYOND_BOUNDS],
    ],
)
async def test_what_is_not_taken_in_never_comes_to_its_method_and_is_counted(
    message_memory: MessageMemory, method: str, data: bytes, status: grpc.StatusCode
) -> None:
    refused: list[tuple[str, str]] = []
    failed: list[tuple[str, Exception]] = []
    servicer = Servicer()
    parsers = {"ModelInferRequest": InferMessages().parse}
    told = {"on_refused": lambda *args: refused.append(args), "on_failed": lambda *args: failed.append(args)}
    handler = add(OIP, servicer, message_memory, parsers=parsers, **told)[method]
    context = Context(data)
    with pytest.raises(Aborted):
        await call(handler, context)
    assert context.status is status
    assert refused == [(method, status.name)]
    assert [(name, status_of(error)[0].grpc) for name, error in failed] == refused
    assert not servicer.asked
    assert message_memory.held_bytes == 0


async def test_a_message_that_fails_to_be_parsed_is_released(message_memory: MessageMemory) -> None:
    def parse(data: bytes) -> object:
        raise MemoryError

    handler = add(OIP, Servicer(), message_memory, parsers={"ModelInferRequest": parse})["ModelInfer"]
    with pytest.raises(MemoryError):
        await call(handler, Context(b"data"))
    assert message_memory.held_bytes == 0


class Data(bytes):
    """Bytes that tell when they are freed."""

    freed = 0

    def __del__(self) -> None:
        Data.freed += 1


async def refuse(request: Any) -> None:
    raise ModelNotFound("no such model")


async def refuse_for_a_cause(request: Any) -> None:
    try:
        bytes(request.name)  # as a library that fails with the image in a frame of its own
    except TypeError as error:
        raise ModelNotFound("no such model") from error


async def refuse_while_handling(request: Any) -> None:
    def fail(held: Any) -> None:
        raise KeyError(len(held.name))

    try:
        fail(request)
    except KeyError:
        raise ModelNotFound("no such model")  # noqa: B904 - implicitly chained


@pytest.mark.parametrize("method", [refuse, refuse_for_a_cause, refuse_while_handling])
async def test_a_refused_message_is_freed_before_the_collector_comes(
    message_memory: MessageMemory, method: Any
) -> None:
    class Held:
        """What a message holds, and tells when it is freed."""

        name = "digits"

    held = [Held()]
    freed = weakref.ref(held[0])

    class Refusing(Servicer):
        async def ModelReady(self, request: Any, context: Any) -> None:  # noqa: N802 - named as in the contract
            await method(request)

    handler = add(OIP, Refusing(), message_memory, parsers={"ModelReadyRequest": lambda data: held.pop()})["ModelReady"]
    context = Context(Data(b"data"))
    freed_data = Data.freed
    gc.disable()
    try:
        with pytest.raises(Aborted):
            await call(handler, context)
        assert context.status is grpc.StatusCode.NOT_FOUND
        assert freed() is None
        assert Data.freed == freed_data + 1
    finally:
        gc.enable()


async def test_a_client_that_has_gone_is_not_answered(message_memory: MessageMemory) -> None:
    handler = add(OIP, Servicer(), message_memory)["ModelReady"]
    with pytest.raises(asyncio.CancelledError):
        await call(handler, Context())


async def test_a_stream_that_is_not_read_reads_no_further(
    message_memory: MessageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STREAM_BYTES", 1000)
    sent = [oip_pb2.ModelInferRequest(id="m" * 400).SerializeToString()] * 10
    context = Context(*sent)
    seen = asyncio.Event()
    messages: list[streaming.Messages] = []

    class Reads:
        async def ModelStreamInfer(  # noqa: N802 - named as in the contract
            self, requests: streaming.Messages, context: Any
        ) -> None:
            messages.append(requests)
            async for _, size_bytes in requests:
                requests.release(size_bytes)
                requests.hold(600)  # an answer, which nobody fetches
                seen.set()

        def __getattr__(self, name: str) -> None:
            return None

    handler = add(OIP, Reads(), message_memory)["ModelStreamInfer"]
    task = asyncio.create_task(handler.stream_stream(None, context))
    await seen.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(context.messages) == 8
    assert message_memory.held_bytes == 1200
    messages[0].release(600)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(context.messages) == 7
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert message_memory.held_bytes == 0


class Method:
    """The calls of a unary method, each in a task of its own, as grpcio has them."""

    def __init__(self, name: str, message_memory: MessageMemory, **options: Any) -> None:
        server, servicer = Server(), Servicer()
        servicer.answers[name] = oip_pb2.ModelReadyResponse()
        handlers.add(
            servicer, OIP, cast(Any, server), message_memory, admit(), authenticator=Authenticator(None), **options
        )
        (self._service,) = server.generic
        self._details = SimpleNamespace(method=f"/{OIP.full_name}/{name}", invocation_metadata=())

    async def begin(self, *messages: bytes) -> tuple[Any, asyncio.Event, asyncio.Task[Any]]:
        """Returns the handler of a call, the event that its `messages` or their end wait for, and the call's task."""
        handlers: list[Any] = []
        arrives = asyncio.Event()

        async def run() -> None:
            handlers.append(self._service.service(self._details))
            await arrives.wait()
            await call(handlers[0], Context(*messages))

        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        return handlers[0], arrives, task


@pytest.mark.parametrize("expected", [0, 10], ids=["received", "asked for"])
async def test_a_call_whose_message_never_arrives_is_told_of(expected: int) -> None:
    message_memory = MessageMemory(max_bytes=1_000_000, max_message_bytes=100_000, max_resident_bytes=10**12)
    message_memory.expect(expected)
    unreceived: list[str] = []
    method = Method("ModelReady", message_memory, on_unreceived=unreceived.append)
    _, arrives, arriving = await method.begin(b"")
    arrives.set()
    await arriving
    assert unreceived == []
    _, ends, ending = await method.begin()
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert unreceived == ["ModelReady"]
    assert message_memory.expected == expected


async def test_calls_whose_message_has_not_arrived_are_expected_until_they_end() -> None:
    message_memory = MessageMemory(max_bytes=300_000, max_message_bytes=100_000, max_resident_bytes=10**12)
    method = Method("ModelReady", message_memory)
    calls = [await method.begin(b"") for _ in range(5)]
    assert [handler.request_streaming for handler, _, _ in calls] == [False, False, False, True, True]
    assert message_memory.expected == 3
    (_, arrives, arriving), (_, _, leaving), *others = calls
    arrives.set()
    await arriving
    assert message_memory.expected == 2
    leaving.cancel()  # its client has gone
    await asyncio.wait([leaving])
    assert message_memory.expected == 1
    handler, _, last = await method.begin()
    assert not handler.request_streaming
    for task in (last, *(task for _, _, task in others)):
        task.cancel()
        await asyncio.wait([task])
    assert message_memory.expected == 0
