from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn
from unittest.mock import Mock

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st
from pydantic import PlainSerializer, ValidationError

from xlaserve.config import (
    BUILTIN_MODELS,
    Bucket,
    BucketSettings,
    Grey16,
    Mode,
    ModelSettings,
    PerformanceHint,
    Settings,
    check_files,
    dump,
    load,
)
from xlaserve.config.base import Frozen, OrPath, Pairs
from xlaserve.config.files import resolved
from xlaserve.config.sources import BUILTIN_SOURCES, Source, kind_of
from xlaserve.errors import ConfigError
from xlaserve.models import catalog

NOTHING: dict[str, str] = {}

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        file = tmp_path / "xlaserve.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def load_model(write: Write, fields: str) -> ModelSettings:
    (model,) = load(write(f"models: [{{name: m, source: 'builtin:noop', {fields}}}]"), environ=NOTHING).models
    return model


# Where values come from.


def test_without_anything_it_serves_the_built_in_digits() -> None:
    settings = load(environ=NOTHING)
    assert settings == Settings()
    assert settings.models == BUILTIN_MODELS
    assert [model.source for model in settings.models] == ["builtin:digits"]


def test_flags_override_the_environment_the_file_and_the_defaults(write: Write) -> None:
    file = write("{grpc_port: 1, http_port: 1, lanes: 1}")
    settings = load(file, {"grpc_port": 3}, {"XLASERVE_GRPC_PORT": "2", "XLASERVE_HTTP_PORT": "2"})
    assert (settings.grpc_port, settings.http_port, settings.lanes, settings.host) == (3, 2, 1, "127.0.0.1")


def test_the_environment_may_name_the_file(write: Write) -> None:
    file = write("lanes: 7")
    assert load(environ={"XLASERVE_CONFIG": str(file)}).lanes == 7


def test_the_environment_takes_every_type() -> None:
    environ = {
        "XLASERVE_DRAIN_TIMEOUT_S": "1.5",
        "XLASERVE_EXIT_ON_MODEL_FAILURE": "no",
        "XLASERVE_PERFORMANCE_HINT": "latency",
        "XLASERVE_READY_FILE": "run/ready.json",
        "XLASERVE_MODELS": "[{name: a, source: 'builtin:noop', buckets: [1, [2, 8, 8]]}]",
    }
    settings = load(environ=environ)
    assert settings.drain_timeout_s == 1.5
    assert settings.exit_on_model_failure is False
    assert settings.performance_hint is PerformanceHint.LATENCY
    assert settings.ready_file == Path("run/ready.json")
    assert settings.models[0].buckets == (BucketSettings(1), BucketSettings(2, 8, 8))


@pytest.mark.parametrize("service", ["XLASERVE", "XLASERVE_GRPC", "XLASERVE_CATS_PREDICTOR"])
def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting(service: str) -> None:
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8001",
        f"{service}_SERVICE_PORT_GRPC": "8001",
        f"{service}_PORT": "tcp://10.0.0.1:8001",
        f"{service}_PORT_8001_TCP": "tcp://10.0.0.1:8001",
        f"{service}_PORT_8001_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ) == Settings()
    assert load(environ={"XLASERVE_GRPC_PORT": "9001"}).grpc_port == 9001


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}", "---"])
def test_an_empty_file_serves_no_demo(text: str, write: Write) -> None:
    with pytest.raises(ConfigError, match=r"xlaserve\.yaml: expected fields, models among them, got none"):
        load(write(text), environ=NOTHING)
    models = '[{"name": "a", "source": "builtin:noop"}]'
    assert [model.name for model in load(write(text), environ={"XLASERVE_MODELS": models}).models] == ["a"]


def test_a_small_queue_is_no_fault_where_nobody_asked_for_larger_buckets() -> None:
    model = {"name": "a", "source": "builtin:noop", "max_queue_images": 2}
    assert load(flags={"models": [model]}, environ=NOTHING).models[0].max_queue_images == 2


def test_relative_paths_in_the_file_start_at_its_folder(write: Write, tmp_path: Path) -> None:
    file = write(
        """
        ready_file: run/ready.json
        models:
          - {name: a, source: models/a.keras, labels: labels.txt}
          - {name: b, source: /models/b, labels: /labels.txt}
          - {name: c, source: "keras.applications:ResNet50", weights: imagenet}
          - {name: d, source: "keras.applications:ResNet50", weights: random}
          - {name: e, source: "keras.applications:ResNet50", weights: e.weights.h5}
        """
    )
    settings = load(file, environ=NOTHING)
    a, b, c, d, e = settings.models
    assert settings.ready_file == tmp_path / "run/ready.json"
    assert (a.source, a.labels) == (str(tmp_path / "models/a.keras"), tmp_path / "labels.txt")
    assert (b.source, b.labels) == ("/models/b", Path("/labels.txt"))
    assert (c.source, c.weights, d.weights) == ("keras.applications:ResNet50", "imagenet", "random")
    assert e.weights == str(tmp_path / "e.weights.h5")


class Inner(Frozen):
    place: Path
    note: Annotated[str | None, OrPath(lambda text: "/" in text)] = None


