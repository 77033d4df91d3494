"""Settings from a file, the environment and flags, and back to text."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from xlaserve.config.server import Settings
from xlaserve.errors import ConfigError

ENV_PREFIX: Final = "XLASERVE_"
CONFIG_FILE_VARIABLE: Final = "XLASERVE_CONFIG"

# What Kubernetes sets in every pod of a namespace that has a Service called xlaserve.
_FROM_KUBERNETES: Final = re.compile(rf"{ENV_PREFIX}(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")


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
    for name in ("compile_cache", "profile_dir", "ready_file"):
        if isinstance(values.get(name), str):
            values[name] = str(file.parent / values[name])
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
    auto_buckets = model.get("auto_buckets")
    if isinstance(auto_buckets, dict) and isinstance(auto_buckets.get("demand"), str):
        resolved["auto_buckets"] = {**auto_buckets, "demand": str(folder / auto_buckets["demand"])}
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
