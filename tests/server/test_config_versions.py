from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from xlaserve.config import ModelSettings, dump, load
from xlaserve.config.versions import grouped
from xlaserve.errors import ConfigError


@pytest.fixture
def cats(tmp_path: Path) -> Path:
    """A folder of versions in the layouts of TensorFlow Serving, Triton, and with a .keras file."""
    cats = tmp_path / "cats"
    for folder in ("1", "0002/model.savedmodel", "10"):
        (cats / folder).mkdir(parents=True)
    (cats / "1" / "saved_model.pb").touch()
    (cats / "0002" / "model.savedmodel" / "saved_model.pb").touch()
    (cats / "10" / "net.keras").touch()
    (cats / "new").mkdir()
    return cats


def read(folder: Path, **settings: Any) -> tuple[ModelSettings, ...]:
    return load(flags={"models": [{"name": "cats", "source": str(folder), **settings}]}, environ={}).models


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        ({}, ["10"]),
        ({"versions": "latest 2"}, ["2", "10"]),
        ({"versions": "latest 9"}, ["1", "2", "10"]),
        ({"versions": "all"}, ["1", "2", "10"]),
        ({"versions": [10, 1]}, ["1", "10"]),
        ({"version_labels": {"stable": 2}}, ["2", "10"]),
        ({"versions": [10], "routing": {"1": 5}}, ["1", "10"]),
        ({"versions": [10], "shadow": {"version": 2}}, ["2", "10"]),
    ],
)
def test_versions_of_a_folder_are_chosen_by_a_policy_and_by_name(
    cats: Path, settings: dict[str, Any], versions: list[str]
) -> None:
    assert [model.version for model in read(cats, **settings)] == versions


def test_each_version_has_the_source_in_its_folder(cats: Path) -> None:
    assert [model.source for model in read(cats, versions="all")] == [
        str(cats / "1"),
        str(cats / "0002" / "model.savedmodel"),
        str(cats / "10" / "net.keras"),
    ]


@pytest.mark.parametrize("inside", ["net.keras", "net.jax", "model.savedmodel/saved_model.pb"])
def test_a_folder_with_one_model_is_that_model(tmp_path: Path, inside: str) -> None:
    file = tmp_path / inside
    file.parent.mkdir(exist_ok=True)
    file.touch()
    (tmp_path / "README").touch()
    (model,) = read(tmp_path)
    assert model.source == str(tmp_path / inside.partition("/")[0])
    (tmp_path / "another.keras").touch()
    (model,) = read(tmp_path)
    assert model.source == str(tmp_path)


def test_what_is_shown_of_versions_is_read_back(cats: Path, tmp_path: Path) -> None:
    settings = load(
        flags={"models": [{"name": "cats", "source": str(cats), "versions": "all", "version_labels": {"stable": 2}}]},
        environ={},
    )
    (tmp_path / "shown.yaml").write_text(dump(settings))
    assert load(tmp_path / "shown.yaml", environ={}) == settings


def test_a_saved_model_is_no_folder_of_versions(cats: Path) -> None:
    (cats / "1" / "1").mkdir()
    assert [(model.version, model.source) for model in read(cats / "1", version=7)] == [("7", str(cats / "1"))]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"versions": "latest"}, "expected latest 2 or another number, all, or a list of versions, got 'latest'"),
        ({"versions": []}, "expected latest 2"),
        ({"versions": [1, 3]}, "versions: expected some of 1, 2, 10, got 3"),
        ({"version": 2}, "version: expected `versions`, as its source is a folder of versions"),
        ({"version_labels": {"stable": 3}}, "expected folders of the versions that are named, got none for 3"),
        ({"version_labels": {"2": 2}}, "version_labels.2"),
        ({"routing": {"canary": 5}}, r"routing: expected labels or versions \(10\), got canary"),
        ({"routing": {"1": 60, "2": 50}}, "expected percentages of 100 together at most"),
    ],
)
def test_versions_that_are_not_there_are_named(cats: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(cats, **settings)


def test_a_version_removed_while_it_is_read_is_a_configuration_error(
    cats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(folder: Path) -> Path:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr("xlaserve.config.versions._source", gone)
    with pytest.raises(ConfigError, match="model cats: source: No such file or directory"):
        read(cats)


def test_a_policy_without_a_folder_of_versions_is_refused() -> None:
    with pytest.raises(ConfigError, match="versions: expected numbered folders in its source"):
        load(flags={"models": [{"name": "a", "source": "builtin:noop", "versions": "all"}]}, environ={})


def entry(version: int, **settings: Any) -> dict[str, Any]:
    return {"name": "a", "source": "builtin:noop", "version": version, **settings}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry(1), entry(1)], "model a: expected each version once, 1 is repeated"),
        ([entry(1, version_labels={"stable": 2})], "version_labels.stable: expected one of 1, got 2"),
        ([entry(1, routing={"beta": 5})], "model a: routing: expected labels or versions (1), got beta"),
        (
            [entry(1, version_labels={"old": 1}, shadow={"version": "old"}), entry(2, shadow={"version": 3})],
            "model a: shadow.version: expected labels or versions (1, 2, old), got 3",
        ),
        (
            [entry(1, routing={"1": 5}), entry(2, routing={"1": 6})],
            "model a: routing: expected one value for all versions, got 2",
        ),
    ],
)
def test_versions_of_one_model_fit_together(entries: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(flags={"models": entries}, environ={})


@pytest.mark.parametrize("field", ["shadow", "routing"])
@pytest.mark.parametrize("wrong", ["a b", -1, "1" * 19, "x" * 65])
def test_what_is_neither_version_nor_label_is_refused_alike_everywhere(field: str, wrong: str | int) -> None:
    value = {"version": wrong} if field == "shadow" else {wrong: 5}
    with pytest.raises(ConfigError, match=r"expected a version's number, or a label: .*, got") as refused:
        load(flags={"models": [entry(1, **{field: value})]}, environ={})
    assert str(refused.value).count("; ") == 0


def test_a_version_without_the_others_refers_to_none_of_them() -> None:
    entries = [entry(1, version_labels={"beta": 2}, routing={"beta": 5}, shadow={"version": "beta"}), entry(2)]
    first, _ = load(flags={"models": entries}, environ={}).models
    alone = load(flags={"models": [first.alone.model_dump(mode="json")]}, environ={}).models
    assert alone == (ModelSettings(**entry(1)),)


def test_messages_name_the_version_where_there_are_several_or_one_is_set() -> None:
    def titles(*entries: dict[str, Any]) -> list[str]:
        (found,) = grouped(load(flags={"models": entries}, environ={}).models).values()
        return [one.title for one in found.versions.values()]

    unset = {"name": "a", "source": "builtin:noop"}
    assert titles(unset) == ["a"]
    assert titles(entry(1)) == ["a version 1"]
    assert titles(unset, entry(2)) == ["a version 1", "a version 2"]


def test_settings_shared_by_all_versions_are_set_at_one_of_them() -> None:
    models = load(flags={"models": [entry(1), entry(2, version_labels={"stable": 1})]}, environ={}).models
    found = grouped(models)["a"]
    assert found.labels == {"stable": "1"}
    assert found.default.version == "1"
    assert found.versions == {str(number): ModelSettings(**entry(number)) for number in (1, 2)}


def test_a_version_has_one_way_to_be_written() -> None:
    assert ModelSettings(**entry(1) | {"version": "007"}).version == "7"
    with pytest.raises(ValidationError):
        ModelSettings(**entry(1) | {"version": "1" * 19})