class Outer(Frozen):
    text: str
    places: tuple[Path, ...] = ()
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    pairs: Pairs[str, str] = ()


def test_which_fields_are_paths_is_told_by_their_types() -> None:
    written = {
        "text": "a/b",
        "places": ["a", "/b"],
        "inner": {"place": "c", "note": "d/e", "none": "f"},
        "inners": [{"place": "g", "note": "h"}, 3],
        "pairs": {"place": "i"},
    }
    assert resolved(written, [Outer], Path("/etc")) == {
        "text": "a/b",
        "places": ["/etc/a", "/b"],
        "inner": {"place": "/etc/c", "note": "/etc/d/e", "none": "f"},
        "inners": [{"place": "/etc/g", "note": "h"}, 3],
        "pairs": {"place": "i"},
    }


# What they become.


def test_buckets_are_batch_sizes_or_whole_shapes(write: Write) -> None:
    assert load_model(write, "buckets: [4, [8], [2, 32, 48]]").buckets == (
        BucketSettings(4),
        BucketSettings(8),
        BucketSettings(2, 32, 48),
    )


def test_buckets_are_shown_as_they_are_written(write: Write) -> None:
    for written in ([4, [2, 32, 48]], "auto"):
        model = load_model(write, f"buckets: {written}")
        assert yaml.safe_load(dump(Settings(models=(model,))))["models"][0]["buckets"] == written


@pytest.mark.parametrize(
    ("written", "read"),
    [("high_byte", Grey16.HIGH_BYTE), ("largest", Grey16.LARGEST), ("[0, 4095]", (0, 4095)), ("null", None)],
)
def test_16_bit_grey_is_read_and_shown_as_it_is_written(written: str, read: object, write: Write) -> None:
    model = load_model(write, f"grey16: {written}")
    assert model.grey16 == read
    assert load(write(dump(Settings(models=(model,)))), environ=NOTHING).models == (model,)


def test_a_bucket_reads_as_its_shape() -> None:
    assert str(Bucket(8, 224, 192)) == "8x224x192"


def test_every_mode_compiles_itself_or_chooses_among_modes_that_do() -> None:
    for mode in Mode:
        compiled = ModelSettings(name="m", source="fake", modes=(mode,)).compiled_modes
        assert compiled == (mode.traits.choice or (mode,))
        assert not any(one.traits.choice for one in compiled)


def test_the_default_mode_is_the_first_unless_another_is_named(write: Write) -> None:
    assert load_model(write, "modes: [graph, xla]").effective_default_mode is Mode.GRAPH
    assert load_model(write, "modes: [graph, xla], default_mode: xla").effective_default_mode is Mode.XLA


def test_a_version_may_be_written_as_a_number(write: Write) -> None:
    assert load_model(write, "version: 12").version == "12"


