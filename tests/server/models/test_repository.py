"""The life of models, on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import NoneType

import pytest
from tests.server.models.house import PATIENCE_S, Gate, GateAt, House, model

from xlaserve.admission.caller import CURRENT, Caller, Role
from xlaserve.config import BucketSettings, Mode
from xlaserve.engine import under_way
from xlaserve.errors import ConfigError, InvalidArgument, LoadEnded, ModelFailed, ModelNotFound, ModelNotReady
from xlaserve.models.load_turns import LoadTurns
from xlaserve.models.version import State


async def test_models_that_are_announced_are_loading_before_they_are_loaded(house: House) -> None:
    house.repository.announce()
    with pytest.raises(ModelNotReady, match="model a is loading"):
        house.repository.get("a")
    assert house.changes == [("a", State.LOADING)]
    await house.repository.load_all()
    assert house.changes == [("a", State.LOADING), ("a", State.COMPILING), ("a", State.READY)]


async def test_all_models_are_announced_before_the_first_is_loaded(house: House) -> None:
    house.configured = [model("a"), model("b")]
    house.loading.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    assert house.repository.serving() == {"a": False, "b": False}
    with pytest.raises(ModelNotReady, match="model b is loading"):
        house.repository.get("b")
    house.loading.open()
    await loading
    assert house.repository.serving() == {"a": True, "b": True}


async def test_an_unknown_model_is_refused_with_those_that_there_are(house: House) -> None:
    await house.repository.load_all()
    with pytest.raises(ModelNotFound, match=r"no model 'z'; there are: a"):
        house.repository.get("z")
    with pytest.raises(ModelNotFound, match=r"model a has no version .7.; it has 1"):
        house.repository.get("a", "7")
    with pytest.raises(ModelNotFound, match=r"no model 'z' is configured"):
        await house.repository.load("z")
    with pytest.raises(ModelNotFound):
        await house.repository.unload("z")
    assert house.repository.get("a", "1") is house.repository.get("a")


async def test_a_refusal_names_no_model_that_its_caller_may_not_use(house: House) -> None:
    await house.repository.load_all()
    token = CURRENT.set(Caller("shop", frozenset(Role), ("z*",)))
    try:
        with pytest.raises(ModelNotFound, match=r"^no model 'z'; there are: none$"):
            house.repository.get("z")
        with pytest.raises(
            ModelNotFound, match=r"^no model 'z' is configured; add it to `models` in the configuration first$"
        ):
            await house.repository.load("z")
    finally:
        CURRENT.reset(token)


async def test_a_flood_of_made_up_names_reads_the_configuration_twice_at_most(house: House) -> None:
    await house.repository.load_all()
    house.reading.close()
    loads = [asyncio.create_task(house.repository.load("made-up-0"))]
    await house.reading.reached()
    loads += [asyncio.create_task(house.repository.load(f"made-up-{number}")) for number in range(1, 1000)]
    await asyncio.sleep(0)
    house.reading.open()
    results = await asyncio.wait_for(asyncio.gather(*loads, return_exceptions=True), PATIENCE_S)
    assert [str(result) for result in results] == [
        f"no model 'made-up-{number}' is configured; add it to `models` in the configuration first"
        for number in range(1000)
    ]
    assert house.reads == 2


async def test_a_reload_takes_traffic_only_when_it_is_warm(house: House) -> None:
    await house.repository.load_all()
    house.compiling.close()
    loading = asyncio.create_task(house.repository.load("a"))
    await house.compiling.reached()
    assert house.states() == [State.READY, State.COMPILING]
    assert house.repository.is_ready
    assert await house.ask() == [1]
    house.compiling.open()
    await loading
    assert house.states() == [State.READY]
    assert await house.ask() == [2]


async def test_requests_never_see_a_gap_during_reloads(house: House) -> None:
    await house.repository.load_all()
    answers: list[int] = []

    async def keep_asking() -> None:
        while not reloading.done():
            answers.extend(await house.ask(images=3))

    async def reload() -> None:
        for _ in range(5):
            await house.repository.load("a")

    reloading = asyncio.create_task(reload())
    await asyncio.gather(reloading, *(keep_asking() for _ in range(8)))
    assert 1 in answers
    assert await house.ask() == [6]


async def test_what_fails_to_load_leaves_the_old_one_serving_and_says_why(house: House) -> None:
    await house.repository.load_all()
    house.load_errors["a"] = ModelFailed("weights: expected a file")
    with pytest.raises(ModelFailed, match="model a failed: weights: expected a file"):
        await house.repository.load("a")
    old, newcomer = house.repository.index()
    assert (old.state, newcomer.state) == (State.READY, State.FAILED)
    assert newcomer.reason == newcomer.progress == "weights: expected a file"
    assert await house.ask() == [1]
    assert house.repository.is_ready


async def test_the_next_load_replaces_what_failed(house: House) -> None:
    await house.repository.load_all()
    house.load_errors["a"] = ModelFailed("no")
    with pytest.raises(ModelFailed):
        await house.repository.load("a")
    house.load_errors.clear()
    await house.repository.load("a")
    assert house.states() == [State.READY]
    assert await house.ask() == [2]


async def test_start_up_ends_with_the_first_failure(house: House) -> None:
    house.configured = [model("a"), model("b")]
    house.load_errors["a"] = ModelFailed("no")
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    assert house.states("b") == [State.LOADING]


async def test_start_up_goes_on_after_a_failure_if_so_configured(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b")]
    house.load_errors["a"] = ModelFailed("no")
    await house.repository.load_all()
    assert house.repository.serving() == {"a": False, "b": True}
    assert house.repository.is_ready


async def test_nothing_is_ready_where_every_model_failed(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.load_errors["a"] = ModelFailed("no")
    await house.repository.load_all()
    assert not house.repository.is_ready


async def test_a_load_reads_the_configuration_anew(house: House) -> None:
    await house.repository.load_all()
    house.configured = [model("a", version="2", buckets=(4,)), model("b")]
    await house.repository.load("a")
    assert house.repository.get("a", "2").settings.buckets == (BucketSettings(4),)
    with pytest.raises(ModelNotFound, match=r"model a has no version .1.; it has 2"):
        house.repository.get("a", "1")
    await house.repository.load("b")
    assert house.repository.serving() == {"a": True, "b": True}


async def test_a_configuration_that_broke_meanwhile_fails_the_load_only(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    await house.repository.load_all()
    house.read_error = ConfigError("configuration file /etc/secret.yaml: not YAML")
    with pytest.raises(ModelFailed, match="the configuration is no longer valid") as failed:
        await house.repository.load("a")
    assert "/etc" not in str(failed.value)
    assert "/etc/secret.yaml" in caplog.text
    assert await house.ask() == [1]


async def test_changes_of_one_model_come_one_after_the_other(house: House) -> None:
    await house.repository.load_all()
    house.changes.clear()
    load, unload = house.repository.load, house.repository.unload
    await asyncio.gather(unload("a"), load("a"))
    end, begin = [State.DRAINING, State.UNLOADED], [State.LOADING, State.COMPILING, State.READY]
    assert house.changes == [("a", state) for state in (*end, *begin)]
    assert await house.ask() == [2]


async def test_an_unload_ends_the_load_under_way_and_drops_those_that_wait(house: House) -> None:
    await house.repository.load_all()
    house.loading.close()
    loads = [asyncio.create_task(house.repository.load("a"))]
    await house.loading.reached()
    loads.append(asyncio.create_task(house.repository.load("a")))
    await asyncio.sleep(0)
    await asyncio.wait_for(house.repository.unload("a"), PATIENCE_S / 2)
    for load in loads:
        with pytest.raises(LoadEnded):
            await load
    assert house.states() == [State.UNLOADED]
    house.loading.open()
    await house.repository.load("a")
    assert house.compiled[4:] == house.compiled[:4], "what was ended compiled nothing"
    assert await house.ask() in ([2], [3]), "the thread of what was ended may build a model before or after"


async def test_a_load_that_an_unload_ends_is_in_no_other_engine_from_then_on(house: House) -> None:
    house.configured = [model("a", version="1"), model("a", version="2")]
    house.loading.close()
    starting = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    house.repository.end_loads("a")  # whose versions are only drained once other changes let it
    ended = house.repository.listing()["a"].ended
    assert {number: one.state for number, one in ended.items()} == {"1": State.UNLOADED, "2": State.UNLOADED}
    await house.repository.unload("a")
    await starting
    assert [state for _, state in house.changes].count(State.UNLOADED) == 2


async def test_an_unload_at_the_start_lets_the_others_start(house: House) -> None:
    house.configured = [model("a"), model("b")]
    house.loading.close()
    starting = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    await house.repository.unload("a")
    house.loading.open()
    await starting
    assert house.repository.serving() == {"a": False, "b": True}
    assert house.repository.is_ready


async def test_a_model_that_never_builds_does_not_keep_others_from_loading(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.configured = [model("a"), model("b"), model("c")]
    house.loading = GateAt(1)
    house.repository.loader.turns = LoadTurns(patience_s=0.05)
    starting = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    hung, house.loading = house.loading, Gate()
    await house.sees(State.READY, "c")
    assert house.repository.serving() == {"a": False, "b": True, "c": True}
    assert "model a: building the model has taken 0 s so far" in caplog.text
    await house.repository.unload("a")
    await starting
    assert house.repository.is_ready
    hung.open()


async def test_models_load_one_after_the_other_in_their_order(house: House) -> None:
    house.configured = [model(name) for name in "abc"]
    await house.repository.load_all()
    assert house.changes[3:] == [(name, state) for name in "abc" for state in (State.COMPILING, State.READY)]


async def test_loads_that_wait_are_one_and_outlive_those_who_asked(house: House) -> None:
    await house.repository.load_all()
    house.loading.close()
    asked = [asyncio.create_task(house.repository.load("a"))]
    await house.loading.reached()
    asked += [asyncio.create_task(house.repository.load("a")) for _ in range(200)]
    await asyncio.sleep(0)
    for task in asked[:100]:
        task.cancel()
    house.loading.open()
    await asyncio.wait(asked)
    assert not any(task.exception() for task in asked[100:])
    assert await house.ask() == [3]  # that at the start, the one under way, and one for all who waited


async def test_a_load_that_everybody_gave_up_still_ends(house: House) -> None:
    await house.repository.load_all()
    house.loading.close()
    asked = asyncio.create_task(house.repository.load("a"))
    await house.loading.reached()
    asked.cancel()
    await asyncio.wait([asked])
    house.changes.clear()
    house.loading.open()
    await house.sees(State.READY)
    assert await house.ask() == [2]


async def test_a_load_that_is_asked_for_after_an_unload_comes_after_it(house: House) -> None:
    await house.repository.load_all()
    load, unload = house.repository.load, house.repository.unload
    ended = await asyncio.gather(load("a"), load("a"), unload("a"), load("a"), load("a"), return_exceptions=True)
    assert [type(error) for error in ended] == [LoadEnded, LoadEnded, NoneType, NoneType, NoneType]
    assert await house.ask() == [2]


async def test_a_load_reads_the_configuration_away_from_the_event_loop(house: House) -> None:
    await house.repository.load_all()
    house.reading.close()
    loading = asyncio.create_task(house.repository.load("a"))
    await house.reading.reached()
    assert await house.ask() == [1]
    house.reading.open()
    await loading
    assert await house.ask() == [2]


async def test_a_new_configuration_loads_what_changed_and_unloads_what_is_gone(house: House) -> None:
    house.configured = [model("a"), model("b"), model("c")]
    await house.repository.load_all()
    house.configured = [model("a"), model("b", version="2"), model("d")]
    assert await house.repository.reconfigure(house.configured) == ["b loaded", "d loaded", "c unloaded"]
    assert house.repository.serving() == {"a": True, "b": True, "c": False, "d": True}
    assert (await house.ask("a"), len(house.programs)) == ([1], 5)
    assert house.repository.get("b").settings.version == "2"
    assert await house.repository.reconfigure(house.configured) == []


async def test_what_fails_in_a_new_configuration_leaves_what_served(house: House) -> None:
    house.configured = [model("a"), model("b")]
    await house.repository.load_all()
    house.load_errors["a"] = ModelFailed("weights: expected a file")
    house.configured = [model("a", version="2"), model("b", version="2")]
    failed, loaded = await house.repository.reconfigure(house.configured)
    assert failed.startswith("a as before: ") and "weights: expected a file" in failed
    assert loaded == "b loaded"
    assert await house.ask("a") == [1]


async def test_a_configuration_that_no_longer_asks_for_what_failed_forgets_it(house: House) -> None:
    house.configured = [model("a")]
    await house.repository.load_all()
    house.load_errors |= {name: ModelFailed("weights: expected a file") for name in "abc"}
    for others in ([model("a"), model("b")], [model("a", version="2"), model("c")]):
        house.configured = others
        await house.repository.reconfigure(house.configured)
    assert [(version.name, version.state) for version in house.repository.index()] == [
        ("a", State.READY),
        ("a", State.FAILED),
        ("c", State.FAILED),
    ]
    house.configured = [model("a")]
    assert await house.repository.reconfigure(house.configured) == []
    assert [(version.name, version.state) for version in house.repository.index()] == [("a", State.READY)]
    with pytest.raises(ModelNotFound, match=r"there are: a$"):
        house.repository.get("c")


async def test_unloading_a_model_that_was_just_forgotten_changes_nothing(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b")]
    house.load_errors["b"] = ModelFailed("weights: expected a file")
    await house.repository.load_all()
    house.configured = [model("a")]
    await asyncio.gather(house.repository.unload("b"), house.repository.reconfigure(house.configured))
    assert [version.name for version in house.repository.index()] == ["a"]


async def test_what_a_client_loads_before_start_up_comes_to_it_is_compiled_once(house: House) -> None:
    house.configured = [model("a"), model("b")]
    house.loading.close()
    starting = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    client = asyncio.create_task(house.repository.load("b"))
    house.loading.open()
    await asyncio.gather(starting, client)
    assert house.changes.count(("b", State.COMPILING)) == 1
    assert house.repository.is_ready


async def test_what_a_client_unloads_before_start_up_comes_to_it_is_not_loaded(house: House) -> None:
    house.configured = [model("a"), model("b")]
    house.loading.close()
    starting = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    await house.repository.unload("b")
    house.loading.open()
    await starting
    assert house.repository.serving() == {"a": True, "b": False}


async def test_a_mode_that_is_not_offered_is_refused_with_those_that_are(house: House) -> None:
    await house.repository.load_all()
    served = house.repository.get("a")
    assert served.mode("") is Mode.XLA
    assert served.mode("graph") is Mode.GRAPH
    with pytest.raises(InvalidArgument, match=r"mode: expected one of xla, graph, got 'eager'"):
        served.mode("eager")


async def test_what_is_set_aside_fails_until_its_file_changes(make_house: Callable[..., House], tmp_path: Path) -> None:
    (labels := tmp_path / "labels.txt").write_text("1")
    house = make_house(exit_on_model_failure=False)
    deadly, other = house.configured = [model("deadly", labels=labels), model("other")]
    house.repository.set_aside = {under_way.key_of(deadly): "it crashed"}
    await house.repository.load_all()
    assert house.repository.serving() == {"deadly": False, "other": True}
    (failed,) = house.repository.versions("deadly")
    assert (failed.state, failed.reason) == (State.FAILED, "it crashed")
    await house.repository.reconfigure([deadly, other])
    assert house.repository.serving()["deadly"] is False
    labels.write_text("22")
    await house.repository.reconfigure([deadly, other])
    assert house.repository.serving()["deadly"] is True


async def test_what_is_set_aside_ends_a_start_before_others_are_loaded(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=True)
    _, deadly = house.configured = [model("other"), model("deadly")]
    house.repository.set_aside = {under_way.key_of(deadly): "it crashed"}
    with pytest.raises(ModelFailed, match="model deadly failed: it crashed"):
        await house.repository.load_all()
    assert not house.compiled
