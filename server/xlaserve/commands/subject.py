"""A model as a command's argument names it: one of the configuration's, or any source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from xlaserve.config import BUILTIN_MODELS, Bucket, BucketSettings, Mode, ModelSettings, Settings
from xlaserve.config.sources import kind_of_name, name_of
from xlaserve.config.versions import grouped
from xlaserve.engine.program import Compilation
from xlaserve.errors import ConfigError, ModelFailed, XlaserveError
from xlaserve.models import catalog
from xlaserve.models.catalog import Model
from xlaserve.programs.tf.device import Device, configure
from xlaserve.programs.xla_refusal import explain


@dataclass(frozen=True)
class Subject:
    """A model that is loaded, with the one bucket that a command works on."""

    model: Model
    bucket: Bucket
    device: Device

    def compile(self, mode: Mode) -> Compilation:
        """Compiles it for `mode` and the bucket. Raises ModelFailed with the operation that XLA refuses."""
        try:
            return self.model.program.compile(mode, self.bucket)
        except XlaserveError:
            raise
        except Exception as error:
            refusal = explain(error)
            origin = f"; it was made by {refusal.line}" if refusal.line else ""
            name = self.model.settings.name
            raise ModelFailed(f"model {name} does not compile for {mode}: {refusal.message}{origin}") from error


def load(
    settings: Settings,
    name: str,
    bucket: BucketSettings | None,
    mode: Mode = Mode.XLA,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Subject:
    """Loads the configured model `name`, or the source `name` with random weights, for `bucket` or its first.

    `changes` are made to its settings. Raises ConfigError and ModelFailed.
    """
    model = _settings(settings, name, bucket, mode).model_copy(update=changes)
    if not catalog.uses_tensorflow(model):
        raise ConfigError(f"model: expected a TensorFlow model, got {model.source}, which XLA does not compile")
    device = configure(settings.model_copy(update={"models": (model,)}), uses_tensorflow=True)
    loaded = catalog.load(model)
    return Subject(loaded, loaded.buckets[0], device)


def model_settings(settings: Settings, name: str) -> ModelSettings:
    """Returns the settings of the configured model `name`, or of the source `name` with random weights.

    Raises ConfigError.
    """
    configured = grouped(settings.models)
    if name in configured:
        return configured[name].default
    if not re.search(r"[:/.]", name) and not Path(name).is_dir():
        hint = "; --config names the file that configures others" if settings.models == BUILTIN_MODELS else ""
        raise ConfigError(
            f"model: expected a configured model ({', '.join(configured)}) or a source such as "
            f"keras.applications:MobileNetV2, got {name}{hint}"
        )
    return ModelSettings(name=name_of(name), source=name, weights="random" if _is_downloaded(name) else None)


def _is_downloaded(source: str) -> bool:
    kind = kind_of_name(source)
    return kind is not None and kind.value.is_downloaded


def _settings(settings: Settings, name: str, bucket: BucketSettings | None, mode: Mode) -> ModelSettings:
    model = model_settings(settings, name)
    changes: dict[str, object] = {"modes": (mode,), "default_mode": None}
    if bucket:
        changes["buckets"] = (bucket,)
    if all(name != configured.name for configured in settings.models):
        changes["buckets"] = (bucket or BucketSettings(1),)
        if _is_downloaded(name) and bucket and bucket.height:
            changes["input_size"] = bucket[1:]
    return model.model_copy(update=changes)