@pytest.mark.parametrize(
    ("host", "is_on"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_clients_control_models_only_on_loopback_or_when_authenticated(host: str, is_on: bool) -> None:
    for name in ("model_control", "admin"):
        open_to_all = Settings.model_validate({"host": host, name: True})
        assert getattr(open_to_all, f"has_{name}") is is_on
        recognised = Settings.model_validate({"host": host, name: True, "access": "access.yaml"})
        assert getattr(recognised, f"has_{name}")
    assert not Settings(host=host).has_admin
    assert not Settings(host=host, model_control=False).has_model_control


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.grpc_port = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        settings.models[0].name = "other"  # type: ignore[misc]
    assert hash(settings) == hash(Settings())


@pytest.mark.parametrize("kind", [Settings, ModelSettings])
def test_how_a_list_or_a_mapping_is_written_is_shown_by_an_example(kind: type[Settings | ModelSettings]) -> None:
    own_words = {"buckets", "versions", "grey16"}
    required = {"name": "m", "source": "builtin:noop"} if kind is ModelSettings else {}
    for name, field in kind.model_fields.items():
        is_pairs = any(isinstance(item, PlainSerializer) for item in field.metadata)
        if is_pairs or "tuple[" in str(field.annotation):
            assert field.examples or name in own_words, name
        for example in field.examples or ():
            kind.model_validate({**required, name: example})


@pytest.mark.parametrize("kind", [Settings, ModelSettings])
def test_every_field_is_documented(kind: type[Settings | ModelSettings]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


sides = st.integers(1, 65_536)
batches = st.integers(1, 2048)
models = st.builds(
    ModelSettings,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    source=st.sampled_from(["builtin:noop", "keras.applications:ResNet50", "/models/a.keras"]),
    version=st.integers(0, 10**18 - 1).map(str),
    weights=st.sampled_from([None, "imagenet", "random", "/weights.h5"]),
    input_size=st.none() | st.tuples(sides, sides),
    labels=st.sampled_from([None, Path("/labels/größe.txt")]),
    modes=st.lists(st.sampled_from(Mode), min_size=1, unique=True).map(tuple),
    buckets=st.lists(st.tuples(batches) | st.tuples(batches, sides, sides), min_size=1, unique=True).map(tuple),
    max_queue_delay_ms=st.floats(0, 10_000),
    max_queue_images=st.none() | st.integers(2048),
)
all_settings = st.builds(
    Settings,
    host=st.sampled_from(["127.0.0.1", "0.0.0.0", "::1"]),
    grpc_port=st.integers(0, 65_535).filter(lambda port: port not in (8000, 8002)),
    ready_file=st.sampled_from([None, Path("/run/ready.json")]),
    upgrades=st.booleans(),
    performance_hint=st.sampled_from(PerformanceHint),
    lanes=st.none() | st.integers(1, 256),
    drain_timeout_s=st.floats(0, 3600),
    log_format=st.sampled_from(["human", "json"]),
    models=st.lists(models, min_size=1, max_size=3, unique_by=lambda model: model.name).map(tuple),
)


@hypothesis.given(all_settings)
@hypothesis.settings(deadline=None, max_examples=50)
def test_what_is_dumped_loads_to_the_same_settings(settings: Settings) -> None:
    assert load(flags=yaml.safe_load(dump(settings)), environ=NOTHING) == settings


def test_off_is_a_value_and_switches_off(write: Write) -> None:
    assert load_model(write, "verification: off").verification == "off"
    for no, yes in (("no", "yes"), ("off", "on"), ("false", "true")):
        settings = load(write(f"{{reflection: {no}, upgrades: {yes}, model_control: {no}}}"), environ=NOTHING)
        assert (settings.reflection, settings.upgrades, settings.model_control) == (False, True, False)


def test_a_dump_is_a_configuration_file(write: Write) -> None:
    noop = ModelSettings(name="noop", source="builtin:noop")
    # A relative path would be taken from the file's folder.
    settings = Settings(lanes=3, profile_dir=Path("/profiles"), models=(*BUILTIN_MODELS, noop))
    assert load(write(dump(settings)), environ=NOTHING) == settings


# What is refused. Each message names the field, what was expected, and the value.


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("grpc_port: 70000", ["grpc_port: expected at most 65535, got 70000"]),
        ("grpc_port: eight", ["grpc_port: ", "whole number", "got 'eight'"]),
        ("host: ''", ["host: expected at least 1 character", "got ''"]),
        ("device: tpu", ["device: ", "expected one of auto, cpu, gpu, gpu:1", "got 'tpu'"]),
        ("drain_timeout_s: .nan", ["drain_timeout_s: ", "at most 3600 seconds", "got nan"]),
        ("lanes: 0", ["lanes: ", "at least 1", "got 0"]),
        ("fronts: -1", ["configuration: fronts: expected 'auto' or at least 0, got -1"]),
        ("access: 3", ["access: expected a path, got 3"]),
        ("grpc_prot: 1", ["grpc_prot: no such field"]),
        ("models: 3", ["models: expected a list, as in models: [{name: digits, source: 'builtin:digits'}], got 3"]),
        ("models: {name: a}", ["models: expected a list, as in models: [{name: ", "got {'name': 'a'}"]),
        ("max_message_bytes: 9999999999", ["max_message_bytes: expected at most 2147483647 bytes, got 9999999999"]),
        ("max_inflight_bytes: 1GB", ["max_inflight_bytes: expected a whole number of bytes, got '1GB'"]),
        ("drain_timeout_s: 5s", ["drain_timeout_s: expected a number of seconds, got '5s'"]),
        ("models: []", ["models: expected at least one model, got []"]),
        ("lanes: true", ["lanes: expected neither true nor false, got True"]),
        ("grpc_port: on", ["grpc_port: ", "got 'on'"]),
        ("host: false", ["host: expected neither true nor false, got False"]),
        ("reflection: perhaps", ["reflection: ", "got 'perhaps'"]),
        ("{grpc_port: 9, http_port: 9}", ["settings: grpc_port and http_port: expected two ports, got 9 for both"]),
        ("grpc_port: 8002", ["settings: grpc_port and metrics_port: expected two ports, got 8002 for both"]),
        ("drain_timeout_s: 2024-13-45", ["drain_timeout_s: ", "expected a number of seconds", "got '2024-13-45'"]),
        (
            "{max_queue_images: 8, models: [{name: a, source: b, buckets: [8]}, {name: c, source: d, buckets: [16]}]}",
            ["settings: max_queue_images: expected at least 16, the largest bucket of model c, got 8"],
        ),
        ("models: [{name: a, source: b, buckets: [1, 4096]}]", ["expected at least 4096, ", "model a, got 2048"]),
        ("models: [3]", ["models.0: expected a mapping of fields, as in models: [{name: digits, ", "got 3"]),
        ("models: [{name: a}]", ["model a: source: expected a value, got none"]),
        ("models: [{name: a, source: b, batch: 3}]", ["model a: batch: no such field"]),
        ("{grpc_port: -1, lanes: x}", ["grpc_port: ", "got -1", "lanes: ", "got 'x'"]),
        ("trace_endpoint: localhost:4317", ["trace_endpoint: expected an address such as http://localhost:4317, got "]),
        ("trace_sample_ratio: 1.5", ["trace_sample_ratio: ", "at most 1", "got 1.5"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected_and_what_came(
    text: str, parts: list[str], write: Write
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(write(text), environ=NOTHING)
    message = str(refusal.value)
    assert message.startswith("configuration: ")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ("version: v2", ["model m: version: ", "pattern", "got 'v2'"]),
        (
            "modes: [fast]",
            ["model m: modes.0: ", "'eager', 'graph', 'xla', 'autocluster', 'openvino' or 'auto'", "got 'fast'"],
        ),
        ("modes: [XLA]", ["model m: modes.0: expected ", "got 'XLA', did you mean xla?"]),
        (
            "labels: [0, 1]",
            ['model m: labels: expected names in quotes, as in labels: ["0", "1"] or a path, got [0, 1] (line 1)'],
        ),
        ("labels: [a, [b]]", ["model m: labels.1: expected text, got ['b'] (line 1)"]),
        ("outputs: {a: {task: classification, labels: [0, 1]}}", ["names in quotes", "got [0, 1] (line 1)"]),
        ("modes: []", ["model m: modes: expected at least 1 item", "got []"]),
        ("modes: xla", ["model m: modes: expected a list, as in modes: [xla, graph], got 'xla' (line 1)"]),
        (
            "resolutions: auto",
            ["model m: resolutions: expected a list, as in resolutions: [[224, 224]], got"],
        ),
        ("shadow: true", ["model m: shadow: expected neither true nor false"]),
        ("shadow: graph", ["expected a mapping of fields, as in shadow: {version: canary, share: 0.01}, got 'graph'"]),
        ("examples: photos", ["expected a mapping of fields, as in examples: {folder: photos}, got 'photos'"]),
        ("examples: {max_difference: 0.1}", ["model m: examples.folder: expected"]),
        ("examples: {folder: a, min_agreement: 2}", ["model m: examples.min_agreement: expected at most 1, got 2"]),
        ("routing: {canary: 200}", ["model m: routing.canary: expected at most 100, got 200 (line 1)"]),
        ("routing: {'!': 3}", ["model m: routing.!: expected a version's number, or a label", "got '!'"]),
        ("routing: canary", ["model m: routing: expected a mapping, as in routing: {canary: 5}, got 'canary'"]),
        ("version_labels: {stable: x}", ["model m: version_labels.stable: expected ", "got 'x'"]),
        ("modes: [xla, graph, xla]", ["model m: modes: expected each once, xla is repeated, got ['xla', "]),
        ("buckets: [1, 4, [4], 8]", ["model m: buckets: expected each once, 4 is repeated, got [1, 4, [4], 8]"]),
        ("buckets: [4, [4, 2, 3], [4, 2, 3]]", ["model m: buckets: expected each once, 4x2x3 is repeated"]),
        ("resolutions: [[8, 9], [8, 9]]", ["model m: resolutions: expected each once, 8x9 is repeated"]),
        ("disable_lowerings: [stem, stem]", ["model m: disable_lowerings: expected each once, stem is repeated"]),
        ("openvino_precision: half", ["model m: openvino_precision: ", "'float16' or 'int8'", "got 'half'"]),
        ("shadow: {share: 0.5}", ["model m: shadow: expected another version, or a mode"]),
        ("shadow: {version: 1}", ["model m: shadow: expected another version, or a mode"]),
        ("shadow: {mode: graph}", ["model m: shadow.mode: expected one of modes (xla), got graph"]),
        ("shadow: {version: 2, share: 0}", ["model m: shadow.share: ", "more than 0", "got 0"]),
        ("openvino_precision: int8", ["model m: openvino_precision int8 needs a calibration"]),
        ("calibration: a", ["model m: calibration: expected openvino_precision: int8 with it, got None"]),
        ("precision: int8", ["model m: precision: expected float32, bfloat16 or float16; int8 is for openvino"]),
        (
            "openvino_precision: int8, calibration: a, precision: bfloat16",
            ["model m: openvino_precision int8 is made of float32: expected that precision, got bfloat16"],
        ),
        ("modes: [xla], default_mode: graph", ["model m: default_mode: expected one of modes (xla), got graph"]),
        ("buckets: 8", ["model m: buckets: ", "got 8"]),
        ("buckets: []", ["model m: buckets: expected auto, or a list of batch sizes", "got []"]),
        ("buckets: automatic", ["model m: buckets: expected auto, or a list of batch sizes", "got 'automatic'"]),
        ("auto_buckets: {max_batch: 0}", ["model m: auto_buckets.max_batch: ", "at least 1", "got 0"]),
        ("auto_buckets: {most: 1}", ["model m: auto_buckets.most: no such field"]),
        ("resolutions: [[64, 0]]", ["model m: resolutions: expected heights and widths to be from 1 to 65536"]),
        (
            "resolutions: [64]",
            ["model m: resolutions.0: expected a list, as in resolutions: [[224, 224]], got 64"],
        ),
        (
            "resolutions: [[64, 64]], input_size: [64, 64]",
            ["model m: input_size and resolutions are both set; expected one of them"],
        ),
        ("buckets: [0]", ["model m: buckets: expected every number of a bucket to be from 1 to 65536, got [0]"]),
        (
            "buckets: [[1, 2]]",
            ["model m: buckets: expected each bucket to be a batch size or [batch, height, width], got [[1, 2]]"],
        ),
        ("buckets: [[1, 2, 3, 4]]", ["model m: buckets.0: ", "at most 3 items", "got [1, 2, 3, 4]"]),
        ("buckets: [true, 2]", ["model m: buckets: expected neither true nor false"]),
        ("input_size: [224, TRUE]", ["model m: input_size: expected neither true nor false", "got [224, True]"]),
        ("classes: true", ["model m: classes: expected neither true nor false, got True"]),
        ("score_threshold: .nan", ["model m: score_threshold: ", "got nan"]),
        ("auto_buckets: {max_batch: true}", ["model m: auto_buckets.max_batch: expected neither true nor false"]),
        ("auto_buckets: {max_compile_s: .nan}", ["model m: auto_buckets.max_compile_s: ", "got nan"]),
        *(
            (f"grey16: {value}", ["model m: grey16: expected high_byte or largest, or a window [low, high] from 0 to"])
            for value in (
                "upper",
                "[0]",
                "[0, 0]",
                "[9, 3]",
                "[-1, 9]",
                "[0, 65536]",
                "[0, 9.5]",
                "4095",
                "{a: 1}",
                "[false, true]",
            )
        ),
        ("buckets: [many]", ["model m: buckets.0: ", "got 'many'"]),
        (
            "input_size: [224, 0]",
            ["model m: input_size: expected height and width to be from 1 to 65536, got [224, 0]"],
        ),
        ("max_queue_delay_ms: -1", ["model m: max_queue_delay_ms: ", "at least 0", "got -1"]),
        (
            "output_names: scores",
            ["model m: output_names: expected a mapping, as in output_names: {scores: logits}"],
        ),
        (
            "buckets: [1, [8, 4, 4]], max_queue_images: 4",
            ["model m: max_queue_images: expected at least 8, the largest bucket of model m, got 4"],
        ),
        ("buckets: auto, auto_buckets: {max_batch: 6}, max_queue_images: 5", ["expected at least 6, ", "got 5"]),
        (
            "buckets: [1.5]",
            ["model m: buckets.0: expected a whole number or a list, as in buckets: [1, 4, [1, 224, 224]], got 1.5"],
        ),
        ("versions: [1.5]", ["configuration: model m: versions.0: expected pattern "]),
        ("preprocess: bgr", ["model m: preprocess: ", "'caffe', 'unit'", "got 'bgr'"]),
        ("preprocess: {mean: [a]}", ["configuration: model m: preprocess.mean.0: expected a number", "got 'a'"]),
        ("preprocess: {scale: 2}", ["configuration: model m: preprocess.scale: no such field"]),
        ("preprocess: {}", ["model m: preprocess: ", "divisor, mean or deviation, as in preprocess: {"]),
    ],
)
def test_a_wrong_field_of_a_model_is_named_by_its_place(fields: str, parts: list[str], write: Write) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_model(write, fields)
    assert [part for part in parts if part not in str(refusal.value)] == []


MISTYPED = """\
grpc_port: 9000
lane: 2
log_level: inform
models:
  - name: a
    source: builtin:noop
    bukets: [1]
    modes:
      - xla
      - grahp
    decode: fsat
    auto_buckets: {max_batches: 3}
  - {name: b,
     source: builtin:noop,
     output_names: {score: out},
     nothing_like_it: 1}
"""


def test_what_is_mistyped_is_named_with_its_line_and_the_nearest_name(write: Write) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(write(MISTYPED), environ=NOTHING)
    assert set(str(refusal.value).removeprefix("configuration: ").split("; ")) == {
        "lane: no such field, did you mean lanes? (line 2)",
        "log_level: expected 'debug', 'info', 'warning' or 'error', got 'inform', did you mean info? (line 3)",
        "model a: bukets: no such field, did you mean buckets? (line 7)",
        "model a: modes.1: expected 'eager', 'graph', 'xla', 'autocluster', 'openvino' or 'auto', got 'grahp',"
        " did you mean graph? (line 10)",
        "model a: decode: expected 'exact', 'fast' or 'tensorflow', got 'fsat', did you mean fast? (line 11)",
        "model a: auto_buckets.max_batches: no such field, did you mean max_batch? (line 12)",
        "model b: output_names.score: expected 'scores', 'boxes', 'classes', 'count', 'class_map', 'embedding',"
        " 'values', 'keypoints' or 'image', got 'score', did you mean scores? (line 15)",
        "model b: nothing_like_it: no such field (line 16)",
    }


def test_a_field_that_no_file_has_is_named_without_a_line(write: Write) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(write("lanes: 1\nhost: a"), flags={"lanes": 0}, environ={"XLASERVE_GRPC_PORT": "x"})
    assert "(line" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"no such field, did you mean XLASERVE_MODELS\?$"):
        load(environ={"XLASERVE_MODELLS": "[]"})


def test_a_value_that_came_by_an_alias_has_the_line_of_what_names_it(write: Write) -> None:
    text = "models:\n- &a {name: a, source: b, batch: 3}\n- {<<: *a,\n   name: c}\n"
    with pytest.raises(ConfigError) as refusal:
        load(write(text), environ=NOTHING)
    assert "model a: batch: no such field (line 2)" in str(refusal.value)
    assert "model c: batch: no such field (line 3)" in str(refusal.value)


def test_many_mistakes_are_found_soon(write: Write) -> None:
    text = "models:\n" + "".join(f"- {{name: m{number}, source: s, wrong: 1}}\n" for number in range(1000))
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"model m999: wrong: no such field.* \(line 1001\)"):
        load(write(text), environ=NOTHING)
    assert time.perf_counter() - started < 20


def test_a_list_whose_values_are_wrong_is_not_said_to_be_too_short(write: Write) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_model(write, "modes: [fast]")
    assert str(refusal.value).count("model m: modes") == 1


def test_a_name_is_one_word(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"model a b: name: .*pattern.*got 'a b'"):
        load(write("models: [{name: 'a b', source: 'builtin:noop'}]"), environ=NOTHING)


def test_files_that_are_not_there_are_named_all_at_once(write: Write, tmp_path: Path) -> None:
    (tmp_path / "there.keras").touch()
    settings = load(
        write(
            """
            models:
              - {name: a, source: there.keras, labels: a.txt}
              - {name: b, source: "keras.applications:ResNet50", weights: b.weights.h5, auto_buckets: {demand: b.json}}
              - {name: c, source: "keras.applications:ResNet50", weights: random, buckets: auto}
              - {name: d, source: "kagglehub:a/b/keras/c", buckets: auto, auto_buckets: {demand: d.json}}
              - {name: e, source: e}
            """
        ),
        environ=NOTHING,
    )
    with pytest.raises(ConfigError) as refusal:
        check_files(settings)
    wrong = {
        "model a: labels": "a.txt",
        "model b: weights": "b.weights.h5",
        "model d: auto_buckets.demand": "d.json",
        "model e: source": "e",
    }
    assert str(refusal.value) == "configuration: " + "; ".join(
        f"{field}: expected an existing path, got {tmp_path / name}" for field, name in wrong.items()
    )
    check_files(Settings())


def test_a_path_with_shell_characters_is_said_to_be_taken_as_it_is(write: Write) -> None:
    for path in ("$MODELS/a.keras", "~/a.keras"):
        with pytest.raises(ConfigError, match=r"\$NAME and ~ stand for themselves$"):
            check_files(load(write(f"models: [{{name: a, source: '{path}'}}]"), environ=NOTHING))


@pytest.mark.parametrize("field", ["access", "tls_client_ca"])
def test_a_file_of_the_server_that_is_not_there_is_named(field: str, write: Write, tmp_path: Path) -> None:
    for name in ("tls_certificate", "tls_key"):
        (tmp_path / name).touch()
    tls = "tls_certificate: tls_certificate\ntls_key: tls_key\n"
    settings = load(write(f"{tls}{field}: gone\nmodels: [{{name: a, source: 'builtin:noop'}}]"), environ=NOTHING)
    with pytest.raises(ConfigError, match=f"configuration: {field}: expected an existing path, got {tmp_path}/gone"):
        check_files(settings)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ("source: 'builtin:digit'", ["source: expected one of keras.applications:<Name>, ", "got builtin:digit"]),
        ("source: 'keras.aplications:ResNet50'", ["builtin:noop or a path, got keras.aplications:ResNet50"]),
        (
            "source: notes.txt",
            [
                "source: expected a .keras or .h5 file, ",
                " or the folder of a SavedModel, got ",
                "notes.txt",
            ],
        ),
        ("source: 'builtin:digits', labels: folder", ["labels: expected a file, got ", "folder"]),
        ("source: net.jax, weights: gone.npz", ["weights: expected an existing path, got ", "gone.npz"]),
        ("source: 'keras_cv:X', weights: folder", ["weights: expected a file, got ", "folder"]),
        (
            "source: 'builtin:noop', buckets: auto, auto_buckets: {demand: folder}",
            ["auto_buckets.demand: expected a file, got ", "folder"],
        ),
        (
            "source: 'builtin:digits', openvino_precision: int8, calibration: gone",
            ["model m: calibration: expected a folder that xlaserve calibrate wrote, got ", "gone"],
        ),
    ],
)
def test_what_can_not_be_what_it_is_named_for_is_refused(
    fields: str, parts: list[str], write: Write, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("notes.txt", "net.jax"):
        (tmp_path / name).touch()
    settings = load(write(f"models: [{{name: m, {fields}}}]"), environ=NOTHING)
    with pytest.raises(ConfigError) as refusal:
        check_files(settings)
    assert [part for part in parts if part not in str(refusal.value)] == []


@pytest.mark.parametrize("fields", ["source: 'builtin:digits', openvino_precision: int8, calibration", "source"])
def test_what_may_not_be_looked_at_is_refused(
    fields: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: bool) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    settings = load(write(f"models: [{{name: m, {fields}: shut/up.keras}}]"), environ=NOTHING)
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigError) as refusal:
        check_files(settings)
    assert str(refusal.value) == f"configuration: {tmp_path / 'shut/up.keras'} can't be looked at: Permission denied"


