"""Which changes go into another engine, what that begins with, and what is done in place. The other is a fake."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio
from tests.server.models.house import PATIENCE_S, Gate, GateAt, House, model

from xlaserve.config.versions import grouped
from xlaserve.errors import EngineLost, InvalidArgument, ModelFailed, ModelNotFound
from xlaserve.models.listing import Ended
from xlaserve.models.load_turns import LoadTurns
from xlaserve.models.version import State
from xlaserve.processes.engine_replacement import EngineReplacement, InitialModels, Outcome


class World:
    """An engine, and those that are to take its place."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.initial: list[InitialModels] = []
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.news = self.now_ns = self.succeeded = 0
        self.kept: list[int] = []
        """When the last change of each listing was asked for that was given for the next engine."""
        self._begun = asyncio.Event()
        self.replacement = EngineReplacement(
            repository=house.repository,
            configured=grouped(house.configured),
            begin=self._begin,
            succeeded=self._succeeded,
            pass_news=self._pass_news,
            on_changed=self._keep,
            clock_ns=lambda: self.now_ns,
        )

    async def _begin(self, initial: InitialModels) -> Outcome:
        self.initial.append(pickle.loads(pickle.dumps(initial)))
        self._begun.set()
        return await asyncio.shield(self.outcome)

    async def _succeeded(self) -> None:
        self.succeeded += 1

    def _keep(self) -> None:
        self.kept.append(self.replacement.initial_models().changed_ns)

    def _pass_news(self) -> None:
        self.news += 1

    async def begun(self) -> None:
        await self._begun.wait()

    def loaded(self) -> dict[str, list[str]]:
        """Returns the versions that the last one begins with, by model."""
        return {
            name: [number for number in listing.model.versions if number not in listing.ended]
            for name, listing in self.initial[-1].listings.items()
        }


@pytest_asyncio.fixture
async def world(make_house: Callable[..., House]) -> World:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b")]
    world = World(house)
    await house.repository.load_all()
    world.outcome.set_result(Outcome())
    return world


async def test_what_is_only_added_is_loaded_in_place(world: World) -> None:
    world.house.configured.append(model("c"))
    await world.replacement.load("c")
    world.house.configured.append(model("d"))
    assert await world.replacement.reconfigure(world.house.configured) == ["d loaded"]
    await world.replacement.update("c")
    assert not world.initial
    assert world.house.states("c") == world.house.states("d") == [State.READY]


async def test_a_serving_model_is_reloaded_in_another_engine_with_all_others(world: World) -> None:
    world.house.configured = [model("a", buckets=(4,)), model("b", buckets=(4,))]
    await world.replacement.load("a")
    (initial,) = world.initial
    assert world.loaded() == {"a": ["1"], "b": ["1"]}
    assert [initial.listings[name].model.versions["1"].buckets[0].batch for name in "ab"] == [4, 1]
    assert [initial.configured[name].versions["1"].buckets[0].batch for name in "ab"] == [4, 1]
    assert initial.required == {"a", "b"}
    assert world.house.states() == [State.READY]


async def test_the_next_engines_state_is_dated_by_its_last_requested_change(world: World) -> None:
    for now_ns, name in ((5, "c"), (6, "d")):
        world.now_ns = now_ns
        world.house.configured.append(model(name))
        await world.replacement.load(name)
    world.now_ns = 7
    await world.replacement.unload("d")
    world.now_ns = 8
    await world.replacement.reconfigure([*world.house.configured, model("e")])
    assert (world.kept, world.initial[0].changed_ns) == ([5, 6], 7)


async def test_a_change_in_place_dates_the_listing_once_it_is_made(world: World) -> None:
    world.now_ns = 5
    configured = [*world.house.configured, model("c")]
    changing = asyncio.create_task(world.replacement.reconfigure(configured))
    await asyncio.sleep(0)
    world.now_ns = 9
    assert world.replacement.initial_models().changed_ns == 0
    await changing
    assert world.kept == [5]


