"""Settings from a file, the environment and flags, and back to text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from pydantic import ValidationError

from xlaserve.config import sources, yaml_text
from xlaserve.config.base import OrPath
from xlaserve.config.errors_in_words import LineOf, Place, did_you_mean, fields_of, leaves, reasons
from xlaserve.config.model_settings import ModelSettings
from xlaserve.config.server_settings import EXPAND, Settings
from xlaserve.errors import ConfigError, shown

ENV_PREFIX: Final = "XLASERVE_"
CONFIG_FILE_VARIABLE: Final = "XLASERVE_CONFIG"
_NO_SETTINGS: Final = (CONFIG_FILE_VARIABLE, "XLASERVE_TOKEN", "XLASERVE_CA")
"""Variables of commands that ask a server, and the name of the file."""

# What Kubernetes sets in every pod of a namespace that has Services whose names begin with xlaserve.
_SERVICE: Final = re.compile(rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """Returns the effective settings: `flags` over the environment over `file` over `defaults` over the fields' own.

    `flags`, the file and `defaults` hold values by field name. Relative paths in the file are taken from the file's
    folder. Raises ConfigError, which names each wrong field, its value and what was expected.
    """
    if file is None and CONFIG_FILE_VARIABLE in environ:
        file = Path(environ[CONFIG_FILE_VARIABLE])
    given = {**_from_environment(environ), **(flags or {})}
    written = _from_file(file) if file else {}
    if file and not written and "models" not in given:
        raise ConfigError(f"configuration file {file}: expected fields, models among them, got none")
    values = {**defaults, **written, **given}
    try:
        return Settings.model_validate(values, context=EXPAND)
    except ValidationError as error:
        lines = lines_of(file) if file else None

        def line_of(place: Place) -> int | None:
            return None if lines is None or not place or place[0] in given else lines(place)

        raise ConfigError(f"configuration: {reasons(error, Settings, values, line_of)}") from None


def check_files(settings: Settings) -> None:
    """Raises ConfigError, naming every file that is missing or of the wrong kind."""
    try:
        wrong = [
            f"{owner}{field}: expected {expected}, got {got}{_unexpanded(str(got))}"
            for owner, found in [
                ("", _missing_files(_files_of_server(settings))),
                *((f"model {model.title}: ", _missing(model)) for model in settings.models),
            ]
            for field, expected, got in found
        ]
    except OSError as error:  # a folder that may not be looked into
        raise ConfigError(f"configuration: {error.filename} can't be looked at: {error.strerror}") from None
    if wrong:
        raise ConfigError("configuration: " + "; ".join(wrong))


def dump(settings: Settings) -> str:
    """Returns the settings as YAML that `load` reads back to the same settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _from_file(file: Path) -> dict[str, object]:
    return dict(resolved(read_mapping(file), [Settings], file.parent.absolute()))


def read_mapping(file: Path) -> dict[str, Any]:
    """Returns the fields of a file as they are written; none where it is empty. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"configuration file {file}: can't be read: {reason}") from None
    try:
        values = yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(f"configuration file {file}: not YAML: {error}") from None
    if not values:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {file}: expected a mapping of fields, got {shown(values)}")
    return values


def lines_of(file: Path) -> LineOf:
    """Returns what finds the line of a value of a file that was read before."""
    try:
        return yaml_text.lines(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it has changed meanwhile
        return lambda place: None


def resolved(value: Any, kinds: Sequence[object], folder: Path) -> Any:
    """Returns a value of one of `kinds`, as YAML gives it, with relative paths taken from `folder`."""
    if isinstance(value, str):
        is_path = any(kind is Path or (isinstance(kind, OrPath) and kind.is_path(value)) for kind in kinds)
        return str(folder / value) if is_path else value
    if isinstance(value, list):
        if str in kinds:  # a path, or a list of names
            kinds = [kind for kind in kinds if kind is not Path]
        return [resolved(item, kinds, folder) for item in value]
    if not isinstance(value, dict):
        return value
    fields = fields_of(kinds)
    return {
        name: resolved(item, [*leaves(fields[name].annotation), *fields[name].metadata], folder)
        if name in fields
        else item
        for name, item in value.items()
    }


def _missing(model: ModelSettings) -> Iterator[tuple[str, str, object]]:
    """Yields each field whose file is missing or of the wrong kind, what was expected, and what it names."""
    if not sources.looks_like_path(model.source):
        if sources.kind_of_name(model.source) is None:
            yield "source", f"one of {sources.NAMES} or a path", model.source
    elif not (source := Path(model.source)).exists():
        yield "source", "an existing path", source
    elif sources.kind_of(model.source) is None:
        yield "source", sources.PATHS, source
    if model.calibration is not None and not model.calibration.is_dir():
        yield "calibration", "a folder that xlaserve calibrate wrote", model.calibration
    if model.examples is not None and not model.examples.folder.is_dir():
        yield "examples.folder", "a folder of images with predictions.npz or predictions.csv", model.examples.folder
    yield from _missing_files(_files(model))


def _missing_files(named: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, str, object]]:
    """Yields each field and path of `named` at which there is no file, with what was expected between them."""
    for field, path in named:
        if not path.is_file():
            yield field, _expected_at(path), path


def _expected_at(path: Path) -> str:
    """Returns what was expected at a path where there is no file."""
    if not path.exists():
        return "an existing path"
    return "a file" if path.is_dir() else "a file, which can be read again (no pipe and no device)"


def _files_of_server(settings: Settings) -> Iterator[tuple[str, Path]]:
    for field in ("tls_certificate", "tls_key", "tls_client_ca", "access"):
        if (file := getattr(settings, field)) is not None:
            yield field, file


def _unexpanded(path: str) -> str:
    """Returns a hint where a path holds what a shell would replace."""
    return ", in which $NAME and ~ stand for themselves" if "$" in path or "/~" in path else ""


def _files(model: ModelSettings) -> Iterator[tuple[str, Path]]:
    kind = sources.kind_of(model.source)
    weights = model.weights
    if kind and "weights" in (kind.value.takes or ()) and weights is not None and weights not in sources.NAMED_WEIGHTS:
        is_preset = kind.value.has_presets and (sources.is_handle(weights) or Path(weights).is_dir())
        if not is_preset:
            yield "weights", Path(weights)
    if model.architecture is not None and sources.is_architecture_path(model.architecture):
        yield "architecture", Path(model.architecture)
    if isinstance(model.labels, Path):
        yield "labels", model.labels
    if model.box_decoding is not None and model.box_decoding.anchors is not None:
        yield "box_decoding.anchors", model.box_decoding.anchors
    if model.has_auto_buckets and model.auto_buckets.demand is not None:
        yield "auto_buckets.demand", model.auto_buckets.demand


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name in _NO_SETTINGS or _is_from_kubernetes(name, text):
            continue
        field = name.removeprefix(ENV_PREFIX).lower()
        if field not in Settings.model_fields:
            known = (f"{ENV_PREFIX}{field}".upper() for field in Settings.model_fields)
            raise ConfigError(f"environment variable {name}: no such field{did_you_mean(name, known)}")
        try:
            values[field] = yaml_text.parse(text) if field == "models" else text
        except ValueError as error:
            raise ConfigError(f"environment variable {name}: not YAML: {error}") from None
    return values


def _is_from_kubernetes(name: str, text: str) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in text)
