"""A calibration: the folder that `xlaserve calibrate` writes, with a model in int8 for each size of images.

`calibration.json` says what each was made of, and how well it agreed with float32. Nothing but OpenVINO is needed to
read one.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from xlaserve.config.frozen import Frozen
from xlaserve.errors import ModelFailed, cause
from xlaserve.runtimes.openvino import executable
from xlaserve.runtimes.openvino.executable import ConvertedGraph

FILE: Final = "calibration.json"

_SUFFIXES: Final = (".xml", ".bin")
"""Of a model's two files, operations and weights."""

Size = tuple[int, int]
"""Height and width."""


class Calibrated(Frozen):
    """A model in int8 for images of one size, and how it compares with the same in float32 on held-out images."""

    size: Size
    graph: str
    """The digest of the graph in float32 that it was made of."""
    files: dict[str, str]
    """Their SHA-256, by name."""
    agreement: float
    """The mean over the images: whether the likeliest class is the same, the share of objects or of pixels that are, or
    the cosine of two embeddings."""
    difference: float | None
    """The largest difference of two scores, or of two numbers of an embedding; None where there are none."""


class Calibration(Frozen):
    """All that a calibration holds."""

    source: str
    """What the model was made from, as it was configured."""
    images: int
    """How many images it was calibrated on."""
    held_out: int
    """How many others it was compared on."""
    least_agreement: float
    """What was asked for."""
    xlaserve: str
    openvino: str
    nncf: str
    """Versions that made it."""
    models: tuple[Calibrated, ...]
    """One for each size."""

    @property
    def agreement(self) -> float:
        """That of the size where it is least."""
        return min((model.agreement for model in self.models), default=0.0)

    def __str__(self) -> str:
        return f"agreement {self.agreement:.4f} of {self.held_out} held-out images"


def read(folder: Path) -> Calibration:
    """Returns what a calibration says of itself. Raises ModelFailed."""
    try:
        return Calibration.model_validate_json((folder / FILE).read_bytes())
    except OSError as error:
        raise ModelFailed(f"calibration: {folder.name}/{FILE} can't be read: {error.strerror}") from None
    except ValidationError as error:
        got = error.errors()[0]["msg"]
        raise ModelFailed(
            f"calibration: expected what xlaserve calibrate wrote in {folder.name}/{FILE}, got {got}"
        ) from None


def load(folder: Path, size: Size, graph: ConvertedGraph) -> ConvertedGraph:
    """Returns `graph`, which takes images of `size`, in int8.

    Raises ModelFailed where the folder has another's, or is damaged.
    """
    calibration = read(folder)
    found = next((model for model in calibration.models if model.size == size), None)
    if found is None:
        sizes = ", ".join(_by(model.size) for model in calibration.models)
        raise ModelFailed(f"calibration: {folder.name} is for images of {sizes}, expected {_by(size)}")
    if found.graph != graph.digest:
        hint = ""
        if calibration.openvino != (version := executable.version()):
            hint = f", or by another version of OpenVINO ({calibration.openvino}, this is {version})"
        source = Path(calibration.source).name or calibration.source
        raise ModelFailed(
            f"calibration: {folder.name} was made of another model than this one, of {source}"
            f" perhaps with other weights or settings{hint}; run xlaserve calibrate again"
        )
    xml, weights = (_contents(folder, f"{_by(size)}{suffix}", found.files) for suffix in _SUFFIXES)
    try:
        return ConvertedGraph.from_bytes(xml, weights, is_int8=True)
    except RuntimeError as error:
        raise ModelFailed(f"calibration: OpenVINO can't read {folder.name}: {cause(error)}") from error


def save(folder: Path, size: Size, quantized: ConvertedGraph) -> dict[str, str]:
    """Writes a model in int8 for images of `size`; returns the SHA-256 of its files by name. Raises OSError."""
    file = folder / f"{_by(size)}{_SUFFIXES[0]}"
    try:
        executable.load().save_model(quantized.model, file, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(errno.EIO, cause(error)) from error
    names = [f"{_by(size)}{suffix}" for suffix in _SUFFIXES]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def _contents(folder: Path, name: str, digests: Mapping[str, str]) -> bytes:
    try:
        contents = (folder / name).read_bytes()
    except OSError as error:
        raise ModelFailed(f"calibration: {folder.name}/{name} can't be read: {error.strerror}") from None
    if hashlib.sha256(contents).hexdigest() != digests.get(name):
        raise ModelFailed(f"calibration: {folder.name}/{name} is damaged, or not the one that was written")
    return contents


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
