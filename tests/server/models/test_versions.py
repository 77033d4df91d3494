"""Versions of a model that serve at the same time, on programs that compile and run when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.server.models.house import House, model

from xlaserve.config import Mode, ModelSettings
from xlaserve.errors import ModelFailed, ModelNotFound, ModelNotReady
from xlaserve.models.version import State
from xlaserve.telemetry.findings import Findings, Pair


def versions(*numbers: int, **settings: object) -> list[ModelSettings]:
    """Returns versions of the model `a`; `settings` are those of all."""
    return [model("a", version=number, **settings) for number in numbers]


def of_version(house: House, number: int) -> list[State]:
    return [version.state for version in house.repository.index() if version.settings.version == str(number)]


async def test_versions_of_a_model_serve_together_and_the_highest_is_the_default(house: House) -> None:
    house.configured = versions(2, 10, 9)
    await house.repository.load_all()
    assert house.answering("", "2", "9", "10") == ["10", "2", "9", "10"]
    assert [await house.ask(version=version) for version in ("2", "10", "9", "")] == [[1], [2], [3], [2]]
    with pytest.raises(ModelNotFound, match=r"model a has no version '3'; it has 2, 10, 9"):
        house.repository.get("a", "3")


async def test_a_label_names_a_version_and_stable_answers_for_all(house: House) -> None:
    house.configured = versions(1, 2, 3, version_labels={"stable": 2, "canary": 3})
    await house.repository.load_all()
    assert house.answering("stable", "canary", "") == ["2", "3", "2"]
    with pytest.raises(ModelNotFound, match=r"model a has no version 'beta'; it has 1, 2, 3, stable, canary"):
        house.repository.get("a", "beta")


async def test_where_stable_does_not_serve_the_highest_version_that_does_answers(
    make_house: Callable[..., House],
) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = versions(1, 2, 3, version_labels={"stable": 2})
    house.load_errors["a version 2"] = ModelFailed("weights: expected a file")
    await house.repository.load_all()
    assert house.answering("", "3") == ["3", "3"]
    with pytest.raises(ModelFailed, match="model a version 2 failed: weights: expected a file"):
        house.repository.get("a", "stable")


async def test_a_version_that_loads_is_not_ready_by_its_label(house: House) -> None:
    house.configured = versions(1, 2, version_labels={"canary": 2})
    house.loading.close()
    loading = asyncio.create_task(house.repository.load_all())
    await house.loading.reached()
    with pytest.raises(ModelNotReady, match="model a version 2 is loading"):
        house.repository.get("a", "canary")
    house.loading.open()
    await loading


async def test_no_request_is_lost_while_a_version_is_rolled(house: House) -> None:
    house.configured = versions(1, version_labels={"stable": 1})
    await house.repository.load_all()
    answers: list[int] = []
    by_label: list[int] = []

    async def keep_asking() -> None:
        while not rolling.done():
            answers.extend(await house.ask(images=3))
            by_label.extend(await house.ask(version="stable"))

    async def roll() -> None:
        for number in range(2, 6):
            house.configured = versions(number, version_labels={"stable": number})
            await house.repository.reconfigure(house.configured)

    rolling = asyncio.create_task(roll())
    await asyncio.gather(rolling, *(keep_asking() for _ in range(8)))
    assert 1 in answers and 1 in by_label
    assert await house.ask() == [5]
    assert [version.settings.version for version in house.repository.index()] == ["5"]


async def test_a_new_version_that_fails_leaves_the_old_one_and_its_label(house: House) -> None:
    house.configured = versions(1, version_labels={"stable": 1})
    await house.repository.load_all()
    house.load_errors["a version 2"] = ModelFailed("weights: expected a file")
    house.configured = versions(2, version_labels={"stable": 2})
    (failed,) = await house.repository.reconfigure(house.configured)
    assert failed == "a as before: model a version 2 failed: weights: expected a file"
    assert house.answering("", "stable", "1") == ["1", "1", "1"]
    assert of_version(house, 2) == [State.FAILED]
    house.load_errors.clear()
    assert await house.repository.reconfigure(house.configured) == ["a loaded"]
    assert house.answering("", "stable", "1") == ["2", "2", ""]
    assert of_version(house, 2) == [State.READY]


async def test_with_unload_first_the_old_version_leaves_before_the_new_one_loads(
    make_house: Callable[..., House],
) -> None:
    house = make_house(version_order="unload_first")
    house.configured = versions(1, 2)
    await house.repository.load_all()
    house.configured = [*versions(2, buckets=(1,)), *versions(3)]
    house.loading.close()
    rolling = asyncio.create_task(house.repository.reconfigure(house.configured))
    await house.loading.reached()
    assert of_version(house, 1) == []
    assert of_version(house, 2) == [State.LOADING], "it has other settings, and is unloaded before it is loaded again"
    with pytest.raises(ModelNotReady):
        await house.ask()
    house.loading.open()
    await rolling
    assert house.answering("", "2", "3") == ["3", "2", "3"]


async def test_a_label_whose_version_left_first_is_not_ready_rather_than_unknown(
    make_house: Callable[..., House],
) -> None:
    house = make_house(version_order="unload_first")
    house.configured = versions(1, version_labels={"stable": 1})
    await house.repository.load_all()
    house.configured = versions(2, version_labels={"stable": 2})
    house.loading.close()
    rolling = asyncio.create_task(house.repository.reconfigure(house.configured))
    await house.loading.reached()
    for version in ("stable", "2", ""):
        with pytest.raises(ModelNotReady, match="model a version 2 is loading"):
            house.repository.get("a", version)
    house.loading.open()
    await rolling
    assert house.answering("", "stable") == ["2", "2"]


async def test_labels_move_without_a_reload(house: House) -> None:
    house.configured = versions(1, 2, version_labels={"stable": 1})
    await house.repository.load_all()
    house.configured = versions(1, 2, version_labels={"stable": 2, "old": 1})
    assert await house.repository.reconfigure(house.configured) == ["a has other labels or shares"]
    assert house.answering("", "stable", "old") == ["2", "2", "1"]
    house.configured = versions(1, 2)
    await house.repository.reconfigure(house.configured)
    assert house.answering("", "old") == ["2", ""]
    assert len(house.programs) == 2
    assert await house.repository.reconfigure(house.configured) == []


async def test_a_label_moves_to_a_new_version_once_that_is_ready(house: House) -> None:
    house.configured = versions(1, 2, version_labels={"canary": 2})
    await house.repository.load_all()
    house.configured = versions(1, 2, 3, version_labels={"canary": 3})
    house.loading.close()
    rolling = asyncio.create_task(house.repository.reconfigure(house.configured))
    await house.loading.reached()
    assert house.answering("canary") == ["2"]
    house.loading.open()
    await rolling
    assert house.answering("canary") == ["3"]


async def test_a_version_that_is_no_longer_configured_leaves_alone(house: House) -> None:
    house.configured = versions(1, 2, 3)
    await house.repository.load_all()
    house.configured = versions(2, 3)
    assert await house.repository.reconfigure(house.configured) == ["a version 1 unloaded"]
    assert house.answering("1", "2", "3") == ["", "2", "3"]
    assert len(house.programs) == 3


async def test_findings_of_a_shadow_end_when_another_loading_replaces_it(house: House) -> None:
    house.configured = versions(1, 2, 3)
    await house.repository.load_all()
    one, two, _ = house.repository.versions("a")
    pairs = [Pair(Mode.XLA, version, Mode.XLA) for version in ("2", "3")]
    one.shadows = {pair: Findings() for pair in pairs}
    house.configured = [*versions(1), *versions(2, buckets=(1,)), *versions(3)]
    await house.repository.reconfigure(house.configured)
    assert house.repository.versions("a")[1] is not two
    assert [*one.shadows] == pairs[1:]
    house.configured = versions(1, 2)
    await house.repository.reconfigure(house.configured)
    assert not one.shadows


async def test_a_load_by_name_loads_all_versions_and_an_unload_ends_all(house: House) -> None:
    house.configured = versions(1, 2)
    await house.repository.load_all()
    house.configured = versions(1, 2, 3)
    await house.repository.load("a")
    assert len(house.programs) == 2 + 3
    assert [await house.ask(version=version) for version in "123"] == [[3], [4], [5]]
    await house.repository.unload("a")
    assert [(one.settings.version, one.state) for one in house.repository.index()] == [
        (number, State.UNLOADED) for number in "123"
    ]
    assert house.repository.serving() == {"a": False}


async def test_two_loadings_of_a_version_are_shown_once_by_that_which_serves(house: House) -> None:
    house.configured = versions(1, 2)
    await house.repository.load_all()
    house.loading.close()
    loading = asyncio.create_task(house.repository.load("a"))
    await house.loading.reached()
    assert [(one.settings.version, one.state) for one in house.repository.versions("a")] == [
        ("1", State.READY),
        ("2", State.READY),
    ]
    assert len(house.repository.index()) == 3
    house.loading.open()
    await loading


async def test_shares_of_requests_go_to_versions_by_their_ids(house: House) -> None:
    house.configured = versions(1, 2, 3, version_labels={"stable": 2, "canary": 3}, routing={"canary": 5, "1": 10})
    await house.repository.load_all()
    ids = [f"request-{number}" for number in range(4000)]
    chosen = [house.repository.routed("a", id_).settings.version for id_ in ids]
    shares = {number: chosen.count(number) / len(ids) for number in "123"}
    assert shares == pytest.approx({"1": 0.10, "2": 0.85, "3": 0.05}, abs=0.02)
    assert [house.repository.routed("a", id_).settings.version for id_ in ids] == chosen
    by_chance = [house.repository.routed("a", "").settings.version for _ in range(1000)]
    assert {"1", "2", "3"} == {*by_chance}


async def test_a_request_routed_to_a_version_not_ready_goes_to_the_default(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = versions(1, 2, routing={"2": 100})
    house.load_errors["a version 2"] = ModelFailed("no")
    await house.repository.load_all()
    assert house.repository.routed("a", "any").settings.version == "1"


async def test_a_version_that_is_asked_for_by_name_is_not_routed(house: House) -> None:
    house.configured = versions(1, 2, version_labels={"stable": 1}, routing={"2": 100})
    await house.repository.load_all()
    assert house.answering("", "stable", "1") == ["1", "1", "1"]
    assert house.repository.routed("a", "").settings.version == "2"


async def test_a_request_being_parsed_is_answered_before_its_version_ends(house: House) -> None:
    house.configured = versions(1)
    await house.repository.load_all()
    parsed = house.repository.get("a")
    parsed.calls += 1
    house.configured = versions(2)
    rolling = asyncio.create_task(house.repository.reconfigure(house.configured))
    await house.sees(State.DRAINING)
    assert house.answering("", "1") == ["2", ""]
    batcher = parsed.version.batcher
    assert batcher is not None
    batcher.admission.admit(1, 1)
    batcher.admission.leave(1, 1)
    assert not rolling.done()
    parsed.leave()
    await rolling
    with pytest.raises(ModelNotReady):
        batcher.admission.admit(1, 1)


async def test_decoding_without_a_model_is_that_of_the_settings_or_unknown(make_house: Callable[..., House]) -> None:
    house = make_house(exit_on_model_failure=False)
    house.configured = [model("a"), model("b", decode="fast")]
    house.load_errors |= {name: ModelFailed("weights: expected a file") for name in ("a", "b")}
    await house.repository.load_all()
    assert {version.name: version.decode_text for version in house.repository.index()} == {"a": "", "b": "fast"}
