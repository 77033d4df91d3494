"""Frozen settings, checked once.

One YAML file, overridden by environment variables (`XLASERVE_GRPC_PORT=9001`), overridden by flags
(`--grpc-port 9001`). Without a file the built-in configuration serves `builtin:digits`. The text under each field is
its documentation; the command's help prints it, and `xlaserve config --show` the values in force.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from xlaserve.errors import ConfigError

MIB: Final = 1024 * 1024
ENV_PREFIX: Final = "XLASERVE_"
CONFIG_FILE_VARIABLE: Final = "XLASERVE_CONFIG"

# What Kubernetes sets in every pod of a namespace that has a Service called xlaserve.
_FROM_KUBERNETES: Final = re.compile(rf"{ENV_PREFIX}(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")


class Mode(StrEnum):
    """How a model is run."""

    EAGER = "eager"
    """Operation by operation, from Python."""
    GRAPH = "graph"
    """As a `tf.function`, without XLA."""
    XLA = "xla"
    """As a `tf.function` with `jit_compile=True`."""
    AUTO = "auto"
    """Each bucket in the mode that warm-up measured to be the fastest."""


class PerformanceHint(StrEnum):
    """What lanes and threads are set for."""

    THROUGHPUT = "throughput"
    """Most images a second: on a CPU a lane per core with one thread each, on a GPU two overlapping lanes."""
    LATENCY = "latency"
    """Shortest time for one image: one lane with all threads."""


class Bucket(NamedTuple):
    """A padded input shape that is compiled ahead of traffic."""

    batch: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.height}x{self.width}"


class BucketSettings(NamedTuple):
    """A bucket as it is configured: without height and width it takes the model's own."""

    batch: int
    height: int | None = None
    width: int | None = None


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(_Frozen):
    """One model to serve."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """What requests call it."""
    source: str
    """Where it comes from: `keras.applications:<Name>`, the path of a `.keras` file or of a SavedModel folder,
    `builtin:digits`, or `builtin:noop`."""
    version: str = Field("1", pattern=r"^[0-9]{1,9}$", coerce_numbers_to_str=True)
    """What requests may call its version; a number."""
    weights: str | None = None
    """For `keras.applications`: `imagenet` (the default: Keras's own download and cache), `random`, or the path of a
    weights file. Other sources hold their own weights."""
    preprocess: Literal["auto", "none", "tf", "torch", "caffe", "unit"] = "auto"
    """What is done to RGB pixels from 0 to 255 inside the compiled program: `tf` scales to -1..1, `unit` to 0..1,
    `torch` to 0..1 and then by ImageNet's mean and deviation, `caffe` reorders to BGR and subtracts ImageNet's mean,
    `none` passes 0..255. `auto` is what Keras defines for the family, and `none` for other sources."""
    input_size: tuple[int, int] | None = None
    """Height and width, for a model that takes several; the model's own by default."""
    labels: Path | None = None
    """A text file with the name of one class a line."""
    modes: tuple[Mode, ...] = Field((Mode.XLA,), min_length=1)
    """The modes that it offers; each is compiled and warmed for every bucket. `auto` has `xla` and `graph` compiled
    besides and runs each bucket in the fastest."""
    default_mode: Mode | None = None
    """The mode of a request that names none; the first of `modes` by default."""
    buckets: tuple[BucketSettings, ...] = Field((BucketSettings(1), *map(BucketSettings, (2, 4, 8, 16))), min_length=1)
    """The input shapes to compile: batch sizes such as `8`, or `[batch, height, width]`. Requests are padded to the
    cheapest of them, or split."""
    max_queue_delay_ms: float = Field(0.0, ge=0, le=10_000)
    """How long an incomplete batch may wait for company while a lane is free. 0: an idle device never waits. Raise it
    only where throughput at low load matters more than latency."""
    max_queue_images: int | None = Field(None, ge=1)
    """Overrides the server's `max_queue_images`."""

    @field_validator("buckets", mode="before")
    @classmethod
    def _allow_plain_batch_sizes(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return tuple((item,) if isinstance(item, int) else item for item in value)

    @field_validator("buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[BucketSettings, ...]) -> tuple[BucketSettings, ...]:
        for bucket in value:
            if (bucket.height is None) != (bucket.width is None):
                raise ValueError("a bucket is a batch size or [batch, height, width]")
            if any(side is not None and not 1 <= side <= 65_536 for side in bucket):
                raise ValueError("every number of a bucket is from 1 to 65536")
        return tuple(dict.fromkeys(value))

    @field_validator("input_size")
    @classmethod
    def _check_input_size(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not all(1 <= side <= 65_536 for side in value):
            raise ValueError("height and width are from 1 to 65536")
        return value

    @field_validator("modes")
    @classmethod
    def _drop_repeated_modes(cls, value: tuple[Mode, ...]) -> tuple[Mode, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _check_default_mode(self) -> Self:
        if self.default_mode is not None and self.default_mode not in self.modes:
            raise ValueError(f"default_mode {self.default_mode} is not one of modes {', '.join(self.modes)}")
        return self

    @property
    def compiled_modes(self) -> tuple[Mode, ...]:
        """The modes to compile: those offered, and those that `auto` chooses from."""
        choice = (Mode.XLA, Mode.GRAPH) if Mode.AUTO in self.modes else ()
        return tuple(mode for mode in dict.fromkeys((*self.modes, *choice)) if mode is not Mode.AUTO)

    @property
    def effective_default_mode(self) -> Mode:
        """The mode of a request that names none."""
        return self.default_mode or self.modes[0]


BUILTIN_MODELS: Final = (
    ModelSettings(
        name="digits",
        source="builtin:digits",
        modes=(Mode.XLA, Mode.GRAPH, Mode.EAGER),
        buckets=tuple(map(BucketSettings, (1, 2, 4, 8, 16, 32))),
    ),
)


class Settings(_Frozen):
    """The server's settings."""

    # Where it listens.
    host: str = "127.0.0.1"
    """Address to listen on, for gRPC and HTTP. `0.0.0.0` serves other machines too; there is no authentication."""
    grpc_port: int = Field(8001, ge=0, le=65_535)
    """gRPC port; 0 takes a free one."""
    http_port: int = Field(8002, ge=0, le=65_535)
    """Port of /metrics, /healthz and /readyz; 0 takes a free one."""
    ready_file: Path | None = None
    """Once ready, write here a JSON object with `grpc`, `http` (HOST:PORT) and `pid`; removed at the end."""
    reflection: bool = True
    """Serve gRPC reflection, for grpcurl and its like."""
    channelz: bool = False
    """Serve grpc.channelz.v1, for debugging connections."""
    model_control: bool = True
    """Let clients load and unload models."""

    # What runs the models.
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto` takes the first GPU where TensorFlow sees one, else the CPU."""
    performance_hint: PerformanceHint = PerformanceHint.THROUGHPUT
    """Sets lanes and threads: `throughput` or `latency`."""
    lanes: int | None = Field(None, ge=1, le=256)
    """Batches that run at the same time; overrides the hint."""
    threads_per_lane: int | None = Field(None, ge=1, le=256)
    """TensorFlow's threads for one lane on a CPU; overrides the hint."""
    exit_on_model_failure: bool = True
    """Exit when a model fails to load at start-up. Otherwise the server serves the others and shows it as failed."""

    # Bounds.
    max_queue_images: int = Field(2048, ge=1)
    """Images that may wait in one model's queue, those being decoded included. More get RESOURCE_EXHAUSTED."""
    max_queue_bytes: int = Field(512 * MIB, ge=1)
    """Bytes, encoded and decoded, that may wait in one model's queue."""
    max_message_bytes: int = Field(64 * MIB, ge=1024, le=2**31 - 1)
    """Largest gRPC message."""
    max_image_bytes: int = Field(32 * MIB, ge=1)
    """Largest encoded image."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Most pixels of a decoded image: a small file can unpack to gigabytes."""
    decode_threads: int | None = Field(None, ge=1, le=256)
    """Threads that decode images; one per core by default."""
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    """How long accepted work may take to finish after SIGTERM or an unload."""

    # What it says.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` adds a line per request."""
    log_format: Literal["human", "json"] = "human"
    """Log lines for people or for machines."""

    models: tuple[ModelSettings, ...] = BUILTIN_MODELS
    """The models to serve."""

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        names = [model.name for model in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"each model's name is its own; given more than once: {', '.join(repeated)}")
        return value


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Returns the effective settings: `flags` over the environment over `file` over the defaults.

    `flags` and the file hold values by field name. Relative paths in the file are taken from the file's folder.
    Raises ConfigError, which names each wrong field, its value and what was expected.
    """
    if file is None and CONFIG_FILE_VARIABLE in environ:
        file = Path(environ[CONFIG_FILE_VARIABLE])
    values = {**(_from_file(file) if file else {}), **_from_environment(environ), **(flags or {})}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def dump(settings: Settings) -> str:
    """Returns the settings as YAML that `load` reads back to the same settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _from_file(file: Path) -> dict[str, object]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file}: can't be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {file}: not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {file}: expected a mapping of fields, got {type(values).__name__}")
    models = values.get("models")
    if isinstance(models, list):
        values["models"] = [
            _resolve_paths(model, file.parent) if isinstance(model, dict) else model for model in models
        ]
    if isinstance(values.get("ready_file"), str):
        values["ready_file"] = str(file.parent / values["ready_file"])
    return values


def _resolve_paths(model: dict[str, object], folder: Path) -> dict[str, object]:
    resolved = dict(model)
    source, weights, labels = (model.get(key) for key in ("source", "weights", "labels"))
    if isinstance(source, str) and ":" not in source:
        resolved["source"] = str(folder / source)
    if isinstance(weights, str) and weights not in ("imagenet", "random"):
        resolved["weights"] = str(folder / weights)
    if isinstance(labels, str):
        resolved["labels"] = str(folder / labels)
    return resolved


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_FILE_VARIABLE or _FROM_KUBERNETES.match(name):
            continue
        field = name.removeprefix(ENV_PREFIX).lower()
        if field not in Settings.model_fields:
            raise ConfigError(f"environment variable {name}: no such field")
        try:
            values[field] = yaml.safe_load(text) if field == "models" else text
        except yaml.YAMLError as error:
            raise ConfigError(f"environment variable {name}: not YAML: {error}") from None
    return values


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors():
        field = ".".join(str(part) for part in detail["loc"]) or "settings"
        if detail["type"] == "extra_forbidden":
            lines.append(f"{field}: no such field")
        else:
            reason = detail["msg"].removeprefix("Value error, ")
            lines.append(f"{field}: {reason}, got {reprlib.repr(detail['input'])}")
    return "configuration: " + "; ".join(lines)
