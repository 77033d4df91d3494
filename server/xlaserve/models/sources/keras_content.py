"""Files of Keras: what `model.save` and `model.save_weights` write, as zip archives (`.keras`) and as HDF5 (`.h5`)."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeGuard

import h5py

from xlaserve.errors import ModelFailed
from xlaserve.models.sources import file_content, keras_config
from xlaserve.models.sources.keras_config import Json

CONFIG: Final = "config.json"
MODEL_CONFIG: Final = "model_config"
"""The attribute of `.h5` files with what `.keras` files have in CONFIG."""
METADATA: Final = "metadata.json"
WEIGHTS: Final = "model.weights.h5"
LEFT_RANDOM: Final = r".*will retain their freshly-initialized weights"
"""Keras's warning of layers whose weights are not in the file."""
LAYER_WEIGHTS: Final = "model_weights"
"""Name of the group of a whole model's weights in `.h5` files."""
OLD_LAYERS: Final = "_layer_checkpoint_dependencies"
"""Name of the group of a model's layers in `.keras` files of Keras 2.13 and 2.14."""
WINDOWS: Final = "\\"
"""The separator of paths of Windows."""
SHOWN: Final = 20
"""Letters at the end of a damaged configuration that an error shows."""
LAYERS: Final = "layers"
"""Name of that group in files that Keras 2.15 reads."""


@dataclass(frozen=True)
class KerasContent:
    """The content of a file of Keras."""

    file: Path
    is_zip: bool
    """Whether it is, or is to be read as, a zip archive, as `.keras` files are, and not HDF5."""
    version: str
    """The version of Keras that wrote it; empty where it is not known."""
    config: Json | None
    """The model's configuration; None where the file has weights alone."""
    has_old_weights: bool = False
    """Whether its weights are laid out as Keras 2 does in HDF5, by layers' names."""
    has_own_config: bool = True
    """Whether the configuration comes from the file itself."""

    @property
    def is_of_keras_2(self) -> bool:
        """Whether Keras 2, or 1, wrote it."""
        return self.version.partition(".")[0] in ("1", "2")

    def with_config(self, config: Json) -> KerasContent:
        """Returns the same weights with a configuration, as `model.to_json()` writes it."""
        return replace(
            self,
            config=config,
            version=str(config.get("keras_version", self.version)),
            is_zip=self.is_zip or not self.has_old_weights,
            has_own_config=False,
        )

    @contextmanager
    def readable(self, functions: frozenset[str] = frozenset()) -> Iterator[Path]:
        """Yields the path of the file, or of a copy that Keras can read where the file itself needs mending.

        `functions` are names of Lambda layers whose functions are replaced; see `keras_config.mend`.
        """
        config = copy.deepcopy(self.config)
        is_mended = config is not None and keras_config.mend(config, functions)
        is_copied = is_mended or self._has_old_layers or self._has_windows_names or not self.has_own_config
        suffix = ".keras" if self.is_zip else ".h5"
        if not is_copied and self.file.suffix == suffix:
            yield self.file
            return
        with TemporaryDirectory(prefix="xlaserve-keras-") as folder:
            copied = Path(folder, self.file.stem).with_suffix(suffix)
            if not is_copied:
                copied.symlink_to(self.file.resolve())  # Keras reads a file as its suffix says
            elif self.is_zip:
                self._write_zip(copied, config)
            else:
                self._write_hdf5(copied, config)
            yield copied

    @property
    def _has_old_layers(self) -> bool:
        return self.is_zip and self.version.startswith(("2.13.", "2.14."))

    @property
    def _has_windows_names(self) -> bool:
        """Whether Keras 2 wrote its weights on Windows, where it names groups by paths that it reads nowhere else."""
        if not (self.is_zip and self.is_of_keras_2 and zipfile.is_zipfile(self.file)):
            return False
        with zipfile.ZipFile(self.file) as archive:
            if WEIGHTS not in archive.namelist():
                return False
            with suppress(OSError), archive.open(WEIGHTS) as weights, h5py.File(weights) as opened:
                return any(WINDOWS in name for name in opened)
        return False

    def _write_hdf5(self, to: Path, config: Json | None) -> None:
        shutil.copyfile(self.file, to)
        with h5py.File(to, "r+") as opened:
            opened.attrs[MODEL_CONFIG] = json.dumps(config).encode()
            if LAYER_WEIGHTS not in opened:
                weights = opened.create_group(LAYER_WEIGHTS)
                for name in [*opened.keys() - {LAYER_WEIGHTS}]:
                    opened.move(name, f"{LAYER_WEIGHTS}/{name}")
                for name, value in opened.attrs.items():
                    weights.attrs[name] = value

    def _write_zip(self, to: Path, config: Json | None) -> None:
        weights = to.with_name(WEIGHTS)
        if zipfile.is_zipfile(self.file):
            with zipfile.ZipFile(self.file) as old, old.open(WEIGHTS) as source, weights.open("wb") as copied:
                shutil.copyfileobj(source, copied)
        else:
            shutil.copyfile(self.file, weights)
        if self.is_of_keras_2:
            with h5py.File(weights, "r+") as opened:
                _divide_names(opened)
                _rename_layers(opened)
        with zipfile.ZipFile(to, "w") as new:
            new.writestr(CONFIG, json.dumps(config))
            new.writestr(METADATA, json.dumps({"keras_version": self.version}))
            new.write(weights, WEIGHTS)


