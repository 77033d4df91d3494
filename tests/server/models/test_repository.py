"""The life of models, on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.required import required
from tests.server.models.house import PATIENCE_S, GateAt, House, model

from xlaserve.admission.caller import CURRENT, Caller, Role
from xlaserve.config import AutoBuckets, Bucket, BucketSettings, Mode, ModelSettings, model_files
from xlaserve.engine import under_way
from xlaserve.engine.buckets import demand
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.under_way import UnderWay
from xlaserve.errors import ConfigError, InvalidArgument, ModelFailed, ModelNotFound, ModelNotReady, ShuttingDown
from xlaserve.models.version import State


async def test_a_model_loads_compiles_and_serves(house: House) -> None:
    await house.repository.load_all()
    assert house.changes == [("a", State.LOADING), ("a", State.COMPILING), ("a", State.READY)]
    assert await house.ask(images=5) == [1] * 5
    assert house.repository.is_ready
    assert house.repository.serving() == {"a": True}


async def test_the_files_of_a_model_are_not_looked_at_on_the_event_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, threads = model_files.state, set[int]()

    def state(settings: ModelSettings) -> frozenset[model_files.File]:
        threads.add(threading.get_ident())
        return look(settings)

    monkeypatch.setattr(model_files, "state", state)
    await house.repository.load_all()
    assert threads
    assert threading.get_ident() not in threads


async def test_warm_up_covers_every_mode_and_bucket_and_is_in_the_ledger(house: House) -> None:
    await house.repository.load_all()
    expected = [(mode, Bucket(batch, 2, 2)) for mode in (Mode.XLA, Mode.GRAPH) for batch in (1, 2)]
    (version,) = house.repository.index()
    assert house.compiled == expected
    assert [(entry.mode, entry.bucket) for entry in version.ledger] == expected
    assert list(version.ledger) == house.entries


async def test_progress_is_seen_while_a_model_compiles(house: House) -> None:
    house.compiling.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.compiling.reached()
    (version,) = house.repository.index()
    assert version.state is State.COMPILING
    assert version.progress == "0 of 4 programs compiled"
    assert not house.repository.is_ready
    with pytest.raises(ModelNotReady, match="model a is compiling"):
        house.repository.get("a")
    house.compiling.open()
    await loading
    assert version.progress == ""


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
    with pytest.raises(ModelNotFound, match=r"no model 'z' is configured; there are: a"):
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
        with pytest.raises(ModelNotFound, match=r"^no model 'z' is configured; there are: none$"):
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
        f"no model 'made-up-{number}' is configured; there are: a" for number in range(1000)
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


async def test_a_drain_ends_loads_whose_compilation_hangs(house: House) -> None:
    await house.repository.load_all()
    house.compiling.close()
    loads = [asyncio.create_task(house.repository.load("a"))]
    await house.compiling.reached()
    loads.append(asyncio.create_task(house.repository.load("a")))
    await asyncio.sleep(0)
    await house.repository.drain(timeout_s=0)
    for load in loads:
        with pytest.raises(ShuttingDown, match="the server is shutting down"):
            await asyncio.wait_for(load, PATIENCE_S)
    assert house.states() == [State.UNLOADED] * 2


async def test_a_reload_lets_the_old_one_finish_what_it_accepted(house: House) -> None:
    await house.repository.load_all()
    old = house.programs[0]
    old.running.close()
    accepted = asyncio.create_task(house.ask(images=3))
    await old.running.reached()
    loading = asyncio.create_task(house.repository.load("a"))
    await house.sees(State.DRAINING)
    assert house.states() == [State.DRAINING, State.READY]
    assert not loading.done()
    old.running.open()
    await loading
    assert await accepted == [1] * 3
    assert house.states() == [State.READY]


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


async def test_a_failure_in_warm_up_fails_the_model_with_one_line(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.compile_error = RuntimeError("unsupported operation: ResizeBicubic\n  at line 10")
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.FAILED
    assert version.reason == "RuntimeError: unsupported operation: ResizeBicubic"
    assert version.model is None, "its memory is given back"
    with pytest.raises(ModelFailed, match="ResizeBicubic"):
        house.repository.get("a")
    assert "at line 10" in caplog.text


async def test_a_failure_is_told_by_the_line_that_names_the_cause(house: House) -> None:
    house.compile_error = ValueError("Graph execution error:\n\nDetected at node a\nno kernel in '/srv/my models/a.so'")
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason == "ValueError: no kernel in 'a.so'"


@pytest.mark.parametrize("error", [ModelFailed(""), RuntimeError(), RuntimeError("\n\nlate")])
async def test_an_error_without_words_is_a_reason_all_the_same(house: House, error: Exception) -> None:
    house.compile_error = error
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason.strip()


@pytest.mark.parametrize("error", [SystemExit("no licence"), KeyboardInterrupt("no licence")])
async def test_a_model_whose_code_exits_fails_and_the_server_goes_on(
    make_house: Callable[..., House], error: BaseException
) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b")]
    house.load_errors["a"] = error
    await house.repository.load_all()
    assert house.repository.serving() == {"a": False, "b": True}
    version, _ = house.repository.index()
    assert version.reason == f"the model's own code raised {type(error).__name__}: no licence"


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


async def test_an_unload_finishes_what_was_accepted_and_takes_nothing_new(house: House) -> None:
    await house.repository.load_all()
    running = house.programs[0].running
    running.close()
    accepted = asyncio.create_task(house.ask(images=7))
    await running.reached()
    unloading = asyncio.create_task(house.repository.unload("a"))
    await house.sees(State.DRAINING)
    with pytest.raises(ModelNotReady, match="model a is draining"):
        await house.ask()
    assert not unloading.done()
    running.open()
    await unloading
    assert await accepted == [1] * 7
    assert house.states() == [State.UNLOADED]
    with pytest.raises(ModelNotReady, match="model a is unloaded"):
        await house.ask()
    (version,) = house.repository.index()
    assert version.model is None, "its memory is given back"
    assert version.served is None


async def test_what_does_not_finish_before_an_unload_is_answered_all_the_same(make_house: Callable[..., House]) -> None:
    house = make_house(drain_timeout_s=0.0)
    await house.repository.load_all()
    house.programs[0].running.close()
    accepted = asyncio.create_task(house.ask(images=7))
    await house.programs[0].running.reached()
    await house.repository.unload("a")
    with pytest.raises(ShuttingDown):
        await accepted


async def test_garbage_is_collected_away_from_the_event_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.repository.load_all()
    threads: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: threads.append(threading.get_ident()))
    await house.repository.load("a")
    await house.repository.unload("a")
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_an_unloaded_model_can_be_loaded_again(house: House) -> None:
    await house.repository.load_all()
    await house.repository.unload("a")
    await house.repository.unload("a")
    assert not house.repository.is_ready
    await house.repository.load("a")
    assert house.states() == [State.READY]
    assert await house.ask() == [2]


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
    await asyncio.gather(load("a"), unload("a"), load("a"))
    begin, end = [State.LOADING, State.COMPILING, State.READY], [State.DRAINING, State.UNLOADED]
    assert house.changes == [("a", state) for state in (*begin, *end, *end, *begin)]
    assert await house.ask() == [3]


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
    await asyncio.gather(load("a"), load("a"), unload("a"), load("a"), load("a"))
    assert await house.ask() == [3]


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


async def test_an_unload_that_comes_to_a_model_that_was_just_forgotten_changes_nothing(
    make_house: Callable[..., House],
) -> None:
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


async def test_a_stop_ends_a_warm_up_and_refuses_further_loads(house: House) -> None:
    house.compiling.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.compiling.reached()
    house.repository.stop_loading()
    house.compiling.open()
    with pytest.raises(ShuttingDown):
        await loading
    assert len(house.compiled) == 1
    with pytest.raises(ShuttingDown):
        await house.repository.load("a")


async def test_a_stop_while_a_model_is_built_ends_its_load_and_is_no_failure(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.loading.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    await house.repository.drain(timeout_s=0)
    house.loading.open()
    with pytest.raises(ShuttingDown):
        await loading
    assert house.states() == [State.UNLOADED]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stop_after_the_last_program_still_ends_the_load(house: House) -> None:
    house.configured = [model("a", buckets=(1,), modes=(Mode.XLA,))]
    house.compiling.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.compiling.reached()
    await house.repository.drain(timeout_s=0)
    house.compiling.open()
    with pytest.raises(ShuttingDown):
        await loading
    assert house.states() == [State.UNLOADED]
    assert not house.repository.is_ready


async def test_a_drain_answers_everything_and_is_over_at_once_where_nothing_waits(house: House) -> None:
    await house.repository.load_all()
    house.programs[0].running.close()
    accepted = [asyncio.create_task(house.ask(images=5)) for _ in range(3)]
    await house.programs[0].running.reached()
    await house.repository.drain(timeout_s=0)
    for error in await asyncio.gather(*accepted, return_exceptions=True):
        assert isinstance(error, ShuttingDown)
    await house.repository.drain(timeout_s=0)
    assert house.states() == [State.UNLOADED]


async def test_a_batch_loop_that_dies_is_told_and_fails_what_waits(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.repository.load_all()

    def defect(share: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(house.lanes, "try_acquire", lambda share: False)
    monkeypatch.setattr(house.lanes, "acquire", defect)
    with pytest.raises(Exception, match="model a"):
        await house.ask()
    assert house.crashes == 1
    with pytest.raises(ModelNotReady):
        await house.ask()


async def test_a_mode_that_is_not_offered_is_refused_with_those_that_are(house: House) -> None:
    await house.repository.load_all()
    served = house.repository.get("a")
    assert served.mode("") is Mode.XLA
    assert served.mode("graph") is Mode.GRAPH
    with pytest.raises(InvalidArgument, match=r"mode: expected one of xla, graph, got 'eager'"):
        served.mode("eager")


async def test_buckets_that_come_out_alike_are_counted_once(house: House) -> None:
    house.configured = [model("a", buckets=(1, [1, 2, 2], 4))]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.programs_total == len(version.ledger) == 4


async def test_auto_buckets_are_chosen_for_the_recorded_demand_and_only_they_serve(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(executable: object, bucket: Bucket, lanes: int) -> Cost:
        return Cost(1.0 + bucket.batch, 1.0 + bucket.batch)

    monkeypatch.setattr("xlaserve.models.loader.measure", cost)
    demand.write(tmp_path / "demand.json", {(2, 2): Counter({3: 100})})
    choice = AutoBuckets(max_batch=4, demand=tmp_path / "demand.json")
    house.configured = [model("a", buckets="auto", auto_buckets=choice)]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.model is not None
    assert version.model.buckets == (Bucket(3, 2, 2),)
    assert sorted(house.compiled) == [(Mode.GRAPH, Bucket(3, 2, 2))] + [
        (Mode.XLA, Bucket(batch, 2, 2)) for batch in (1, 2, 3, 4)
    ]
    assert version.programs_total == len(version.ledger) == 5
    assert await house.ask(images=5) == [1] * 5


async def test_a_mode_that_fails_in_a_late_candidate_serves_no_earlier_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter(range(1, 100))
    monkeypatch.setattr("xlaserve.models.loader.measure", lambda *_, **__: Cost(*[1 / next(costs)] * 2))
    house.compile_errors[Mode.OPENVINO, Bucket(3, 2, 2)] = ModelFailed("no kernel")
    house.configured = [model("a", modes=("auto",), buckets="auto", auto_buckets=AutoBuckets(max_batch=4))]
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert (Mode.OPENVINO, Bucket(1, 2, 2)) in house.compiled
    assert version.left_out == {Mode.OPENVINO}
    assert version.warnings == ["auto does without openvino: no kernel"]
    assert set(version.auto.values()) <= {Mode.XLA, Mode.GRAPH}
    assert await house.ask(images=5) == [1] * 5


REFUSED = ValueError(
    "Detected unsupported operations: ResizeBicubic (No registered 'ResizeBicubic' OpKernel for XLA_CPU_JIT devices)"
    '{{node a/ResizeBicubic}}\nThe op is created at: \nFile "a/b/own.py", line 3, in shrink\nmuch more'
)
"""TensorFlow's error where XLA can't compile a model."""


async def test_auto_does_without_xla_where_that_fails_and_says_so_once(house: House) -> None:
    house.configured = [model("a", modes=("auto",), buckets=(1, 2))]
    house.compile_errors = {(Mode.XLA, Bucket(batch, 2, 2)): REFUSED for batch in (1, 2)}
    await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.READY
    assert version.left_out == {Mode.XLA}
    assert version.warnings == ["auto does without xla: XLA has no kernel for ResizeBicubic, at own.py:3"]
    assert set(version.auto.values()) <= {Mode.GRAPH, Mode.OPENVINO}
    assert await house.ask(images=2) == [1] * 2


@pytest.mark.parametrize("modes", [("xla",), ("graph", "xla"), ("auto", "xla")])
async def test_a_mode_that_is_offered_fails_the_model_in_one_line(
    house: House, modes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    house.configured = [model("a", modes=modes, buckets=(1, 2))]
    house.compile_errors[Mode.XLA, Bucket(1, 2, 2)] = REFUSED
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.state is State.FAILED
    assert version.reason == (
        "XLA has no kernel for ResizeBicubic, at own.py:3; `modes: [graph]` or `[auto]` serve what XLA can't compile"
    )
    assert not any("much more" in record.getMessage() or record.exc_info for record in caplog.records)


async def test_a_model_without_python_fails_with_the_operation_and_its_node(house: House) -> None:
    house.configured = [model("a", modes=("xla",), buckets=(1,))]
    house.compile_errors[Mode.XLA, Bucket(1, 2, 2)] = ValueError(
        str(REFUSED).partition("File")[0] + "dummy_file_name:10:f"
    )
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert version.reason == (
        "XLA has no kernel for ResizeBicubic, node a/ResizeBicubic;"
        " `modes: [graph]` or `[auto]` serve what XLA can't compile"
    )


async def test_where_auto_has_no_mode_left_the_model_fails_with_the_first_reason(house: House) -> None:
    house.configured = [model("a", modes=("auto",), buckets=(1,))]
    house.compile_errors = {
        (Mode.XLA, Bucket(1, 2, 2)): ModelFailed("of another number of rows"),
        (Mode.GRAPH, Bucket(1, 2, 2)): ModelFailed("the same"),
        (Mode.OPENVINO, Bucket(1, 2, 2)): ModelFailed("not installed", lacks_mode=True),
    }
    with pytest.raises(ModelFailed):
        await house.repository.load_all()
    (version,) = house.repository.index()
    assert (version.state, version.reason) == (State.FAILED, "of another number of rows")


async def test_a_demand_that_cannot_be_read_fails_the_model_before_anything_is_compiled(
    house: House, tmp_path: Path
) -> None:
    choice = AutoBuckets(demand=tmp_path / "none.json")
    house.configured = [model("a", buckets="auto", auto_buckets=choice)]
    with pytest.raises(ModelFailed, match=r"auto_buckets\.demand: none\.json: No such file or directory"):
        await house.repository.load_all()
    assert not house.compiled


async def test_with_ready_when_first_bucket_no_request_waits_for_the_others(make_house: Callable[..., House]) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(4, 1, 2))]
    gate = house.compiling = GateAt(3)  # two modes of the first bucket come before
    await house.repository.load_all()
    assert house.repository.is_ready
    await gate.reached()
    assert await house.ask(images=4) == [1] * 4
    assert [(entry.bucket.batch, entry.in_background) for entry in house.entries] == [(1, False)] * 2
    gate.open()
    await required(house.repository.index()[0].growth)
    assert [(entry.bucket.batch, entry.in_background) for entry in house.entries[2:]] == [(2, True)] * 2 + [
        (4, True)
    ] * 2
    assert await house.ask(images=4) == [1] * 4


async def test_what_compiles_at_the_start_is_noted_as_a_load_with_its_step(house: House) -> None:
    house.configured = [model("a", buckets=(1, 2), modes=(Mode.XLA,))]
    gate = house.compiling = GateAt(2)
    file = under_way.create()
    house.repository.loader.under_way = UnderWay(file)
    loading = asyncio.create_task(house.repository.load_all())
    await gate.reached()
    suspect = under_way.Suspect(is_load=True, steps="compiling mode xla, bucket 2x2x2")
    assert under_way.suspects(file, "") == {under_way.key_of(house.configured[0]): suspect}
    gate.open()
    await loading
    assert not under_way.suspects(file, "")
    os.close(file)


async def test_what_compiles_beside_the_traffic_is_noted_as_a_load(make_house: Callable[..., House]) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2), modes=(Mode.XLA,))]
    gate = house.compiling = GateAt(2)
    file = under_way.create()
    house.repository.loader.under_way = UnderWay(file)
    await house.repository.load_all()
    await gate.reached()
    suspect = under_way.Suspect(is_load=True, steps="compiling mode xla, bucket 2x2x2")
    assert under_way.suspects(file, "") == {under_way.key_of(house.configured[0]): suspect}
    gate.open()
    await required(house.repository.index()[0].growth)
    assert not under_way.suspects(file, "")
    os.close(file)


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


async def test_a_bucket_that_does_not_compile_beside_the_traffic_leaves_the_others(
    make_house: Callable[..., House],
) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2, 4), modes=(Mode.XLA,))]

    def fail() -> None:
        house.compile_error = ValueError("no kernel")

    house.compiling = GateAt(2, fail)
    await house.repository.load_all()
    await required(house.repository.index()[0].growth)
    assert [entry.bucket.batch for entry in house.entries] == [1]
    assert await house.ask(images=3) == [1] * 3


async def test_a_bucket_serves_without_the_mode_that_it_fails_in_where_auto_can_do_without(
    make_house: Callable[..., House],
) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2), modes=("auto",))]
    house.compile_errors[Mode.OPENVINO, Bucket(2, 2, 2)] = ModelFailed("no kernel")
    await house.repository.load_all()
    (version,) = house.repository.index()
    await required(version.growth)
    assert [entry.mode for entry in house.entries if entry.bucket.batch == 2] == [Mode.XLA, Mode.GRAPH]
    assert version.auto[Bucket(2, 2, 2)] in {Mode.XLA, Mode.GRAPH}
    assert version.warnings == ["auto does without openvino: no kernel"]


async def test_a_model_that_grows_can_be_unloaded(make_house: Callable[..., House]) -> None:
    house = make_house(ready_when="first_bucket")
    house.configured = [model("a", buckets=(1, 2), modes=(Mode.XLA,))]
    gate = house.compiling = GateAt(2)
    await house.repository.load_all()
    await gate.reached()
    await house.repository.unload("a")
    gate.open()
    assert house.states() == [State.UNLOADED]
    assert len(house.entries) == 1
