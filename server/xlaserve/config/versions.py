"""The versions of a model as they are configured: chosen from a folder, labelled, and given shares of requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from xlaserve.config import sources
from xlaserve.config.model_settings import ModelSettings
from xlaserve.config.version_names import SHARED, VERSION

STABLE: Final = "stable"
"""The label of the version that answers requests that name none."""
DEFAULT_POLICY: Final = "latest 1"
SAVED_MODEL: Final = "saved_model.*"
"""A file that every SavedModel has."""


@dataclass(frozen=True)
class VersionSet:
    """A model as it is configured: its versions, and which of them answers what."""

    versions: Mapping[str, ModelSettings]
    """By number; without what is set for all of them."""
    labels: Mapping[str, str]
    """The version that each label names."""
    routing: Mapping[str, float]
    """The percentage of requests without a version that each label or version answers; the default one answers the
    rest."""

    @property
    def default(self) -> ModelSettings:
        """The version that answers requests without one, where all are ready."""
        return self.versions[self.labels.get(STABLE) or max(self.versions, key=int)]

    @property
    def entries(self) -> list[ModelSettings]:
        """The versions as `grouped` takes them."""
        shared = {"version_labels": (*self.labels.items(),), "routing": (*self.routing.items(),)}
        return [settings.model_copy(update=shared) for settings in self.versions.values()]


def grouped(models: Iterable[ModelSettings]) -> dict[str, VersionSet]:
    """Returns each model's versions by its name. Raises ValueError where they don't fit together."""
    entries: dict[str, list[ModelSettings]] = {}
    for model in models:
        entries.setdefault(model.name, []).append(model)
    return {name: _version_set(name, found) for name, found in entries.items()}


def _version_set(name: str, entries: list[ModelSettings]) -> VersionSet:
    # One of several without a number has one all the same: messages have to tell them apart.
    numbered = [{"version": entry.version} if len(entries) > 1 else {} for entry in entries]
    versions = {
        entry.version: entry.model_copy(update={**SHARED, **number})
        for entry, number in zip(entries, numbered, strict=True)
    }
    if len(versions) < len(entries):
        repeated = sorted({entry.version for entry in entries if [e.version for e in entries].count(entry.version) > 1})
        raise ValueError(f"model {name}: expected each version once, {', '.join(repeated)} is repeated")
    shared = {field: _only(name, field, entries) for field in SHARED}
    labels, routing = dict(shared["version_labels"]), dict(shared["routing"])
    known = ", ".join(versions)
    for label, version in labels.items():
        if version not in versions:
            raise ValueError(f"model {name}: version_labels.{label}: expected one of {known}, got {version}")
    targets = [("routing", target) for target in routing]
    targets += [("shadow.version", entry.shadow.version) for entry in entries if entry.shadow and entry.shadow.version]
    for field, target in targets:
        if target not in versions and target not in labels:
            expected = ", ".join((known, *labels))
            raise ValueError(f"model {name}: {field}: expected labels or versions ({expected}), got {target}")
    return VersionSet(versions, labels, routing)


def _only(name: str, field: str, entries: list[ModelSettings]) -> Any:
    """Returns the value of a field that is set for all versions, at one of their entries or at several alike."""
    values = {getattr(entry, field) for entry in entries} - {SHARED[field]}
    if len(values) > 1:
        raise ValueError(f"model {name}: {field}: expected one value for all versions, got {len(values)}")
    return values.pop() if values else SHARED[field]


def expanded(models: Iterable[ModelSettings]) -> tuple[ModelSettings, ...]:
    """Returns the models with one for each version that is chosen of a folder of versions. Reads folders.

    Raises ValueError where a folder does not have what is asked for.
    """
    return tuple(chain.from_iterable(map(_expanded, models)))


def _expanded(model: ModelSettings) -> Iterator[ModelSettings]:
    try:
        yield from _of_folder(model, _folders(model.source))
    except OSError as error:  # a folder that went meanwhile, too
        raise ValueError(f"model {model.name}: source: {error.strerror}") from None


def _of_folder(model: ModelSettings, folders: Mapping[str, Path]) -> Iterator[ModelSettings]:
    if not folders and model.versions is None:
        folder = Path(model.source)
        is_folder = sources.looks_like_path(model.source) and folder.is_dir()
        found = _source(folder) if is_folder else folder
        yield model if found == folder else model.model_copy(update={"source": str(found)})
        return
    where = f"model {model.name}"
    if not folders:
        raise ValueError(f"{where}: versions: expected numbered folders in its source, a SavedModel's each, got none")
    if "version" in model.model_fields_set:
        raise ValueError(f"{where}: version: expected `versions`, as its source is a folder of versions")
    # What requests can ask for by name is there, however old it is.
    named = {version for _, version in model.version_labels} | {to for to, _ in model.routing if to.isdecimal()}
    if model.shadow is not None and model.shadow.version is not None and model.shadow.version.isdecimal():
        named.add(model.shadow.version)
    if missing := named - folders.keys():
        raise ValueError(f"{where}: expected folders of the versions that are named, got none for {_listed(missing)}")
    wanted = {*_chosen(model.versions or DEFAULT_POLICY, where, folders), *named}
    for number in sorted(wanted, key=int):
        source = str(_source(folders[number]))
        yield model.model_copy(update={"version": number, "source": source, "versions": None})


def _chosen(policy: str | tuple[str, ...], where: str, folders: Mapping[str, Path]) -> Iterable[str]:
    if isinstance(policy, tuple):
        if missing := set(policy) - folders.keys():
            raise ValueError(f"{where}: versions: expected some of {_listed(folders)}, got {_listed(missing)}")
        return policy
    if policy == "all":
        return folders
    return sorted(folders, key=int)[-int(policy.partition(" ")[2]) :]


def _listed(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions, key=int))


def _folders(source: str) -> dict[str, Path]:
    """Returns the folders of versions there by their numbers; none where it is a model itself."""
    folder = Path(source)
    if not sources.looks_like_path(source) or not folder.is_dir() or _is_saved_model(folder):
        return {}
    numbered = (one for one in sorted(folder.iterdir()) if re.fullmatch(VERSION, one.name) and one.is_dir())
    return {str(int(one.name)): one for one in numbered}


def _source(folder: Path) -> Path:
    """Returns the model in a folder: the folder itself, or the only model in it."""
    if _is_saved_model(folder):
        return folder
    found = [
        one for one in folder.iterdir() if sources.is_file_of_model(one) or (one.is_dir() and _is_saved_model(one))
    ]
    return found[0] if len(found) == 1 else folder


def _is_saved_model(folder: Path) -> bool:
    return any(folder.glob(SAVED_MODEL))