async def test_in_place_nothing_is_done_by_another_engine(world: World) -> None:
    world.replacement.always_in_place = True
    world.house.configured = [model("a", buckets=(4,)), model("c")]
    assert await world.replacement.reconfigure(world.house.configured) == ["a loaded", "c loaded", "b unloaded"]
    await world.replacement.load("a")
    await world.replacement.unload("c")
    assert not world.initial
    assert {*world.replacement.initial_models().configured} == {"a", "c"}
    assert (world.house.states("a"), world.house.states("c")) == ([State.READY], [State.UNLOADED])


async def test_an_update_whose_caller_gives_up_continues_in_its_engine(world: World) -> None:
    world.outcome = asyncio.get_running_loop().create_future()
    world.house.configured = [model("a", buckets=(4,)), model("b")]
    caller = asyncio.create_task(world.replacement.update("a"))
    await world.begun()
    caller.cancel()
    await asyncio.wait([caller])
    world.outcome.set_result(Outcome())
    with pytest.raises(EngineLost):
        await world.replacement.load("b")
    assert (len(world.initial), world.succeeded) == (1, 1)


async def test_nothing_is_changed_any_more_once_another_has_taken_its_place(world: World) -> None:
    await world.replacement.load("a")
    for change in (world.replacement.load("a"), world.replacement.unload("b"), world.replacement.update("a")):
        with pytest.raises(EngineLost):
            await change
    await world.replacement.reconfigure([model("a")])
    await world.replacement.reconfigure([model("a")], only={"a"})
    assert (len(world.initial), world.news) == (1, 1)


async def test_a_model_is_unloaded_by_an_engine_that_lists_it_so(world: World) -> None:
    await world.replacement.unload("a")
    assert world.loaded() == {"a": [], "b": ["1"]}
    assert world.initial[0].listings["a"].ended == {"1": Ended(State.UNLOADED)}
    assert world.initial[0].required == {"b"}
    assert "a" in world.initial[0].configured, "a look at folders is not to load it"


async def test_a_model_that_does_not_serve_is_unloaded_in_place(world: World) -> None:
    world.house.load_errors["c"] = ModelFailed("no such file")
    world.house.configured.append(model("c"))
    with pytest.raises(ModelFailed):
        await world.replacement.load("c")
    await world.replacement.unload("c")
    with pytest.raises(ModelNotFound):
        await world.replacement.unload("nothing")
    with pytest.raises(ModelNotFound):
        await world.replacement.load("nothing")
    assert not world.initial


async def test_a_configuration_that_replaces_and_removes_gets_another_engine(world: World) -> None:
    configured = [model("a", buckets=(4,)), model("c")]
    assert await world.replacement.reconfigure(configured) == ["a loaded", "c loaded", "b unloaded"]
    assert world.loaded() == {"a": ["1"], "b": [], "c": ["1"]}
    assert world.initial[0].required == {"a"}, "what did not serve may fail"
    assert {*world.initial[0].configured} == {"a", "c"}


async def test_an_added_model_that_fails_in_another_engine_is_not_called_loaded(world: World) -> None:
    world.outcome = asyncio.get_running_loop().create_future()
    world.outcome.set_result(Outcome(failed=[("c", "1", "no such file")]))
    configured = [model("a", buckets=(4,)), model("b"), model("c")]
    assert await world.replacement.reconfigure(configured) == ["a loaded", "c failed: no such file"]


async def test_only_what_is_asked_for_is_changed(world: World) -> None:
    configured = [model("a", buckets=(4,)), model("b", buckets=(4,))]
    assert await world.replacement.reconfigure(configured, only={"b"}) == ["b loaded"]
    assert world.initial[0].listings["a"].model.versions["1"].buckets[0].batch == 1


