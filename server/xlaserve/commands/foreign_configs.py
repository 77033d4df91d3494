"""Configurations of TensorFlow Serving and of Triton, to fields of ours. What has no counterpart is named."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from xlaserve.commands.text_proto import Message
from xlaserve.config import ModelSettings
from xlaserve.errors import ConfigError

Json = dict[str, Any]

SAVED_MODELS: Final = ("tensorflow_savedmodel", "tensorflow")
"""Platforms and backends of Triton whose models are SavedModels."""
OF_TRITON: Final = ("name", "platform", "backend", "input", "output")
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

    def leave(self, message: Message, where: str) -> None:
        """Notes each field that nobody has taken."""
        for name in message.left():
            self.note(f"{where}{name}", HOW.get(name, "not translated"))

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


def translate(message: Message, file: Path, batching: Message | None = None) -> Translation:
    """Returns the translation of a models.config or a config.pbtxt. Raises ConfigError for anything else."""
    found = Translation()
    if "model_config_list" in message:
        common = _batching(batching, found) if batching else {}
        for config in message.message("model_config_list").messages("config"):
            if model := _serving_model(config, found):
                found.add({**model, **deepcopy(common)})
        found.leave(message, "")
    elif any(name in message for name in OF_TRITON):
        if model := _triton_model(message, file.resolve().parent, found):
            found.add(model)
    else:
        raise ConfigError(f"{file}: expected model_config_list, or the fields of a model of Triton's")
    return found


def _serving_model(config: Message, found: Translation) -> Json | None:
    """Returns a model, None where it can't be served."""
    name = config.text("name")
    where = f"{name}."
    base = config.text("base_path")
    platform = config.text("model_platform")
    if platform not in ("", "tensorflow"):
        found.leave_out(name, f"model_platform: expected 'tensorflow', got {platform!r}")
        return None
    if "://" in base:
        found.leave_out(name, f"base_path: expected a folder, got {base!r}; copy it")
        return None
    model: Json = {"name": name, "source": base, **_versions(config.message("model_version_policy"))}
    labels = {one.text("key"): one.number("value") for one in config.messages("version_labels")}
    found.leave(config, where)
    return {**model, **({"version_labels": labels} if labels else {})}


def _versions(policy: Message) -> Json:
    """Returns which versions of a folder a policy chooses; nothing for the latest one, as by default."""
    if "all" in policy:
        return {"versions": "all"}
    if numbers := policy.message("specific").integers("versions"):
        return {"versions": numbers}
    most = policy.message("latest").number("num_versions", 1)
    return {"versions": f"latest {most}"} if most > 1 else {}


def _batching(parameters: Message, found: Translation) -> Json:
    """Returns fields of each model for a file of batching parameters."""
    most = parameters.number("max_batch_size", 1)
    sizes = parameters.integers("allowed_batch_sizes") or _powers(most)
    model: Json = {"buckets": _buckets([*sizes, most], found, "max_batch_size")}
    if delay_us := parameters.number("batch_timeout_micros"):
        model["max_queue_delay_ms"] = delay_us / 1000
    if batches := parameters.number("max_enqueued_batches"):
        model["max_queue_images"] = max(batches * most, *model["buckets"])
    found.leave(parameters, "")
    return model


def _triton_model(config: Message, folder: Path, found: Translation) -> Json | None:
    """Returns a model, None where it can't be served."""
    name = config.text("name") or folder.name
    where = f"{name}."
    backend = config.text("backend")
    platform = config.text("platform") or backend
    if "ensemble_scheduling" in config or platform == "ensemble":
        found.leave_out(name, "an ensemble: the server decodes, resizes and preprocesses images itself")
        return None
    if platform not in SAVED_MODELS:
        found.leave_out(
            name, f"expected a SavedModel, got {platform!r}: export the network as one, or as a .keras file"
        )
        return None
    config.text("default_model_filename")  # the only SavedModel in a version's folder is taken
    model: Json = {"name": name, "source": str(folder), **_versions(config.message("version_policy"))}
    most = config.number("max_batch_size")
    batching = config.message("dynamic_batching")
    preferred = batching.integers("preferred_batch_size")
    sizes = [1, *preferred, most] if preferred else [*_powers(most), most]
    model["buckets"] = _buckets(sizes, found, f"{where}max_batch_size")
    if delay_us := batching.number("max_queue_delay_microseconds"):
        model["max_queue_delay_ms"] = delay_us / 1000
    policy = batching.message("default_queue_policy")
    if size := policy.number("max_queue_size"):
        model["max_queue_images"] = max(size, *model["buckets"])
    found.leave(policy, f"{where}dynamic_batching.default_queue_policy.")
    found.leave(batching, f"{where}dynamic_batching.")
    model |= _triton_input(config.messages("input"), most, found, f"{where}input")
    model |= _triton_outputs(config.messages("output"), folder, found, f"{where}output")
    found.leave(config, where)
    return model


def _triton_input(inputs: list[Message], max_batch_size: int, found: Translation, where: str) -> Json:
    if len(inputs) != 1:
        found.note(where, f"expected one, an image, got {len(inputs)}")
        return {}
    (one,) = inputs
    model: Json = {"input_name": name} if (name := one.text("name")) not in ("pixels", "image") else {}
    datatype = one.text("data_type")
    if datatype not in ("TYPE_UINT8", "TYPE_FP32", "TYPE_FP16", "TYPE_INT32"):
        found.note(f"{where}.data_type", f"expected pixels, got {datatype}")
    elif datatype in ("TYPE_FP32", "TYPE_FP16"):
        found.note(
            f"{where}.data_type",
            "say with `preprocess` what clients did to pixels; they send 0 to 255 now, or 0 to 1 with `pixel_range`",
        )
    dims = one.integers("dims")
    is_planar = one.text("format") == "FORMAT_NCHW" or (dims[:1] == [3] and dims[-1:] != [3])
    found.leave(one, f"{where}.")
    if max_batch_size == 0 and len(dims) == 4:
        dims = dims[1:]  # of the batch
    if is_planar or len(dims) != 3 or dims[2] != 3:
        found.note(f"{where}.dims", f"expected [height, width, 3], got {dims}")
        return model
    return {**model, "input_size": dims[:2]} if min(dims) > 0 else model


def _triton_outputs(outputs: list[Message], folder: Path, found: Translation, where: str) -> Json:
    labels = ""
    names = []
    for one in outputs:
        names.append(one.text("name"))
        labels = one.text("label_filename") or labels
        one.text("data_type"), one.integers("dims")  # the model says them itself
        found.leave(one, f"{where}.{names[-1]}.")
    if len(outputs) > 1:
        found.note(
            f"{where}.name",
            f"say in `output_names` which of {', '.join(names)} is which, and the `task`; clients get the task's names",
        )
    model: Json = {"output_name": names[0]} if len(names) == 1 and names[0] else {}
    return {**model, "labels": str(folder / labels)} if labels else model


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(min(most, MAX_BUCKET).bit_length())]


def _buckets(sizes: list[int], found: Translation, where: str) -> list[int]:
    """Returns buckets of these sizes, 1 at least."""
    if max(sizes) > MAX_BUCKET:
        found.note(where, f"the largest bucket is {MAX_BUCKET}; larger requests run as several batches")
    return sorted({min(size, MAX_BUCKET) for size in sizes if size > 0} | {1})