def read(file: Path) -> KerasContent:
    """Reads what a file holds, except its weights; the file's name does not matter.

    Raises ModelFailed where it is no file of Keras.
    """
    if zipfile.is_zipfile(file):
        return _of_zip(file)
    if file_content.is_hdf5(file):
        try:
            with h5py.File(file) as opened:
                config, version = opened.attrs.get(MODEL_CONFIG), _text(opened.attrs.get("keras_version"))
                weights = opened.get(LAYER_WEIGHTS, opened)
                is_old = any(name.startswith("layer_names") for name in weights.attrs)  # in parts, if there are many
        except OSError as error:
            raise file_content.cut_off(file) from error
        found = None if config is None else _config(config, MODEL_CONFIG, file)
        return KerasContent(file, False, version, found, is_old)
    raise ModelFailed(
        f"source: expected a .keras file, which is a zip archive, or a .h5 file, which is HDF5, got {file.name} of"
        f' {file.stat().st_size:,} bytes, which is neither; write it once more with model.save("{file.stem}.keras")'
    )


def _of_zip(file: Path) -> KerasContent:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if CONFIG not in names:
            inside = ", ".join(sorted(names)[:4])
            raise ModelFailed(
                f"source: expected a .keras file, got {file.name}, a zip archive of {inside}, without {CONFIG};"
                f" unpack it and name the model in it: unzip {file.name}"
            )
        try:
            config = archive.read(CONFIG)
            metadata = json.loads(archive.read(METADATA)) if METADATA in names else {}
            version = str(metadata.get("keras_version", ""))
        except (ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise _damaged(file, f"its {CONFIG} or {METADATA} can't be read") from error
    return KerasContent(file, True, version, _config(config, CONFIG, file))


def _config(written: object, name: str, file: Path) -> Json:
    """Returns a model's configuration, read from what a file has under `name`. Raises ModelFailed where it is none."""
    if not isinstance(written, str | bytes):
        raise _damaged(file, f"its {name} is {type(written).__name__}, expected text")
    try:
        config = json.loads(written)
    except RecursionError as error:
        raise _damaged(file, f"its {name} is nested too deeply") from error
    except ValueError as error:
        text = written if isinstance(written, str) else written.decode(errors="replace")
        where = f", which is cut off or no JSON: it ends with {text[-SHOWN:]!r}" if text else ", which is empty"
        raise _damaged(file, f"its {name} can't be read{where}") from error
    if not is_config(config):
        raise _damaged(file, f"its {name} is no model's: expected an object with class_name and config")
    return config


def is_config(value: Any) -> TypeGuard[Json]:
    """Returns whether a value read from JSON is a model's configuration, as any version of Keras writes it."""
    if not isinstance(value, dict) or not isinstance(value.get("class_name"), str):
        return False
    return isinstance(value.get("config"), dict | list)  # a Sequential of Keras 2.2.2 and before: a list of layers


def _damaged(file: Path, found: str) -> ModelFailed:
    return ModelFailed(
        f"source: {file.name} is damaged: {found}; copy it once more, and compare both: sha256sum {file.name}; or where"
        f' the model is, write it again: model.save("{file.stem}.keras")'
    )


def without_model(content: KerasContent) -> ModelFailed:
    """Returns the error of a file that has weights alone, where the settings have no architecture."""
    name = content.file.stem.removesuffix(".weights")
    return ModelFailed(
        f"source: {content.file.name} has a model's weights, and not the model; name a function that returns the Keras"
        " model they are of: architecture: my_package.my_module:build; or the .json file that model.to_json() wrote;"
        f' or, where the model is, write all of it: model.save("{name}.keras")'
    )


@contextmanager
def complete() -> Iterator[None]:
    """A block in which Keras loads weights; raises ValueError where it would only warn that it leaves some random."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", LEFT_RANDOM)
        try:
            yield
        except UserWarning as warning:
            raise ValueError(str(warning)) from None


def _divide_names(weights: h5py.File) -> None:
    """Makes groups within groups of those whose names are paths of Windows."""
    for name in sorted(weights, key=len):  # a model before its layers
        if WINDOWS in name:
            weights.move(name, name.replace(WINDOWS, "/"))


def _rename_layers(group: Any) -> None:
    """Renames the group of layers, and those of models within the model."""
    if not isinstance(group, h5py.Group):
        return
    if OLD_LAYERS in group and LAYERS not in group:
        group.move(OLD_LAYERS, LAYERS)
    for name in [*group]:
        _rename_layers(group[name])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
