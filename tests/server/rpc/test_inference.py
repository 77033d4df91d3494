from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from xlaserve.config import Mode, ModelSettings
from xlaserve.errors import (
    ExecutionFailed,
    InvalidArgument,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
    XlaserveError,
)
from xlaserve.pipeline import Answer, Request
from xlaserve.rpc.inference import Inference, answers_errors, explain
from xlaserve.rpc.status import INTERNAL_MESSAGE
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import ModelTelemetry

SETTINGS = ModelSettings(name="digits", source="builtin:digits", modes=(Mode.XLA, Mode.GRAPH))
NEVER = float("inf")


class World:
    """A repository with one model, a pipeline that does as it is told, and a clock that moves by 1 s at each look."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.served = SimpleNamespace(settings=SETTINGS, telemetry=ModelTelemetry(self.metrics, "digits"))
        self.is_loaded = True
        self.error: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.now = 0.0
        pipeline = SimpleNamespace(run=self._run, clock=self._clock)
        repository = SimpleNamespace(get=self._get, find=self._find)
        self.inference = Inference(repository, pipeline, self.metrics)

    def _clock(self) -> float:
        self.now += 1
        return self.now

    def _find(self, name: str, version: str = "") -> Any:
        if name != "digits":
            raise ModelNotFound(f"no model {name}")
        return self.served

    def _get(self, name: str, version: str) -> Any:
        found = self._find(name)
        if not self.is_loaded:
            raise ModelNotReady("model digits is loading")
        return found

    async def _run(self, served: Any, request: Request) -> Answer:
        if self.hold:
            await self.hold.wait()
        if self.error:
            raise self.error
        mode = Mode(request.mode or Mode.XLA)
        return Answer(
            served, mode, 3, (), (), (), decode_s=0.25, queue_s=0.5, gather_s=0.125, execute_s=1.0, render_s=0.0625
        )

    async def ask(self, model: str = "digits", mode: str = "", deadline: float = NEVER) -> Any:
        def parse(message: str, served: Any, deadline: float, now: float) -> Request:
            if message == "wrong":
                raise InvalidArgument("message", "a right one", message)
            return Request(mode, [b"image"], deadline)

        return await self.inference.run(
            "ModelInfer",
            "wrong" if mode == "wrong" else "right",
            *(model, "", deadline),
            parse=parse,
            respond=lambda message, answer: {"images": answer.images},
            stamp=lambda response, timings: response.update(timings=timings),
        )

    def counted(self, name: str = "xlaserve_requests_total") -> dict[tuple[str, ...], float]:
        """The labels of each series, without the method, and its value."""
        return {
            tuple(value for key, value in sample.labels.items() if key != "method"): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


@pytest.fixture
async def world() -> World:
    return World()


async def test_an_answer_is_stamped_with_its_stages_and_counted(world: World) -> None:
    response = await world.ask()
    timings = response["timings"]
    assert response["images"] == 3
    assert (timings.decode_s, timings.queue_s, timings.gather_s, timings.execute_s) == (0.25, 0.5, 0.125, 1.0)
    assert timings.encode_s == 0.0625 + 1.0, "rendering, and making the message"
    assert timings.total_s == 2.0
    assert world.counted() == {("digits", "xla", "OK"): 1}
    assert world.counted("xlaserve_images_total") == {("digits", "xla"): 3}
    assert world.served.telemetry.statistics.success.count == 1


@pytest.mark.parametrize(
    ("mode", "error", "labels"),
    [
        ("", QueueFull("full"), ("digits", "xla", "RESOURCE_EXHAUSTED")),
        ("graph", ExecutionFailed("raised"), ("digits", "graph", "INTERNAL")),
        ("eager", InvalidArgument("mode", "one of xla, graph", "eager"), ("digits", "", "INVALID_ARGUMENT")),
        ("anything", InvalidArgument("mode", "one of xla, graph", "x"), ("digits", "", "INVALID_ARGUMENT")),
        ("wrong", None, ("digits", "", "INVALID_ARGUMENT")),
        ("", ZeroDivisionError("a defect"), ("digits", "xla", "INTERNAL")),
        ("", asyncio.CancelledError(), ("digits", "xla", "CANCELLED")),
    ],
)
async def test_a_failure_is_counted_by_its_status_and_an_offered_mode(
    world: World, mode: str, error: BaseException | None, labels: tuple[str, ...]
) -> None:
    world.error = error
    with pytest.raises(type(error) if error else InvalidArgument):
        await world.ask(mode=mode)
    assert world.counted() == {labels: 1}
    assert world.served.telemetry.statistics.fail.count == 1
    assert world.inference.under_way == 0


async def test_a_model_that_is_not_ready_is_counted_by_its_name_and_an_unknown_one_is_not(world: World) -> None:
    world.is_loaded = False
    with pytest.raises(ModelNotReady):
        await world.ask()
    assert world.counted() == {("digits", "", "UNAVAILABLE"): 1}
    with pytest.raises(ModelNotFound):
        await world.ask("made up")
    assert world.counted() == {("digits", "", "UNAVAILABLE"): 1}
    assert world.counted("xlaserve_requests_refused_total") == {("NOT_FOUND",): 1}


async def test_draining_waits_for_what_is_under_way_and_refuses_what_comes(world: World) -> None:
    world.hold = asyncio.Event()
    accepted = [asyncio.create_task(world.ask()) for _ in range(3)]
    await asyncio.sleep(0)
    assert world.inference.under_way == 3
    draining = asyncio.create_task(world.inference.drain())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await world.ask()
    assert world.counted() == {("digits", "", "UNAVAILABLE"): 1}
    assert not draining.done()
    world.hold.set()
    await draining
    assert [(await answer)["images"] for answer in accepted] == [3, 3, 3]


async def test_quiet_waits_until_nobody_was_refused_for_a_while(virtual_time: Any) -> None:
    world = World()
    await world.inference.drain()

    async def knock() -> None:
        for _ in range(4):
            await asyncio.sleep(0.5)
            with pytest.raises(ShuttingDown):
                await world.ask()

    knocking = asyncio.create_task(knock())
    await world.inference.quiet(1.0)
    assert virtual_time.now == 3.0
    await knocking


async def test_a_cancelled_request_is_no_longer_under_way(world: World) -> None:
    world.hold = asyncio.Event()
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.inference.under_way == 0
    assert world.counted() == {("digits", "xla", "CANCELLED"): 1}


@pytest.mark.parametrize(("remaining_s", "deadline"), [(None, NEVER), (5.0, 6.0), (0.0, 1.0)])
async def test_the_deadline_is_on_the_clock_of_the_pipeline(
    world: World, remaining_s: float | None, deadline: float
) -> None:
    context: Any = SimpleNamespace(time_remaining=lambda: remaining_s)
    assert world.inference.deadline(context) == deadline


class Aborted(Exception):
    pass


class Call:
    """A context that, like grpc's, holds what it raised."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.raised = Aborted(code, details)
        raise self.raised


