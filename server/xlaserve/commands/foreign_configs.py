"""Configurations of TensorFlow Serving and of Triton, to fields of ours. What has no counterpart is named."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message
from pydantic import ValidationError

from xlaserve.config import ModelSettings
from xlaserve.errors import ConfigError
from xlaserve_proto import foreign_configs_pb2 as pb

Json = dict[str, Any]
M = TypeVar("M", bound=Message)
Triton = pb.TritonModel

SAVED_MODELS: Final = ("tensorflow_savedmodel", "tensorflow")
"""Platforms and backends of Triton whose models are SavedModels."""
PIXELS: Final = (Triton.TYPE_UINT8, Triton.TYPE_INT32, Triton.TYPE_FP32, Triton.TYPE_FP16)
SCALED: Final = (Triton.TYPE_FP32, Triton.TYPE_FP16)
"""Types of pixels that clients may have scaled."""
CONFIG: Final = "config.pbtxt"
MAX_BUCKET: Final = 256
HOW: Final[dict[str, str]] = {
    "instance_group": "batches run on lanes: see `lanes` and `device` of the server",
    "logging_config": "see `log_level` and `log_format`",
    "sequence_batching": "no model keeps state",
    "model_warmup": "every bucket is compiled and run before traffic",
    "num_batch_threads": "batches run on lanes: see `lanes` of the server",
    "optimization": "XLA compiles every model: see `modes` and `precision`",
    "priority_levels": "requests may have a `priority` of 1 to 3",
    "default_priority_level": "requests without a `priority` have 2",
    "default_timeout_microseconds": "requests have a `timeout` of their own",
    "response_cache": "answers are not cached",
    "parameters": "they mean something to Triton's backends alone",
}
"""Advice on fields without a counterpart, by field."""


class Translation:
    """Models that were translated, and notes on what was not."""

    def __init__(self) -> None:
        self.models: list[Json] = []
        self.notes: list[str] = []

    def note(self, where: str, text: str) -> None:
        """Notes what was not translated."""
        self.notes.append(f"{where}: {text}")

    def leave(self, message: Message, where: str, *translated: str) -> None:
        """Notes each field of `message` that has a value and is not among those that were translated."""
        for field, _ in message.ListFields():
            if field.name not in translated:
                self.note(f"{where}{field.name}", HOW.get(field.name, "not translated"))

    def leave_out(self, name: str, why: str) -> None:
        """Notes a model that can't be served."""
        self.note(name, f"left out: {why}")

    def add(self, model: Json) -> None:
        """Adds a model, and notes what of it is no valid setting."""
        self.models.append(model)
        try:
            ModelSettings(**model)
        except ValidationError as error:
            for one in error.errors():
                self.note(".".join([str(model["name"]), *map(str, one["loc"])]), one["msg"])


def of_repository(folder: Path) -> list[Path]:
    """Returns the config.pbtxt of a model's folder, or of each model in Triton's repository. Raises ConfigError."""
    own = folder / CONFIG
    files = [own] if own.exists() else sorted(folder.glob(f"*/{CONFIG}"))
    if not files:
        raise ConfigError(f"{folder}: expected {CONFIG} in it or in the folders of models")
    return files


def translate(file: Path, batching_file: Path | None = None) -> Translation:
    """Returns the translation of a models.config or a config.pbtxt. Raises ConfigError for anything else."""
    found = Translation()
    text = _text(file)
    if "model_config_list" in text:
        serving = _parsed(text, pb.ModelServerConfig(), file)
        common = {}
        if batching_file:
            common = _batching(_parsed(_text(batching_file), pb.BatchingParameters(), batching_file), found)
        for config in serving.model_config_list.config:
            if model := _serving_model(config, found):
                found.add({**model, **deepcopy(common)})
        found.leave(serving, "", "model_config_list")
    elif (triton := _parsed(text, Triton(), file)).ListFields():
        if model := _triton_model(triton, file.resolve().parent, found):
            found.add(model)
    else:
        raise ConfigError(f"{file}: expected model_config_list, or the fields of a model of Triton's")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'expected text in UTF-8'}") from None


