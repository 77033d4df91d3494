"""A calibration: the folder that `xlaserve calibrate` writes, with a model in int8 for each size of images.

`calibration.json` says what each was made of, and how well it agreed with float32. Nothing but OpenVINO is needed to
read one.
"""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from xlaserve.config.base import Frozen
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino import openvino_program
from xlaserve.programs.openvino.openvino_program import ConvertedGraph

FILE: Final = "calibration.json"

_SUFFIXES: Final = (".xml", ".bin")
"""Suffixes of a model's two files, operations and weights."""

Size = tuple[int, int]
"""Height and width."""


class Calibrated(Frozen):
    """A model in int8 for images of one size, and how it compares with the same in float32 on held-out images."""

    size: Size
    graph: str
    """The digest of the graph in float32 that it was made of."""
    files: dict[str, str]
    """SHA-256 of the model's files, by name."""
    held_out: int = Field(ge=1)
    """Number of images it was compared on; of a detector, those in which float32 or int8 finds objects."""
    agreement: float = Field(ge=0, le=1)
    """The mean over them: whether the likeliest class is the same, the share of objects or of pixels that are, or
    the cosine of two embeddings."""
    difference: float | None
    """The largest difference of two scores, or of two numbers of an embedding; None where there are none."""


class Calibration(Frozen):
    """The contents of `calibration.json`."""

    source: str
    """The source of the model, as it was configured."""
    images: int
    """Number of images it was calibrated on."""
    least_agreement: float
    """The least agreement that was required, from 0 to 1."""
    xlaserve: str
    openvino: str
    nncf: str
    """Versions that made it."""
    models: tuple[Calibrated, ...] = Field(min_length=1)
    """One for each size."""

    def __str__(self) -> str:
        worst = min(self.models, key=lambda model: model.agreement)
        return f"agreement {worst.agreement:.4f} of {worst.held_out} held-out images"


@dataclass(frozen=True)
class CalibrationFolder:
    """A calibration as it was read once, and the folder of its models."""

    path: Path
    calibration: Calibration

    def find(self, size: Size) -> Calibrated:
        """Returns the entry of the model in int8 for images of `size`. Raises ModelFailed where there is none."""
        found = next((model for model in self.calibration.models if model.size == size), None)
        if found is None:
            sizes = ", ".join(_by(model.size) for model in self.calibration.models)
            raise ModelFailed(f"calibration: {self.path.name} is for images of {sizes}, expected {_by(size)}")
        return found

    def load(self, size: Size, graph: ConvertedGraph) -> ConvertedGraph:
        """Returns `graph`, which takes images of `size`, in int8.

        Raises ModelFailed where the folder has another's, or is damaged.
        """
        found, name = self.find(size), self.path.name
        if found.graph != graph.digest:
            hint = ""
            if self.calibration.openvino != (version := openvino_program.version()):
                hint = f", or by another version of OpenVINO ({self.calibration.openvino}, this is {version})"
            source = Path(self.calibration.source).name or self.calibration.source
            raise ModelFailed(
                f"calibration: {name} was made of another model than this one, of {source}"
                f" perhaps with other weights or settings{hint}; run xlaserve calibrate again"
            )
        xml, weights = (self._contents(f"{_by(size)}{suffix}", found.files) for suffix in _SUFFIXES)
        try:
            return ConvertedGraph.from_bytes(xml, weights, is_int8=True)
        except RuntimeError as error:
            raise ModelFailed(f"calibration: OpenVINO can't read {name}: {cause(error)}") from error

    def _contents(self, name: str, digests: Mapping[str, str]) -> bytes:
        contents = _read(self.path / name)
        if hashlib.sha256(contents).hexdigest() != digests.get(name):
            raise ModelFailed(f"calibration: {self.path.name}/{name} is damaged, or not the one that was written")
        return contents


def read(folder: Path) -> CalibrationFolder:
    """Reads what a calibration says of itself. Raises ModelFailed."""
    try:
        return CalibrationFolder(folder, Calibration.model_validate_json(_read(folder / FILE)))
    except ValidationError as error:
        got = error.errors()[0]["msg"]
        raise ModelFailed(
            f"calibration: expected what xlaserve calibrate wrote in {folder.name}/{FILE}, got {got}"
        ) from None


def save(folder: Path, size: Size, quantized: ConvertedGraph) -> dict[str, str]:
    """Writes a model in int8 for images of `size`; returns the SHA-256 of its files by name. Raises OSError."""
    file = folder / f"{_by(size)}{_SUFFIXES[0]}"
    try:
        openvino_program.load().save_model(quantized.model, file, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(errno.EIO, cause(error)) from error
    names = [f"{_by(size)}{suffix}" for suffix in _SUFFIXES]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def _read(file: Path) -> bytes:
    name = f"{file.parent.name}/{file.name}"
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading from a pipe or a device might never end
            raise ModelFailed(f"calibration: expected {name} to be a file")
        return file.read_bytes()
    except OSError as error:
        raise ModelFailed(f"calibration: {name} can't be read: {error.strerror}") from None


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