class Message:
    pass


class Servicer:
    error: Exception | None = None

    @answers_errors
    async def method(self, request: Message, context: Any) -> str:
        if self.error:
            raise self.error
        return "answer"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (QueueFull("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
        (XlaserveError("no leaf"), grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE),
        (ZeroDivisionError("/etc/secret"), grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE),
    ],
)
async def test_whatever_a_method_raises_is_answered_with_its_status(
    error: Exception, status: grpc.StatusCode, message: str
) -> None:
    servicer = Servicer()
    assert await servicer.method(Message(), Call()) == "answer"
    servicer.error = error
    with pytest.raises(Aborted) as caught:
        await servicer.method(Message(), Call())
    assert caught.value.args == (status, message)


async def test_bytes_that_could_not_be_parsed_are_an_invalid_argument() -> None:
    with pytest.raises(Aborted) as caught:
        await Servicer().method(None, Call())
    assert caught.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refused_request_is_freed_at_once() -> None:
    servicer, call, request = Servicer(), Call(), Message()
    servicer.error = QueueFull("full")
    freed = weakref.ref(request)
    arguments = [request]
    del request
    gc.disable()
    try:
        with pytest.raises(Aborted):
            await servicer.method(arguments.pop(), call)
        assert freed() is None
    finally:
        gc.enable()


def test_what_is_not_ours_to_explain_goes_to_the_log_and_what_is_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        explain(QueueFull("full"))
        assert caplog.records == []
        explain(ZeroDivisionError("a defect"))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


class GoneContext:
    """Of a client that is gone: nothing can be written to it."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full"),
        grpc.aio.InternalError("Failed grpc_call_start_batch"),
        ExceptionGroup("unhandled errors in a TaskGroup", [grpc.aio.InternalError("Failed grpc_call_start_batch")]),
    ],
)
async def test_a_client_that_is_gone_ends_its_call_without_an_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Servicer:
        @answers_errors
        async def method(self, request: Message, context: Any) -> None:
            raise error

    with pytest.raises(asyncio.CancelledError):
        await Servicer().method(Message(), GoneContext())
    assert not caplog.records
