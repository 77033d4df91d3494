"""The life of models, on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable

import pytest
from tests.server.models.house import PATIENCE_S, GateAt, House, model

from xlaserve.config import Mode
from xlaserve.errors import ModelNotReady, ShuttingDown
from xlaserve.models.version import State


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


async def test_a_drain_answers_everything_and_ends_at_once_when_nothing_waits(house: House) -> None:
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
