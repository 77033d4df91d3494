"""The models of several engines as those of one, on catalogues that are made up."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any, cast

from tests.server.models.house import model

from xlaserve.config import Bucket
from xlaserve.models.catalog import Model
from xlaserve.models.task import Classification
from xlaserve.models.version import State
from xlaserve.processes.merged_catalogue import CatalogueMerger, EngineModels, RemotePart
from xlaserve.processes.mirror import Mirror
from xlaserve.processes.published import Catalogue, Elsewhere, Facts, Loading
from xlaserve.telemetry.metrics import Metrics


class Run:
    """A model in an engine."""

    def __init__(self) -> None:
        self.images = 0
        self.releases = 0
        self.empty = asyncio.Event()

    def outstanding_s(self) -> float:
        return 0.0

    def release(self) -> None:
        self.releases += 1

    async def drained(self) -> None:
        await self.empty.wait()


def facts(version: str = "1", classes: int = 2, name: str = "a", *, is_loaded: bool = True) -> bytes:
    settings = model(name, version=int(version))
    loaded = Model(
        program=Elsewhere("fake"),
        size=(2, 2),
        task=Classification(classes),
        weights="fake",
        settings=settings,
        buckets=(Bucket(1, 2, 2),),
    )
    return pickle.dumps(Facts(settings, loaded if is_loaded else None, {}, {}, None, {}, (), ()))


class Engine:
    """The models that one of the engines shows."""

    def __init__(self, first: int = 1) -> None:
        self.loadings: dict[int, Loading] = {}
        self.models: dict[int, Run] = {}
        self.labels: dict[str, Mapping[str, str]] = {}
        self._next = first

    def has(self, state: State = State.READY, **of_facts: Any) -> int:
        """Loads a version, and returns the number of that loading."""
        number = self._next
        self._next += 1
        self.loadings[number] = Loading(number, state, "", False, facts(**of_facts))
        self.turn(number, state)
        return number

    def turn(self, number: int, state: State) -> None:
        runs = state in (State.READY, State.DRAINING)
        self.loadings[number] = self.loadings[number]._replace(state=state, takes_requests=runs)
        if runs:
            self.models.setdefault(number, Run())

    def ends(self, number: int) -> None:
        del self.loadings[number]
        self.models.pop(number, None)

    @property
    def shown(self) -> EngineModels:
        loadings = (*self.loadings.values(),)
        is_ready = any(one.state is State.READY for one in loadings)
        return EngineModels(Catalogue(is_ready, loadings, self.labels, {}), cast(Mapping[int, RemotePart], self.models))


class World:
    """Engines, and what a front makes of them."""

    def __init__(self, engines: int = 2) -> None:
        self.engines = {number: Engine(1000 * number + 1) for number in range(engines)}
        self.merging = CatalogueMerger()
        self.mirror = Mirror(Metrics())

    def merge(self) -> Catalogue:
        catalogue, models = self.merging.merge({number: engine.shown for number, engine in self.engines.items()})
        self.mirror.take(catalogue, models)
        return catalogue

    def shows(self) -> list[tuple[str, State]]:
        """Returns each version with its state."""
        self.merge()
        return [(one.settings.version, one.state) for one in self.mirror.index()]

    def runs(self, version: str = "") -> list[Any]:
        """Returns where requests go."""
        return [*cast(Any, self.mirror.get("a", version).engine).parts]


async def test_one_engine_is_shown_as_it_is() -> None:
    world = World(1)
    engine = world.engines[0]
    engine.has(State.DRAINING)
    engine.has()
    engine.has(State.FAILED, version="2", name="b")
    engine.labels = {"a": {"stable": "1"}, "b": {}}
    assert world.merge() == engine.shown.catalogue


async def test_a_model_is_ready_as_soon_as_one_engine_has_it_ready() -> None:
    world = World()
    world.engines[0].has(State.LOADING, is_loaded=False)
    second = world.engines[1].has(State.COMPILING)
    assert world.shows() == [("1", State.COMPILING)]
    world.engines[1].turn(second, State.READY)
    assert world.shows() == [("1", State.READY)]
    assert world.mirror.is_ready
    assert world.runs() == [world.engines[1].models[second]]


async def test_requests_go_to_all_engines_that_have_it_ready() -> None:
    world = World(3)
    numbers = [engine.has() for engine in world.engines.values()]
    assert world.shows() == [("1", State.READY)]
    runs = [engine.models[number] for engine, number in zip(world.engines.values(), numbers, strict=True)]
    assert world.runs() == runs
    served = world.mirror.get("a")
    del world.engines[1]
    world.merge()
    assert world.runs() == [runs[0], runs[2]]
    assert world.mirror.get("a") is served, "what was counted of it goes on"


async def test_engines_are_in_the_same_order_at_all_fronts_whichever_came_last() -> None:
    world = World()
    first, second = (engine.has() for engine in world.engines.values())
    world.merge()
    before = world.engines.pop(0)
    world.merge()
    world.engines[0] = before
    world.merge()
    assert world.runs() == [before.models[first], world.engines[1].models[second]]


async def test_an_engine_in_the_place_of_another_joins_what_is_there() -> None:
    world = World()
    for engine in world.engines.values():
        engine.has()
    world.merge()
    version = world.mirror.find("a")
    world.engines[0] = Engine(5001)
    number = world.engines[0].has(State.LOADING)
    world.merge()
    assert len(world.runs()) == 1
    world.engines[0].turn(number, State.READY)
    assert world.shows() == [("1", State.READY)]
    assert len(world.runs()) == 2
    assert world.mirror.find("a") is version


async def test_another_engine_in_the_place_of_the_only_one_begins_anew() -> None:
    world = World(1)
    world.engines[0].has()
    world.merge()
    served, before = world.mirror.get("a"), world.runs()
    world.engines[0] = Engine(5001)
    number = world.engines[0].has()
    world.merge()
    assert world.mirror.get("a") is not served
    assert world.runs() == [world.engines[0].models[number]]
    assert [*cast(Any, served.engine).parts] == before, "where what had found it before still runs"


async def test_versions_that_take_other_requests_are_not_mixed() -> None:
    world = World()
    world.engines[0].has(classes=2)
    new = world.engines[1].has(classes=3)
    assert world.shows() == [("1", State.READY)] * 2
    assert world.runs() == [world.engines[1].models[new]], "the newer one"


async def test_what_turns_out_to_be_another_model_is_parted() -> None:
    world = World()
    old = world.engines[0].has(classes=2)
    new = world.engines[1].has(State.LOADING, is_loaded=False)
    assert world.shows() == [("1", State.READY)]
    world.engines[1].loadings[new] = world.engines[1].loadings[new]._replace(facts=facts(classes=3))
    world.engines[1].turn(new, State.COMPILING)
    assert world.shows() == [("1", State.READY), ("1", State.COMPILING)]
    assert world.runs() == [world.engines[0].models[old]]


async def test_a_new_version_serves_once_a_third_of_the_engines_has_it() -> None:
    world = World(4)
    old = {number: engine.has(version="1") for number, engine in world.engines.items()}
    serving = []
    for number, engine in world.engines.items():
        engine.ends(old[number])
        engine.has(version="2")
        world.merge()
        serving.append((world.mirror.get("a").settings.version, len(world.runs())))
    assert serving == [("1", 3), ("2", 2), ("2", 3), ("2", 4)]


async def test_it_is_said_why_a_version_that_is_ready_somewhere_waits() -> None:
    world = World(4)
    for engine in world.engines.values():
        engine.has(version="1")
    world.engines[0].has(version="2")
    assert world.shows() == [("1", State.READY), ("2", State.LOADING)]
    assert world.mirror.find("a", "2").reason == "ready in 1 of 4 engines"


async def test_labels_are_those_of_most_engines() -> None:
    world = World(3)
    for engine in world.engines.values():
        engine.has(version="1")
        engine.has(version="2")
        engine.labels = {"a": {"stable": "1"}}
    found = []
    for engine in world.engines.values():
        engine.labels = {"a": {"stable": "2"}}
        world.merge()
        found.append(world.mirror.get("a").settings.version)
    assert found == ["1", "2", "2"]


async def test_what_one_engine_ends_is_left_once_its_requests_are_answered() -> None:
    world = World()
    first, _ = (engine.has() for engine in world.engines.values())
    world.merge()
    served, ending = world.mirror.get("a"), world.engines[0].models[first]
    served.calls += 1  # which may go to the other one
    world.engines[0].turn(first, State.DRAINING)
    world.merge()
    assert ending not in world.runs()
    await asyncio.sleep(0)
    leaves = [ending.releases]
    ending.empty.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [*leaves, ending.releases] == [0, 1]


async def test_what_all_engines_end_is_left_once_all_that_found_it_is_answered() -> None:
    world = World()
    numbers = [engine.has() for engine in world.engines.values()]
    world.merge()
    served = world.mirror.get("a")
    served.calls += 1
    for engine, number in zip(world.engines.values(), numbers, strict=True):
        engine.turn(number, State.DRAINING)
    assert world.shows() == [("1", State.DRAINING)]
    assert len(cast(Any, served.engine).parts) == 2, "for a request that is still parsed"
    await asyncio.sleep(0)
    assert [run.releases for engine in world.engines.values() for run in engine.models.values()] == [0, 0]
    served.leave()
    for _ in range(3):
        await asyncio.sleep(0)
    assert [run.releases for engine in world.engines.values() for run in engine.models.values()] == [1, 1]


async def test_a_version_that_failed_in_one_engine_serves_in_the_other() -> None:
    world = World()
    world.engines[0].has(State.FAILED)
    ready = world.engines[1].has()
    assert world.shows() == [("1", State.READY)]
    assert world.runs() == [world.engines[1].models[ready]]


async def test_statistics_are_kept_by_the_numbers_that_are_shown() -> None:
    world = World()
    first, second = (engine.has() for engine in world.engines.values())
    world.merge()
    assert world.merging.numbers == {0: {first: first}, 1: {second: first}}