def test_weights_of_kerashub_are_a_preset_a_folder_or_a_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for weights in ("resnet_50_imagenet", "kaggle://keras/vgg/keras/vgg_16_imagenet/3", "hf://me/mine", "random"):
        settings = load(write(f"models: [{{name: m, source: 'keras_hub:X', weights: '{weights}'}}]"), environ=NOTHING)
        check_files(settings)
        assert settings.models[0].weights == weights
    settings = load(write("models: [{name: m, source: 'keras_hub:X', weights: folder}]"), environ=NOTHING)
    check_files(settings)
    assert settings.models[0].weights == str(tmp_path / "folder")
    settings = load(write("models: [{name: m, source: 'keras_hub:X', weights: a.weights.h5}]"), environ=NOTHING)
    with pytest.raises(ConfigError, match=r"weights: expected an existing path, got .*a\.weights\.h5"):
        check_files(settings)


def test_every_kind_of_source_is_told_by_its_name_or_its_files(tmp_path: Path) -> None:
    files = {
        Source.KERAS_FILE: ("net.keras", "net.h5", "net.HDF5"),
        Source.GRAPH_FILE: ("net.pb",),
        Source.ONNX_TFLITE_FILE: ("net.onnx", "net.tflite"),
        Source.JAX_FILE: ("net.jax",),
    }
    kinds = {name: kind for kind, names in files.items() for name in names}
    for name in (*kinds, "net.pkl"):
        (tmp_path / name).touch()
    (tmp_path / "saved").mkdir()
    kinds["saved"] = Source.SAVED_MODEL
    paths = {str(tmp_path / name): kind for name, kind in kinds.items()}
    named = {form: kind for kind in Source if kind.value.prefix for form in kind.forms}
    for source, kind in (named | paths).items():
        assert kind_of(source) is kind
    assert {*named.values(), *paths.values()} == set(Source)
    for source in ("builtin:other", "keras_cv", "net.keras", str(tmp_path / "net.pkl")):
        assert kind_of(source) is None