def _parsed(text: str, message: M, file: Path) -> M:
    """Returns `message` with the fields that it knows of `text` in protobuf's text format. Raises ConfigError."""
    try:
        return text_format.Parse(text, message, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise ConfigError(f"{file}: expected protobuf's text format; line {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: expected protobuf's text format, got too many levels") from None


def _serving_model(config: pb.ModelServerConfig.Model, found: Translation) -> Json | None:
    """Returns a model, None where it can't be served."""
    name, base, platform = config.name, config.base_path, config.model_platform
    if platform not in ("", "tensorflow"):
        found.leave_out(name, f"model_platform: expected 'tensorflow', got {platform!r}")
        return None
    if "://" in base:
        found.leave_out(name, f"base_path: expected a folder, got {base!r}; copy it")
        return None
    model: Json = {"name": name, "source": base, **_versions(config.model_version_policy)}
    if labels := dict(config.version_labels):
        model["version_labels"] = labels
    translated = ("name", "base_path", "model_platform", "model_version_policy", "version_labels")
    found.leave(config, f"{name}.", *translated)
    return model


def _versions(policy: pb.VersionPolicy) -> Json:
    """Returns which versions of a folder a policy chooses; nothing for the latest one, as by default."""
    if policy.HasField("all"):
        return {"versions": "all"}
    if policy.specific.versions:
        return {"versions": list(policy.specific.versions)}
    most = policy.latest.num_versions
    return {"versions": f"latest {most}"} if most > 1 else {}


def _batching(parameters: pb.BatchingParameters, found: Translation) -> Json:
    """Returns fields of each model for a file of batching parameters."""
    most = parameters.max_batch_size.value or 1
    sizes = parameters.allowed_batch_sizes or _powers(most)
    model: Json = {"buckets": _buckets([*sizes, most], found, "max_batch_size")}
    if delay_us := parameters.batch_timeout_micros.value:
        model["max_queue_delay_ms"] = delay_us / 1000
    if batches := parameters.max_enqueued_batches.value:
        model["max_queue_images"] = max(batches * most, *model["buckets"])
    translated = ("max_batch_size", "allowed_batch_sizes", "batch_timeout_micros", "max_enqueued_batches")
    found.leave(parameters, "", *translated)
    return model


def _triton_model(config: pb.TritonModel, folder: Path, found: Translation) -> Json | None:
    """Returns a model, None where it can't be served."""
    name = config.name or folder.name
    where = f"{name}."
    platform = config.platform or config.backend
    if config.HasField("ensemble_scheduling") or platform == "ensemble":
        found.leave_out(name, "an ensemble: the server decodes, resizes and preprocesses images itself")
        return None
    if platform not in SAVED_MODELS:
        found.leave_out(
            name, f"expected a SavedModel, got {platform!r}: export the network as one, or as a .keras file"
        )
        return None
    model: Json = {"name": name, "source": str(folder), **_versions(config.version_policy)}
    most, batching = config.max_batch_size, config.dynamic_batching
    preferred = batching.preferred_batch_size
    sizes = [1, *preferred, most] if preferred else [*_powers(most), most]
    model["buckets"] = _buckets(sizes, found, f"{where}max_batch_size")
    if delay_us := batching.max_queue_delay_microseconds:
        model["max_queue_delay_ms"] = delay_us / 1000
    policy = batching.default_queue_policy
    if size := policy.max_queue_size:
        model["max_queue_images"] = max(size, *model["buckets"])
    found.leave(policy, f"{where}dynamic_batching.default_queue_policy.", "max_queue_size")
    translated = ("preferred_batch_size", "max_queue_delay_microseconds", "default_queue_policy")
    found.leave(batching, f"{where}dynamic_batching.", *translated)
    model |= _triton_input(config.input, most, found, f"{where}input")
    model |= _triton_outputs(config.output, folder, found, f"{where}output")
    # Of SavedModels, the only one in a version's folder is taken.
    found.leave(
        config,
        where,
        *("name", "platform", "backend", "default_model_filename", "version_policy", "max_batch_size"),
        *("dynamic_batching", "input", "output"),
    )
    return model


def _triton_input(inputs: Sequence[Triton.Input], max_batch_size: int, found: Translation, where: str) -> Json:
    if len(inputs) != 1:
        found.note(where, f"expected one, an image, got {len(inputs)}")
        return {}
    (one,) = inputs
    model: Json = {"input_name": one.name} if one.name not in ("pixels", "image") else {}
    if one.data_type not in PIXELS:
        found.note(f"{where}.data_type", f"expected pixels, got {Triton.DataType.Name(one.data_type)}")
    elif one.data_type in SCALED:
        found.note(
            f"{where}.data_type",
            "say with `preprocess` what clients did to pixels; they send 0 to 255 now, or 0 to 1 with `pixel_range`",
        )
    found.leave(one, f"{where}.", "name", "data_type", "dims", "format")
    dims = list(one.dims)
    is_first = one.format == Triton.FORMAT_NCHW or (dims[:1] == [3] and dims[-1:] != [3])
    if max_batch_size == 0 and len(dims) == 4:
        dims = dims[1:]  # of the batch
    match dims:
        case [_, height, width] if is_first:
            model["layout"] = "channels_first"
        case [height, width] | [height, width, _]:
            pass
        case _:
            expected = "[height, width, channels], [channels, height, width] or [height, width]"
            found.note(f"{where}.dims", f"expected {expected}, got {dims}")
            return model
    return {**model, "input_size": [height, width]} if min(height, width) > 0 else model


def _triton_outputs(outputs: Sequence[Triton.Output], folder: Path, found: Translation, where: str) -> Json:
    for one in outputs:  # types and shapes are in the model itself
        found.leave(one, f"{where}.{one.name}.", "name", "label_filename", "data_type", "dims")
    names = [one.name for one in outputs]
    if len(outputs) > 1:
        found.note(
            f"{where}.name",
            f"say in `output_names` which of {', '.join(names)} is which, and the `task`; clients get the task's names",
        )
    model: Json = {"output_name": names[0]} if len(names) == 1 and names[0] else {}
    labels = [one.label_filename for one in outputs if one.label_filename]
    return {**model, "labels": str(folder / labels[-1])} if labels else model


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(min(most, MAX_BUCKET).bit_length())]


def _buckets(sizes: list[int], found: Translation, where: str) -> list[int]:
    """Returns buckets of these sizes, 1 at least."""
    if max(sizes) > MAX_BUCKET:
        found.note(where, f"the largest bucket is {MAX_BUCKET}; larger requests run as several batches")
    return sorted({min(size, MAX_BUCKET) for size in sizes if size > 0} | {1})
