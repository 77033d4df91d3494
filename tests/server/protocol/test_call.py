from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.config import Mode, ModelSettings
from xlaserve.errors import (
    ExecutionFailed,
    InvalidArgument,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
)
from xlaserve.pipeline import Answer, Request
from xlaserve.protocol.call import Calls
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.model import ModelTelemetry
from xlaserve.timings import Timings

SETTINGS = ModelSettings(name="digits", source="builtin:digits", modes=(Mode.XLA, Mode.GRAPH))
NEVER = float("inf")


class World:
    """A repository with one model, a pipeline controlled by the test, and a clock that moves by 1 s at each look."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.version = SimpleNamespace(settings=SETTINGS, telemetry=ModelTelemetry(self.metrics, "digits"))
        self.is_loaded = True
        self.error: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.now = 0.0
        repository: Any = SimpleNamespace(get=self._get, find=self._find)
        self.calls = Calls(repository, self.metrics, self._clock)

    def _clock(self) -> float:
        self.now += 1
        return self.now

    def _find(self, name: str, version: str = "") -> Any:
        if name != "digits":
            raise ModelNotFound(f"no model {name}")
        return self.version

    def _get(self, name: str, version: str) -> Any:
        found = self._find(name)
        if not self.is_loaded:
            raise ModelNotReady("model digits is loading")
        return SimpleNamespace(version=found, settings=SETTINGS)

    async def _run(self, request: Request) -> Answer:
        if self.hold:
            await self.hold.wait()
        if self.error:
            raise self.error
        timings = Timings(decode_s=0.25, queue_s=0.5, gather_s=0.125, execute_s=1.0, encode_s=0.0625)
        return Answer(Mode(request.mode or Mode.XLA), 3, (), (), (), timings, at=self._clock())

    async def ask(self, model: str = "digits", mode: str = "", deadline: float = NEVER) -> Timings:
        """Does what each protocol does."""
        with self.calls.enter("ModelInfer", model, "", deadline) as call:
            if mode == "wrong":
                raise InvalidArgument("message", "a right one", mode)
            call.request = Request(mode, [b"image"], deadline)
            answer = await self._run(call.request)
            return call.end(answer)

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
    timings = await world.ask()
    assert (timings.decode_s, timings.queue_s, timings.gather_s, timings.execute_s) == (0.25, 0.5, 0.125, 1.0)
    assert timings.encode_s == 0.0625 + 1.0, "rendering, and making the message"
    assert timings.total_s == 2.0
    assert world.counted() == {("digits", "xla", "OK"): 1}
    assert world.counted("xlaserve_images_total") == {("digits", "xla"): 3}
    assert world.version.telemetry.statistics.success.count == 1


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
    assert world.version.telemetry.statistics.fail.count == 1
    assert world.calls.in_flight == 0


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
    assert world.calls.in_flight == 3
    draining = asyncio.create_task(world.calls.drain())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await world.ask()
    assert world.counted() == {("digits", "", "UNAVAILABLE"): 1}
    assert not draining.done()
    world.hold.set()
    await draining
    assert [(await answer).execute_s for answer in accepted] == [1.0, 1.0, 1.0]


async def test_quiet_waits_until_nobody_was_refused_for_a_while(virtual_time: Any) -> None:
    world = World()
    await world.calls.drain()

    async def knock() -> None:
        for _ in range(4):
            await asyncio.sleep(0.5)
            with pytest.raises(ShuttingDown):
                await world.ask()

    knocking = asyncio.create_task(knock())
    await world.calls.quiet(1.0)
    assert virtual_time.now == 3.0
    await knocking


async def test_a_cancelled_request_is_no_longer_under_way(world: World) -> None:
    world.hold = asyncio.Event()
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.calls.in_flight == 0
    assert world.counted() == {("digits", "xla", "CANCELLED"): 1}