def test_a_name_that_is_unknown_is_refused_whatever_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kagle:x.keras").touch()
    assert kind_of("kagle:x.keras") is None
    assert kind_of("./kagle:x.keras") is Source.KERAS_FILE
    with pytest.raises(ConfigError, match=r"got kagle:x\.keras"):
        check_files(Settings(models=(ModelSettings(name="m", source="kagle:x.keras"),)))


def test_what_is_asked_of_a_model_at_each_load_does_not_touch_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.config.sources.Path", Mock(side_effect=AssertionError("it touched the disk")))
    model = ModelSettings(name="m", source="./net.keras")
    assert catalog.uses_tensorflow(model)
    assert catalog.can_be_kept(model)


@pytest.mark.parametrize("source", [*BUILTIN_SOURCES, "keras_cv:YOLOV8Detector-YOLOV8S", "kagglehub:a/b/keras/c", "."])
def test_what_is_there_is_no_wrong_source(source: str) -> None:
    check_files(Settings(models=(ModelSettings(name="m", source=source),)))


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"grpc_port: .*got 70000"):
        load(flags={"grpc_port": 70_000}, environ=NOTHING)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("XLASERVE_GRPC_PRT", "1", "environment variable XLASERVE_GRPC_PRT: no such field"),
        ("XLASERVE_GRPC_PORT", "x", "configuration: grpc_port: .*whole number.*got 'x'"),
        ("XLASERVE_MODELS", "[a: b: c", "environment variable XLASERVE_MODELS: not YAML"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environ={name: value})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "not YAML"),
        (b"- 1", "expected a mapping of fields, got a list"),
        (b"\xff\xfe\xfa", "can't be read"),
        (b"!!python/object/apply:os.getcwd []", "not YAML"),
        (b"lanes: 2\nlanes: 3\n", "not YAML: expected each key once, got lanes at line 2, column 1"),
        (b"models:\n- name: a\n  source: b\n  name: c\n", "expected each key once, got name at line 4, column 3"),
        (b"1: 2", "expected text as a key; put it in quotation marks, got 1"),
        (b"true: 2", "expected text as a key; put it in quotation marks, got true"),
        (b"~: 2", "expected text as a key"),
        (b"[a]: 2", "expected text as a key"),
        (b"lanes: " + b"9" * 5000, "expected a value that can be read, got 9999"),
        (b"lanes: 0x" + b"f" * 5000, "expected a number of at most 64 bits"),
        (b"lanes: !!timestamp 2024-13-45", "expected a value that can be read, got 2024-13-45"),
        (b"lanes: !!int x", "expected a value that can be read, got x"),
        (b"lanes: " + b"[" * 5000 + b"]" * 5000, "expected fewer levels of nesting"),
        (b"lanes: " + b"{a: " * 5000 + b"}" * 5000, "expected fewer levels of nesting"),
        (
            b"a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + b"".join(b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 10)) for n in range(98, 108)),
            "expected at most 100000 values, aliases included",
        ),
        (b"models: &a [*a]", "expected no alias within what it stands for"),
        (b"models: &a {b: *a}", "expected no alias within what it stands for"),
        (b"lanes:\t2\n\thost: x", "not YAML"),
        (b"host: 'a\x00b'", "not YAML"),
        (b'compile_cache: "a\\0b"', "expected text without null characters"),
        (b"--- {}\n--- {}", "not YAML"),
        (b"\x7fELF\x02\x01\x01\x00", "not YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        load(file, environ=NOTHING)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_aliases_merges_and_a_byte_order_mark_are_read_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "xlaserve.yaml"
    file.write_bytes(
        b"\xef\xbb\xbfmodels:\n"
        b"- &a {name: a, source: 'builtin:noop', buckets: &b [1, 2]}\n"
        b"- {<<: *a, name: b}\n"
        b"- {name: c, source: 'builtin:noop', buckets: *b}\n"
        b"- {<<: [{name: e, source: 'builtin:noop'}, *a], name: d}\n"
    )
    models = load(file, environ=NOTHING).models
    assert [(model.name, model.source, len(model.buckets)) for model in models] == [
        (name, "builtin:noop", 2) for name in "abcd"
    ]


def test_a_models_own_queue_counts_instead_of_the_servers(write: Write) -> None:
    fields = "{name: a, source: b, buckets: [1, 8], max_queue_images: 8}"
    assert load(write(f"{{max_queue_images: 1, models: [{fields}]}}"), environ=NOTHING).models[0].largest_batch == 8


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000, "[{a: 1, a: 2}]", "2024-13-45"])
def test_yaml_from_elsewhere_is_checked_as_a_file_is(value: str) -> None:
    with pytest.raises(ConfigError, match=r"XLASERVE_MODELS: not YAML: expected|models: .*got"):
        load(environ={"XLASERVE_MODELS": value})


