"""Models as another process shows them: a repository is published, and mirrored on engines that are fakes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.server.models.house import House, model

from xlaserve.config import Mode
from xlaserve.errors import ModelFailed, ModelNotFound, ModelNotReady
from xlaserve.models.version import State
from xlaserve.processes.mirror import LOST, Mirror, RemoteModelEngine
from xlaserve.processes.published import Catalogue, Publisher
from xlaserve.telemetry.findings import Findings, Pair
from xlaserve.telemetry.metrics import MAX_VERSIONS_KEPT, Metrics


class Engine:
    """Runs nothing."""

    def __init__(self) -> None:
        self.releases = 0
        self.released = asyncio.Event()

    def release(self) -> None:
        self.releases += 1
        self.released.set()


class World:
    """A repository, and the mirror of a front."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.metrics = Metrics()
        self.changes = 0
        self.mirror = Mirror(self.metrics)
        self.mirror.follow(self._changed)
        self.engines: dict[int, Engine] = {}
        """By the numbers of loadings."""
        self._publisher = Publisher(house.repository)

    def _changed(self) -> None:
        self.changes += 1

    def catalogue(self) -> Catalogue:
        """Returns what the repository shows, as it travels."""
        return cast(Catalogue, pickle.loads(pickle.dumps(self._publisher.catalogue())))

    def take(self, catalogue: Catalogue | None = None) -> None:
        """Mirrors the repository as it is now."""
        shown = catalogue or self.catalogue()
        serving = [loading.number for loading in shown.loadings if loading.takes_requests]
        for number in serving:
            self.engines.setdefault(number, Engine())
        self.mirror.take(shown, {number: cast(RemoteModelEngine, self.engines[number]) for number in serving})

    def use_another_engine(self) -> None:
        """Has another process serve the same, with numbers of its own."""
        self._publisher = Publisher(self.house.repository, first=1001)

    def lose(self) -> None:
        """Ends the engine: the next one has others, with the same numbers."""
        self.mirror.lose()
        self.engines.clear()

    def engine(self, name: str = "a") -> Any:
        """Returns what runs the requests to a model."""
        return self.mirror.get(name).engine


@pytest.fixture
async def world(house: House) -> World:
    world = World(house)
    await house.repository.load_all()
    world.take()
    return world


def loading(catalogue: Catalogue) -> Catalogue:
    """Returns the catalogue of an engine that has only begun."""
    begun = [one._replace(state=State.LOADING, takes_requests=False) for one in catalogue.loadings]
    return catalogue._replace(is_ready=False, loadings=tuple(begun))


async def test_it_shows_what_the_repository_shows(world: World) -> None:
    (theirs,), (here,) = world.house.repository.index(), world.mirror.index()
    assert (here.title, here.state, here.settings) == (theirs.title, theirs.state, theirs.settings)
    assert [*here.ledger] == [*theirs.ledger]
    assert world.mirror.is_ready
    assert world.mirror.serving() == {"a": True}
    assert world.engine() is world.engines[1]
    assert world.changes == 1


async def test_what_has_not_changed_stays_the_same_object(world: World) -> None:
    served = world.mirror.get("a")
    world.take()
    assert world.mirror.get("a") is served


async def test_labels_and_shares_are_those_of_the_repository(make_house: Callable[..., House]) -> None:
    house = make_house()
    labels = {"stable": 1, "canary": 2}
    house.configured = [model("a", version=number, version_labels=labels) for number in (1, 2)]
    world = World(house)
    await house.repository.load_all()
    world.take()
    found = [world.mirror.get("a", name).settings.version for name in ("", "stable", "canary", "1", "2")]
    assert found == ["1", "1", "2", "1", "2"]
    assert world.mirror.labels("a") == house.repository.labels("a")


async def test_a_loading_that_ends_is_left_once_its_last_request_is_answered(world: World) -> None:
    theirs, here = world.house.repository.get("a"), world.mirror.get("a")
    theirs.calls += 1  # this front
    here.calls += 1
    reloading = asyncio.create_task(world.house.repository.load("a"))
    await world.house.sees(State.DRAINING)
    world.take()
    assert world.engine() is world.engines[2]
    await asyncio.sleep(0)
    assert not world.engines[1].releases
    here.leave()
    await world.engines[1].released.wait()
    world.take()
    theirs.leave()
    await reloading
    world.take()
    await asyncio.sleep(0)
    assert [world.engines[number].releases for number in (1,)] == [1]
    assert not world.mirror._retiring


