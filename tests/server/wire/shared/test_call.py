from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from xlaserve.admission.caller import CURRENT, Caller, Limit, Origin, Role
from xlaserve.admission.calls import CallAdmission
from xlaserve.config import Mode, ModelSettings, ShadowSettings
from xlaserve.engine.request import DEFAULT_PRIORITY
from xlaserve.engine.timings import Timings
from xlaserve.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    ExecutionFailed,
    InvalidArgument,
    LimitExceeded,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
    XlaserveError,
)
from xlaserve.pipeline.pipeline import Answer, Request
from xlaserve.telemetry import request_context
from xlaserve.telemetry.metrics import Metrics
from xlaserve.telemetry.tracing import Endpoint
from xlaserve.telemetry.version_metrics import ModelTelemetry
from xlaserve.wire.shared.call import Calls

SETTINGS = ModelSettings(name="digits", source="builtin:digits", modes=(Mode.XLA, Mode.GRAPH))
NEVER = float("inf")


class World:
    """A repository with one model, a pipeline controlled by the test, and a clock that moves by 1 s at each look."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.version = SimpleNamespace(settings=SETTINGS, telemetry=ModelTelemetry(self.metrics, "digits", "1"))
        self.settings = SETTINGS
        self.is_loaded = True
        self.error: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.now = 0.0
        self.ran: list[Request] = []
        directory: Any = SimpleNamespace(get=self._get, routed=self._get, find=self._find)
        pipeline: Any = SimpleNamespace(clock=self._clock, run=self._run)
        self.calls = Calls(directory, self.metrics, pipeline)

    def _clock(self) -> float:
        self.now += 1
        return self.now

    def _find(self, name: str, version: str = "") -> Any:
        if name != "digits" or version not in ("", "1"):
            raise ModelNotFound(f"no model {name} {version}")
        return self.version

    def _get(self, name: str, version_or_id: str) -> Any:
        found = self._find(name, version_or_id)
        if not self.is_loaded:
            raise ModelNotReady("model digits is loading")
        return SimpleNamespace(version=found, settings=self.settings, calls=0, leave=lambda: None)

    async def _run(self, served: Any, request: Request) -> Answer:
        self.ran.append(request)
        if self.hold:
            await self.hold.wait()
        if self.error:
            raise self.error
        timings = Timings(decode_s=0.25, queue_s=0.5, gather_s=0.125, execute_s=1.0, encode_s=0.0625)
        return Answer(Mode(request.mode or Mode.XLA), 3, (), (), (), timings, at=self._clock())

    async def ask(
        self, model: str = "digits", mode: str = "", deadline: float = NEVER, priority: int = DEFAULT_PRIORITY
    ) -> Timings:
        """Does what each protocol does."""
        with self.calls.enter("ModelInfer", model, "", deadline) as call:
            if mode == "wrong":
                raise InvalidArgument("message", "a right one", mode)
            answer = await call.run(Request(mode, [b"image"], deadline, priority=priority))
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
    assert world.counted() == {("digits", "1", "xla", "OK"): 1}
    assert world.counted("xlaserve_images_total") == {("digits", "1", "xla"): 3}
    assert world.version.telemetry.statistics.success.count == 1


@pytest.mark.parametrize(
    ("mode", "error", "labels"),
    [
        ("", QueueFull("full"), ("digits", "1", "xla", "RESOURCE_EXHAUSTED")),
        ("graph", ExecutionFailed("raised"), ("digits", "1", "graph", "INTERNAL")),
        ("eager", InvalidArgument("mode", "one of xla, graph", "eager"), ("digits", "1", "", "INVALID_ARGUMENT")),
        ("anything", InvalidArgument("mode", "one of xla, graph", "x"), ("digits", "1", "", "INVALID_ARGUMENT")),
        ("wrong", None, ("digits", "1", "", "INVALID_ARGUMENT")),
        ("", ZeroDivisionError("a defect"), ("digits", "1", "xla", "INTERNAL")),
        ("", asyncio.CancelledError(), ("digits", "1", "xla", "CANCELLED")),
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full"), "queue_full"),
        (DeadlineUnreachable("too much waits"), "deadline"),
        (DeadlineExceeded("dropped"), "late"),
        (ExecutionFailed("raised"), None),
    ],
)
async def test_refusals_for_overload_are_counted_by_their_reason(
    world: World, error: XlaserveError, reason: str | None
) -> None:
    world.error = error
    with pytest.raises(type(error)):
        await world.ask()
    assert world.counted("xlaserve_refusal_seconds_count") == ({("digits", "1", reason): 1} if reason else {})


async def test_a_model_not_ready_is_counted_by_name_and_an_unknown_one_is_not(world: World) -> None:
    world.is_loaded = False
    with pytest.raises(ModelNotReady):
        await world.ask()
    assert world.counted() == {("digits", "1", "", "UNAVAILABLE"): 1}
    with pytest.raises(ModelNotFound):
        await world.ask("made up")
    assert world.counted() == {("digits", "1", "", "UNAVAILABLE"): 1, ("", "", "", "NOT_FOUND"): 1}


async def test_what_was_answered_is_offered_to_a_shadow_and_what_failed_is_not(world: World) -> None:
    offered: list[tuple[Any, ...]] = []
    world.calls.shadows = SimpleNamespace(offer=lambda *offer: offered.append(offer))  # type: ignore[assignment]
    await world.ask()
    assert not offered, "the model has no shadow"
    world.settings = SETTINGS.model_copy(update={"shadow": ShadowSettings(mode=Mode.GRAPH)})
    world.error = ExecutionFailed("raised")
    with pytest.raises(ExecutionFailed):
        await world.ask()
    assert not offered
    world.error = None
    await world.ask()
    assert [(served.settings.name, images, mode) for served, images, mode in offered] == [
        ("digits", [b"image"], Mode.XLA)
    ]


async def test_a_request_is_routed_by_its_messages_id_or_else_its_calls(world: World) -> None:
    ids: list[str] = []

    def routed(name: str, request_id: str) -> Any:
        ids.append(request_id)
        return world._get(name, "")

    world.calls.directory.routed = routed  # type: ignore[method-assign]

    async def ask(header: str, own_id: str) -> None:
        request_context.begin(Endpoint("service/Method", {}), [("x-request-id", header)])
        with world.calls.enter("ModelInfer", "digits", "", NEVER, own_id):
            pass

    for header, own_id in [("", ""), ("call", ""), ("call", "message"), ("", "message"), ("not valid", "")]:
        await asyncio.create_task(ask(header, own_id))
    assert ids == ["", "call", "message", "message", ""]


async def test_draining_waits_for_what_is_under_way_and_refuses_what_comes(world: World) -> None:
    world.hold = asyncio.Event()
    accepted = [asyncio.create_task(world.ask()) for _ in range(3)]
    await asyncio.sleep(0)
    assert world.calls.in_flight == 3
    draining = asyncio.create_task(world.calls.drain())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await world.ask()
    assert world.counted() == {("digits", "1", "", "UNAVAILABLE"): 1}
    assert not draining.done()
    world.hold.set()
    await draining
    assert [(await answer).execute_s for answer in accepted] == [1.0, 1.0, 1.0]


async def test_draining_waits_for_requests_that_are_no_inference(world: World) -> None:
    with world.calls.awaited():
        draining = asyncio.create_task(world.calls.drain())
        await asyncio.sleep(0)
        assert (world.calls.in_flight, draining.done()) == (1, False)
    await draining
    assert world.calls.in_flight == 0


async def test_draining_accepts_requests_of_calls_that_began_before(world: World) -> None:
    admission = world.calls.admission = CallAdmission(8, 100.0, 10.0)
    arrived = asyncio.Event()

    async def ask(*, has_begun: bool = False) -> Timings:
        admission.enter(lambda calls, reason: None, has_begun=has_begun)
        await arrived.wait()
        return await world.ask()

    early = asyncio.create_task(ask())
    await asyncio.sleep(0)
    admission.drain()
    await world.calls.drain()
    begun, late = asyncio.create_task(ask(has_begun=True)), asyncio.create_task(ask())
    await asyncio.sleep(0)
    arrived.set()
    assert [(await one).execute_s for one in (early, begun)] == [1.0, 1.0]
    with pytest.raises(ShuttingDown):
        await late


async def test_draining_twice_waits_for_what_was_accepted_meanwhile(world: World) -> None:
    admission = world.calls.admission = CallAdmission(8, 100.0, 10.0)
    admission.drain()
    await world.calls.drain()
    world.hold = asyncio.Event()

    async def ask() -> Timings:
        admission.enter(lambda calls, reason: None, has_begun=True)
        return await world.ask()

    begun = asyncio.create_task(ask())
    await asyncio.sleep(0)
    draining = asyncio.create_task(world.calls.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    world.hold.set()
    await draining
    assert (await begun).execute_s == 1.0


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
    assert world.counted() == {("digits", "1", "xla", "CANCELLED"): 1}


@pytest.mark.parametrize("origin", Origin)
async def test_a_caller_is_held_to_its_limits_and_counted_by_a_name_of_the_file(world: World, origin: Origin) -> None:
    limits = (Limit(models=("digits",), images_per_s=1e-6, burst_images=2),)
    CURRENT.set(Caller("shop", frozenset(Role), limits=limits, origin=origin))
    for _ in range(2):
        await world.ask()
    with pytest.raises(LimitExceeded):
        await world.ask()
    assert len(world.ran) == 2
    assert world.counted() == {("digits", "1", "xla", "OK"): 2, ("digits", "1", "xla", "RESOURCE_EXHAUSTED"): 1}
    label = "shop" if origin is Origin.FILE else "(others)"
    assert world.counted("xlaserve_requests_limited_total") == {(label, "images_per_s"): 1}


async def test_a_cancelled_request_is_no_longer_under_way_for_its_caller(world: World) -> None:
    CURRENT.set(Caller("shop", frozenset(Role), limits=(Limit(max_images=1),)))
    world.hold = asyncio.Event()
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0)
    with pytest.raises(LimitExceeded):
        await world.ask()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.hold = None
    await world.ask()


@pytest.mark.parametrize(
    ("asked", "highest", "had"), [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 3, 3), (3, 1, 3), (2, 1, 2)]
)
async def test_a_priority_is_lowered_to_what_its_caller_may_have(
    world: World, asked: int, highest: int, had: int
) -> None:
    CURRENT.set(Caller("shop", frozenset(Role), priority=highest))
    await world.ask(priority=asked)
    assert [request.priority for request in world.ran] == [had]


async def test_where_nobody_is_asked_who_they_are_every_priority_can_be_had(world: World) -> None:
    for priority in (1, 2, 3):
        await world.ask(priority=priority)
    assert [request.priority for request in world.ran] == [1, 2, 3]