async def test_where_another_engine_fails_all_is_as_before_and_says_why(world: World) -> None:
    world.outcome = asyncio.get_running_loop().create_future()
    world.outcome.set_result(Outcome("model a failed: no such file", [("a", "1", "no such file")]))
    with pytest.raises(ModelFailed, match="model a failed: no such file"):
        await world.replacement.load("a")
    assert world.house.states() == [State.READY, State.FAILED]
    assert world.house.repository.index()[1].reason == "no such file"
    assert await world.house.ask() == [1]
    assert (await world.replacement.reconfigure([model("a")]))[0].startswith("b as before: model a failed")
    assert world.initial[1].listings["a"].ended == {}, "what serves is served by the next one too"


async def test_no_room_for_another_engine_is_said_before_anything_happens(world: World) -> None:
    def refuse() -> None:
        raise ModelFailed("set swap: in_place")

    world.replacement.check_room = refuse
    with pytest.raises(ModelFailed, match="swap: in_place"):
        await world.replacement.load("a")
    assert not world.initial


async def test_labels_that_were_moved_are_carried_over(make_house: Callable[..., House]) -> None:
    house = make_house()
    labels = {"version_labels": {"stable": 1}}
    house.configured = [model("a", version=number, **labels) for number in (1, 2)]
    world = World(house)
    world.outcome.set_result(Outcome())
    await house.repository.load_all()
    await world.replacement.update("a", {"stable": "2"})
    assert not world.initial, "nothing ends"
    await world.replacement.load("a")
    assert world.initial[0].listings["a"].model.labels == {"stable": "1"}, "as they are configured again"
    other = World(house)
    other.outcome.set_result(Outcome())
    house.configured = [model("a", version=number, **labels) for number in (1, 3)]
    with pytest.raises(InvalidArgument, match=r"version_labels\.stable"):
        await other.replacement.update("a", {"stable": "2"})
    await other.replacement.update("a", {"stable": "3"}, ["1", "3"])
    assert other.initial[0].listings["a"].model.labels == {"stable": "3"}
    assert other.replacement.initial_models().listings["a"].model.labels == {"stable": "2"}
    assert other.loaded() == {"a": ["1", "3"]}


async def test_changes_of_one_kind_share_an_engine_and_others_wait(world: World) -> None:
    world.outcome = asyncio.get_running_loop().create_future()
    first = asyncio.create_task(world.replacement.load("a"))
    await world.begun()
    later: list[asyncio.Task[Any]] = [
        *(asyncio.create_task(world.replacement.load("a")) for _ in range(3)),
        asyncio.create_task(world.replacement.load("b")),
    ]
    await asyncio.sleep(0)
    world.outcome.set_result(Outcome())
    await first
    results = await asyncio.gather(*later, return_exceptions=True)
    assert [type(result) for result in results] == [EngineLost] * 4, "the one in its place is asked then"
    assert len(world.initial) == 1


async def test_an_engine_lists_what_another_had(world: World, make_house: Callable[..., House]) -> None:
    await world.replacement.unload("a")
    house = make_house()
    house.repository.listings = world.initial[0].listings
    await house.repository.load_all()
    assert (house.states("a"), house.states("b")) == ([State.UNLOADED], [State.READY])
    assert house.repository.is_ready
    await house.repository.load("a")
    assert house.states("a") == [State.READY]


async def test_a_model_that_is_required_ends_the_start(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("new"), model("served"), model("other")]
    house.load_errors = {"new": ModelFailed("broken"), "served": ModelFailed("gone")}
    house.repository.required = {"served", "other"}
    with pytest.raises(ModelFailed, match="gone"):
        await house.repository.load_all()
    assert (house.states("new"), house.states("other")) == ([State.FAILED], [State.LOADING])


async def test_an_engine_does_not_wait_for_what_never_builds_and_is_not_required(
    make_house: Callable[..., House],
) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("hung"), model("served")]
    house.repository.required = {"served"}
    house.repository.loader.turns = LoadTurns(patience_s=0.05)
    house.loading = hung = GateAt(1)
    starting = asyncio.create_task(house.repository.load_all())
    await hung.reached()
    house.loading = Gate()
    await asyncio.wait_for(starting, PATIENCE_S)
    assert (house.states("hung"), house.states("served")) == ([State.LOADING], [State.READY])
    hung.open()
    await house.sees(State.READY, "hung")
