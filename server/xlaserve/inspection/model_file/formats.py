"""The formats of model files: the sign of each, and the function that describes a file of it."""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.config import sources
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import exports, frozen_graph, keras, onnx, saved_model, tflite
from xlaserve.inspection.model_file.description import Description
from xlaserve.models.sources import file_content, keras_content
from xlaserve.models.sources.onnx_tflite import tflite_tables


class Opened(NamedTuple):
    """A file that is to be recognised."""

    suffix: str
    """The suffix of its name, in small letters."""
    head: bytes
    """The first bytes."""
    members: frozenset[str]
    """Names of a zip archive's members, without folders; none for other files."""


class Format(NamedTuple):
    """A format of files."""

    is_of: Callable[[Opened], bool]
    describe: Callable[[Path, Path], Description]
    """Describes the file at the first path, which was asked for by the second. Raises ModelFailed where damaged."""


FORMATS: Final = (
    Format(
        lambda file: file.head.startswith(file_content.HDF5) or keras_content.CONFIG in file.members, keras.describe
    ),
    Format(lambda file: file.suffix == ".pt2", exports.torch),
    Format(lambda file: file.head.startswith(b"\x80") or "data.pkl" in file.members, exports.pickled),
    Format(lambda file: file.head[4:8] == tflite_tables.MAGIC or file.suffix == ".tflite", tflite.describe),
    Format(lambda file: file.suffix == ".onnx", onnx.describe),
    Format(lambda file: file.suffix == ".pb", frozen_graph.describe),
    Format(lambda file: file.suffix == ".jax", exports.jax),
    Format(lambda file: file.suffix in (".keras", ".h5", ".hdf5"), keras.describe),  # which says what is wrong
)
"""All formats: the first one whose `is_of` is true describes the file."""
SHOWN: Final = ".keras, .h5, .pb, .onnx, .tflite, .pt2, .jax or the folder of a SavedModel"


def describe(path: Path) -> Description:
    """Describes the model at a path. Raises ModelFailed where there is none."""
    try:
        if not path.exists():
            raise _missing(path)
        found = saved_model.version(path) if path.is_dir() else path
        file_content.check(found)
        if found.is_dir():
            return saved_model.describe(path, found)
        opened = _opened(found)
        for form in FORMATS:
            if form.is_of(opened):
                return form.describe(path, found)
    except OSError as error:
        raise ModelFailed(
            f"source: {path} can't be read: {error.strerror or error}; look at it: ls -l {shlex.quote(str(path))}"
        ) from error
    raise ModelFailed(
        f"source: expected {SHOWN}, got {found.name} of {found.stat().st_size:,} bytes, which is none; where the model"
        f' is, write it: model.save("{found.stem}.keras")'
    )


def _missing(path: Path) -> ModelFailed:
    """Returns the error of a path at which nothing is: it may be the name of a model, which is no file."""
    source = str(path)
    name = source if sources.kind_of_name(source) else sources.near_name(source)
    if name == source:
        return ModelFailed(
            f"source: expected a file or folder, got {source}, a named model; serve it: xlaserve serve {source}"
        )
    listed = f"list what does: ls {shlex.quote(str(path.parent))}"
    step = f"did you mean {name}, a named model: xlaserve serve {name}" if name else listed
    return ModelFailed(f"source: expected a model file or folder, got {path}, which does not exist; {step}")


def _opened(file: Path) -> Opened:
    with file.open("rb") as opened:
        head = opened.read(file_content.HEAD_BYTES)
    members: list[str] = []
    if head.startswith(file_content.ZIP):
        with zipfile.ZipFile(file) as archive:
            members = [Path(name).name if name.endswith(".pkl") else name for name in archive.namelist()]
    return Opened(file.suffix.lower(), head, frozenset(members))
