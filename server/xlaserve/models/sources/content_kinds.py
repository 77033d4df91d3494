"""Kinds of model files by their content, for files whose names say otherwise."""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.config import sources
from xlaserve.errors import ModelFailed

_HEAD_BYTES: Final = 512


class ContentKind(NamedTuple):
    """A kind of file: how messages call it, and the suffixes of its names, of which the first is the usual one."""

    shown: str
    suffixes: tuple[str, ...]


KERAS: Final = (".keras", ".h5", ".hdf5")
_BY_HEAD: Final = (
    (rb"\x89HDF\r\n\x1a\n", ContentKind("HDF5, as Keras writes it", (".h5", *KERAS))),
    (rb".{4}TFL3", ContentKind("a TFLite file", (".tflite",))),
    (rb"\x08[\x03-\x20][\x12\x3a\x42]", ContentKind("an ONNX file", (".onnx",))),  # ir_version, then text or a message
    # The first node with its name and its operation, as `x`, `Placeholder`.
    (rb"\n.{1,3}\n.[\w./-]{1,127}\x12.[A-Z]\w+", ContentKind("a frozen graph of TensorFlow", (".pb",))),
)
"""Patterns of the first bytes, and the kinds of file that begin so."""
_BY_MEMBER: Final = (
    ("config.json", ContentKind("a Keras file", KERAS)),
    ("data.pkl", ContentKind("a file of PyTorch", (".pt", ".pth", ".pt2"))),
)
"""Names of files in zip archives, in any folder, and the kinds of archive that hold one."""


def of(file: Path) -> ContentKind | None:
    """Returns the kind of a file by its content; None where that does not tell. Raises OSError."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    if head.startswith(b"PK") and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            members = {Path(name).name for name in archive.namelist()}
        return next((kind for member, kind in _BY_MEMBER if member in members), None)
    return next((kind for pattern, kind in _BY_HEAD if re.match(pattern, head, re.DOTALL)), None)


def check_name(file: Path) -> None:
    """Raises ModelFailed where the content of a file is of another kind than its name says. Raises OSError."""
    kind = of(file)
    if kind is None or file.suffix.lower() in kind.suffixes:
        return
    renamed = file.with_suffix(kind.suffixes[0]).name
    then = (
        "" if kind.suffixes[0] in sources.FILES else f"; then xlaserve inspect {shlex.quote(renamed)} says how to go on"
    )
    raise ModelFailed(
        f"source: {file.name} is {kind.shown} by its content; rename it:"
        f" mv {shlex.quote(file.name)} {shlex.quote(renamed)}{then}"
    )