@hypothesis.given(st.text(max_size=60) | st.text("[]{}:&*,-#|>!'\"\\\n 019.exy~<", max_size=60))
@hypothesis.settings(max_examples=500)
def test_any_text_is_settings_or_a_configuration_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        load(environ={"XLASERVE_MODELS": text})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: can't be read"):
        load(tmp_path / "nowhere.yaml", environ=NOTHING)


def test_auto_buckets_are_read_and_shown_as_such(write: Write) -> None:
    model = load_model(write, "buckets: auto, auto_buckets: {max_batch: 20, demand: d.json}")
    assert model.has_auto_buckets
    assert model.auto_buckets.candidates == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert model.auto_buckets.demand == write("").parent / "d.json"
    shown = dump(Settings(models=(model,)))
    assert "buckets: auto\n" in shown
    assert Settings.model_validate(yaml.safe_load(shown)).models == (model,)


@pytest.mark.parametrize(
    ("fields", "programs"),
    [
        ("modes: [xla, graph], buckets: [1, 8]", 4),
        ("modes: [auto], buckets: [1]", 3),
        ("buckets: auto", 8),
        ("buckets: [1, 2, [4, 9, 9]], resolutions: [[8, 8], [8, 16]]", 5),
        ("buckets: auto, resolutions: [[8, 8], [8, 16]], auto_buckets: {max_batch: 4}", 8),
    ],
)
def test_the_programs_that_warm_up_compiles_are_counted(fields: str, programs: int, write: Write) -> None:
    assert load_model(write, fields).most_programs == programs


