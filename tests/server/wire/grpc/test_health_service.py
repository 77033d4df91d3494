from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2 as pb

from xlaserve.admission.caller import CURRENT, STRANGER, Caller
from xlaserve.errors import NotFound, ShuttingDown
from xlaserve.wire.grpc.health_service import LIVENESS, SERVER, Health
from xlaserve.wire.grpc.open_streams import OpenStreams

SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class World:
    """What the health reads."""

    def __init__(self) -> None:
        self.is_ready, self.is_live = False, True
        self.models: dict[str, bool] = {}
        self.streams = OpenStreams()
        self.health = Health(lambda: self.is_ready, lambda: self.models, self.streams, lambda: self.is_live)

    async def check(self, service: str) -> int:
        response = await self.health.Check(pb.HealthCheckRequest(service=service), cast(Any, None))
        return response.status

    async def list(self) -> dict[str, int]:
        response = await self.health.List(cast(Any, pb).HealthListRequest(), cast(Any, None))
        return {service: one.status for service, one in response.statuses.items()}

    def watch(self, service: str) -> Any:
        return self.health.Watch(pb.HealthCheckRequest(service=service), cast(Any, None))


@pytest.fixture
async def world() -> World:
    return World()


async def test_services_follow_the_server_and_models_follow_themselves(world: World) -> None:
    assert [await world.check(service) for service in SERVER] == [NOT_SERVING] * len(SERVER)
    world.is_ready, world.models = True, {"digits": True, "broken": False}
    assert await world.check("") == NOT_SERVING
    world.health.refresh()
    assert [await world.check(service) for service in SERVER] == [SERVING] * len(SERVER)
    assert (await world.check("digits"), await world.check("broken")) == (SERVING, NOT_SERVING)


async def test_liveness_is_there_from_the_start_to_the_end(world: World) -> None:
    assert await world.check(LIVENESS) == SERVING
    world.models = {LIVENESS: False}
    world.health.refresh()
    world.health.stop()
    assert await world.check(LIVENESS) == SERVING


async def test_liveness_ends_where_the_server_can_not_replace_what_ends(world: World) -> None:
    world.is_ready, world.models, world.is_live = True, {"digits": True}, False
    world.health.refresh()
    assert [await world.check(service) for service in (LIVENESS, "", "digits")] == [NOT_SERVING, SERVING, SERVING]
    world.is_live = True
    world.health.refresh()
    assert await world.check(LIVENESS) == SERVING


async def test_a_model_that_is_called_as_a_service_is_asked_for_with_a_prefix(world: World) -> None:
    world.is_ready, world.models = True, {LIVENESS: False, SERVER[1]: False, "digits": True}
    world.health.refresh()
    assert [await world.check(service) for service in (LIVENESS, SERVER[1])] == [SERVING] * 2
    asked = [await world.check(f"model:{name}") for name in (LIVENESS, SERVER[1], "digits")]
    assert asked == [NOT_SERVING, NOT_SERVING, SERVING]
    assert (await world.list()).keys() == {*SERVER, LIVENESS, f"model:{LIVENESS}", f"model:{SERVER[1]}", "digits"}


async def test_an_unknown_service_is_not_found(world: World) -> None:
    with pytest.raises(NotFound, match="no such service"):
        await world.check("nope")


async def test_a_list_shows_the_services_that_the_caller_may_know_of(world: World) -> None:
    world.is_ready, world.models = True, {"digits": True, "broken": False}
    world.health.refresh()
    open_to_all = {**dict.fromkeys(SERVER, SERVING), LIVENESS: SERVING}
    assert await world.list() == {**open_to_all, "digits": SERVING, "broken": NOT_SERVING}
    for caller, seen in ((STRANGER, {}), (Caller("shop", frozenset(), ("dig*",)), {"digits": SERVING})):
        token = CURRENT.set(caller)
        try:
            assert await world.list() == {**open_to_all, **seen}
        finally:
            CURRENT.reset(token)


async def test_stopping_is_for_good(world: World) -> None:
    world.is_ready, world.models = True, {"digits": True}
    world.health.refresh()
    world.health.stop()
    world.health.refresh()
    assert (await world.check(""), await world.check("digits")) == (NOT_SERVING, NOT_SERVING)


async def test_a_watcher_is_told_of_changes_only(world: World) -> None:
    watched = world.watch("digits")
    assert (await anext(watched)).status == SERVICE_UNKNOWN
    world.models = {"digits": False}
    world.health.refresh()
    assert (await anext(watched)).status == NOT_SERVING
    waiting = anext(watched)
    world.health.refresh()  # tells nothing new
    world.models = {"digits": True}
    world.health.refresh()
    assert (await waiting).status == SERVING


async def test_a_watcher_that_reads_late_gets_the_last_state_and_holds_nobody_up(world: World) -> None:
    slow, fast = world.watch("digits"), world.watch("digits")
    assert (await anext(slow)).status == (await anext(fast)).status == SERVICE_UNKNOWN
    for is_serving in (True, False, True):
        world.models = {"digits": is_serving}
        world.health.refresh()
        assert (await anext(fast)).status == (SERVING if is_serving else NOT_SERVING)
    assert (await anext(slow)).status == SERVING


async def test_a_watch_ends_with_a_status_and_after_the_last_state(world: World) -> None:
    seen: list[int] = []

    async def follow() -> None:
        async for response in world.watch("digits"):
            seen.append(response.status)  # noqa: PERF401 - each as it comes

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    world.models = {"digits": False}
    world.health.stop()
    await asyncio.sleep(0)
    await world.streams.end(timeout_s=20)
    with pytest.raises(ShuttingDown):
        await following
    assert seen == [SERVICE_UNKNOWN, NOT_SERVING]