async def test_what_an_engine_that_has_ended_served_is_still_found_and_not_ready(world: World) -> None:
    engine = world.engine()
    world.lose()
    assert world.engine() is engine
    assert not world.mirror.is_ready
    assert world.mirror.serving() == {"a": False}
    (version,) = world.mirror.index()
    assert (version.state, version.reason) == (State.LOADING, LOST)
    assert world.changes == 2
    world.lose()
    assert world.changes == 2


async def test_another_engine_takes_its_place_once_it_is_ready(world: World) -> None:
    before = world.engine()
    world.lose()
    world.take(loading(world.catalogue()))
    assert world.engine() is before, "which says that it has ended"
    world.take()
    assert world.engine() is world.engines[1] is not before
    assert world.mirror.is_ready


async def test_a_model_that_another_engine_can_t_load_has_failed(world: World) -> None:
    world.lose()
    shown = loading(world.catalogue())
    failed = [one._replace(state=State.FAILED, reason="no such file") for one in shown.loadings]
    world.take(shown._replace(loadings=tuple(failed)))
    with pytest.raises(ModelFailed, match="no such file"):
        world.mirror.get("a")


async def test_a_model_that_another_engine_does_not_have_is_unknown(world: World) -> None:
    world.lose()
    world.take(Catalogue(False, (), {}, {}))
    with pytest.raises(ModelNotFound):
        world.mirror.get("a")


async def test_a_model_that_is_unloaded_is_not_ready(world: World) -> None:
    await world.house.repository.unload("a")
    world.take()
    assert not world.mirror.is_ready
    with pytest.raises(ModelNotReady, match="unloaded"):
        world.mirror.get("a")


async def test_all_requests_move_at_once_to_an_engine_in_the_place_of_another(world: World) -> None:
    before = world.mirror.get("a")
    before.calls += 1
    assert world.mirror.in_use() == [before]
    world.use_another_engine()
    world.take()
    assert world.engine() is world.engines[1001]
    assert world.mirror.is_ready
    assert world.changes == 2
    left = asyncio.create_task(before.left())
    await asyncio.sleep(0)
    assert not left.done()
    before.leave()
    await left
    assert not world.engines[1].releases, "its link ends, and releases all with that"


async def test_what_was_counted_of_versions_that_have_left_is_forgotten(world: World) -> None:
    shown = world.catalogue()
    (one,) = shown.loadings
    facts = pickle.loads(one.facts)
    for number in range(1, MAX_VERSIONS_KEPT + 3):
        settings = facts.settings.model_copy(update={"version": str(number)})
        there = one._replace(number=number + 1, facts=pickle.dumps(facts._replace(settings=settings)))
        world.take(shown._replace(loadings=(there,)))
        world.metrics.compilations.labels("a", str(number), "xla", "start").inc()
    world.mirror.see_versions()
    counted = {sample.labels["version"] for sample in next(iter(world.metrics.compilations.collect())).samples}
    assert "1" not in counted
    assert str(MAX_VERSIONS_KEPT + 2) in counted


async def test_findings_of_a_shadow_end_when_another_loading_replaces_it(make_house: Callable[..., House]) -> None:
    house = make_house()
    house.configured = [model("a", version=number) for number in (1, 2)]
    world = World(house)
    await house.repository.load_all()
    world.take()
    one, _ = world.mirror.versions("a")
    pairs = [Pair(Mode.XLA, version, Mode.GRAPH) for version in ("1", "2")]
    one.shadows = {pair: Findings() for pair in pairs}
    world.take()
    assert [*one.shadows] == pairs
    house.configured = [model("a", version=1), model("a", version=2, max_queue_delay_ms=1.0)]
    await house.repository.reconfigure(house.configured)
    world.take()
    assert world.mirror.versions("a")[0] is one
    assert [*one.shadows] == pairs[:1]