@pytest.mark.parametrize("value", ["off", None])
def test_the_port_of_metrics_can_be_left_out(value: str | None) -> None:
    settings = Settings.model_validate({"metrics_port": value})
    assert settings.metrics_port is None
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tls_certificate": "a.pem"}, "tls_certificate and tls_key: expected both or neither"),
        ({"tls_key": "a.pem"}, "tls_certificate and tls_key: expected both or neither"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca: expected tls_certificate as well"),
        ({"metrics_port": "on"}, "metrics_port: expected a whole number"),
    ],
)
def test_settings_of_tls_go_together(values: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(flags=values, environ={})


def test_the_token_of_commands_is_no_setting() -> None:
    settings = load(environ={"XLASERVE_TOKEN": "xla_secret", "XLASERVE_CA": "ca.pem"})
    assert "xla_secret" not in dump(settings)


def test_several_engines_need_fronts() -> None:
    assert Settings(fronts=1, engines=2).engines == 2
    assert Settings(engines=1).engines == 1
    assert Settings(engines=2).fronts == "auto", "which is several processes on a GPU"
    with pytest.raises(ValidationError, match="engines: expected fronts: 1 or more as well, got engines: 2 alone"):
        Settings(fronts=0, engines=2)


def test_a_pipe_is_refused_as_it_can_not_be_read_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "access")
    with pytest.raises(ConfigError, match=r"access: expected a file, which can be read again"):
        check_files(Settings(access=tmp_path / "access"))
