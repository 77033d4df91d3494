"""Models that a command line names by their sources."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from xlaserve import config
from xlaserve.commands import named_models
from xlaserve.config import BucketSettings, Color, Mode, ModelSettings, ScalingSettings, Settings
from xlaserve.errors import ConfigError
from xlaserve_client.cli_parser import Parser


def settings(*line: str, **others: Any) -> Settings:
    parser = Parser()
    named_models.add_options(parser)
    flags = named_models.settings_of(vars(parser.parse_args(line)))
    return config.load(flags=flags, environ={}, **others)


def model(*line: str) -> ModelSettings:
    (found,) = settings(*line).models
    return found


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_is_served_by_its_name() -> None:
    assert model("models/cats.keras") == ModelSettings(name="cats", source="models/cats.keras")
    assert model("cats/model.h5").name == "cats"
    assert model("keras.applications:ResNet50").name == "ResNet50"


def test_flags_set_fields_of_the_model() -> None:
    line = "cats.keras --name pets --task classification --labels cat,dog --preprocess unit --input-size 96,128"
    found = model(*line.split(), "--color", "bgr", "--modes", "xla,graph", "--buckets", "1,4", "--set", "threshold=0.3")
    assert found == ModelSettings(
        name="pets",
        source="cats.keras",
        task="classification",
        labels=("cat", "dog"),
        preprocess="unit",
        input_size=(96, 128),
        color=Color.BGR,
        modes=(Mode.XLA, Mode.GRAPH),
        buckets=(BucketSettings(1), BucketSettings(4)),
        threshold=0.3,
    )


def test_labels_without_a_comma_are_a_file() -> None:
    assert model("cats.keras", "--labels", "labels.txt").labels == Path("labels.txt")


def test_buckets_may_be_chosen_by_the_server() -> None:
    assert model("cats.keras", "--buckets", "auto").has_auto_buckets


def test_several_sources_share_their_flags() -> None:
    found = settings("cats.keras", "dogs.keras", "--preprocess", "tf").models
    assert [(one.name, one.preprocess) for one in found] == [("cats", "tf"), ("dogs", "tf")]


def test_numbers_of_preprocessing_are_given_as_a_mapping() -> None:
    (model,) = settings("cats.keras", "--preprocess", "{mean: 127, deviation: 128}").models
    assert model.preprocess == ScalingSettings(mean=127, deviation=128)
    with pytest.raises(ConfigError, match="--preprocess: not YAML"):
        settings("cats.keras", "--preprocess", "{mean: 127")


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a:b.keras").touch()
    assert model("a:b.keras").source == "./a:b.keras"


def test_without_a_source_the_models_are_those_of_the_configuration() -> None:
    assert settings().models == config.BUILTIN_MODELS


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--labels cat,dog", "--labels: expected a SOURCE with it"),
        ("--set threshold=1", "--set: expected a SOURCE with it"),
        ("models.yaml", "got models.yaml, a configuration: --config models.yaml"),
        ("a.keras b.keras --name c", "--name: expected one SOURCE with it, got 2: a.keras, b.keras"),
        ("x/a.keras y/a.keras", "got a twice"),
        ("a.keras --set treshold=0.3", "did you mean threshold?"),
        ("a.keras --set threshold", "expected FIELD=VALUE with a field of a model, got threshold"),
        ("a.keras --set outputs={", "--set outputs: not YAML"),
        ("a.keras --buckets 1,many", "model a: buckets.1: expected a whole number or a list"),
        ("a.keras --modes fast", "model a: modes.0: expected 'eager'"),
    ],
)
def test_a_wrong_line_is_refused_with_the_flag_and_the_way_on(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(*line.split())
    assert says in str(refused.value)


def test_a_server_of_sources_is_ready_early_and_caches_for_its_user_alone(tmp_path: Path) -> None:
    defaults = named_models.defaults({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    folder = tmp_path / "cache" / "xlaserve"
    assert defaults == {"ready_when": "first_bucket", "compile_cache": str(folder)}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_the_configuration_says_goes_before_these_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("ready_when: all")
    found = settings("a.keras", file=file, defaults={"ready_when": "first_bucket", "lanes": 3})
    assert (found.ready_when, found.lanes) == ("all", 3)


def test_without_a_folder_that_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert named_models.defaults({"XDG_CACHE_HOME": str(tmp_path / "cache")}) == {"ready_when": "first_bucket"}
