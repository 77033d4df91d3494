"""Images with the outputs that a notebook gave for them, as files.

A folder has the images, in folders of its own too, and one of:

- `predictions.npz`: `files`, the images' paths within the folder as text `[n]`, and each output under its name,
  `[n, ...]`. The only output of a model may have any name.
- `predictions.csv`: a line of headings that begins with `file`, then a line for each image: its path, and the numbers
  of the only output.
"""

from __future__ import annotations

import csv
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models.output_facts import TO_LEVELS
from xlaserve.models.task import Classification, Embedding, ImageToImage, Regression, Segmentation, Task, TensorSpec

NAMES: Final = ("predictions.npz", "predictions.csv")
"""The names of a file of expected outputs."""
FILES: Final = "files"
"""The array of paths."""
ONLY: Final = "output"
"""The name of the output in a CSV file."""
MAX_BYTES: Final = 1 << 30
"""Most bytes of a file of expected outputs."""
DAMAGED: Final = (
    *(ValueError, EOFError, KeyError, SyntaxError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
"""The errors of NumPy and of zip files for damaged, encrypted and foreign files, and for headers that lie."""
_MAX_NAMED: Final = 3


@dataclass(frozen=True)
class Examples:
    """Images, and the outputs that are expected for them."""

    folder: Path
    names: tuple[str, ...]
    """The paths of the images within the folder."""
    outputs: Mapping[str, NDArray[Any]]
    """The expected outputs by name, `[n, ...]`, a row for each image."""

    def __len__(self) -> int:
        return len(self.names)

    def path(self, row: int) -> Path:
        """Returns the path of an image."""
        return self.folder / self.names[row]


def read(folder: Path, file: Path | None = None) -> Examples:
    """Reads the expected outputs of a folder, or from another `file`. Raises ModelFailed, which says what is wrong."""
    file = file or next((path for name in NAMES if (path := folder / name).is_file()), None)
    if file is None:
        raise ModelFailed(
            f"expected {' or '.join(NAMES)} in {folder.name}, got neither; in the notebook, VisionClient.save_examples"
            " or np.savez(folder / 'predictions.npz', files=names, scores=model.predict(...)) writes one"
        )
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ModelFailed(f"expected at most {MAX_BYTES} bytes of outputs in {file.name}, got {size}")
        names, outputs = _from_csv(file) if file.suffix.lower() == ".csv" else _from_npz(file)
    except OSError as error:
        raise ModelFailed(f"{file.name} can't be read: {error.strerror or error}") from None
    if not names:
        raise ModelFailed(f"expected at least one image in {file.name}, got none")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ModelFailed(f"expected each image once in {file.name}, got {_shown(repeated)} several times")
    if missing := [name for name in names if not _is_file(folder / name)]:
        raise ModelFailed(
            f"expected the images of {file.name} in {folder.name}, by their paths within it, got no {_shown(missing)}"
        )
    return Examples(folder, tuple(names), outputs)


def for_task(examples: Examples, task: Task, settings: ModelSettings) -> tuple[NDArray[Any], ...]:
    """Returns the expected outputs in the order, shapes and types of the task's, `[n, ...]`.

    Outputs as the network itself gives them are taken as well: one probability of two classes, scores of each pixel,
    images of another range. Raises ModelFailed where they are not of this task.
    """
    names = [output.name for output in task.outputs]
    given = dict(examples.outputs)
    if len(names) == len(given) == 1:
        given = dict(zip(names, given.values(), strict=True))
    if set(given) != set(names):
        raise ModelFailed(f"expected the outputs {', '.join(names)}, got {', '.join(given)}")
    return tuple(_as_output(given[spec.name], spec, task, settings) for spec in task.outputs)


def _as_output(values: NDArray[Any], spec: TensorSpec, task: Task, settings: ModelSettings) -> NDArray[Any]:
    found = values
    match task:
        case Classification() if task.threshold is not None and values[:1].size == 1:
            second = values.reshape(-1, 1)
            found = np.concatenate((1.0 - second, second), axis=1)
        case Segmentation() if values.dtype.kind == "f":
            maps = values if values.ndim == 4 else values[..., np.newaxis]
            found = maps[..., 0] >= settings.threshold if maps.shape[-1] == 1 else maps.argmax(axis=-1)
        case ImageToImage() if values.dtype.kind == "f":
            scale, offset = TO_LEVELS[settings.output_range or "0..1"]
            levels = np.rint(np.clip(values * scale + offset, 0, 255))
            found = levels if levels.ndim == 4 else levels[..., np.newaxis]
        case Regression() | Embedding() if values.ndim != len(spec.shape):
            found = values.reshape(len(values), -1)
    if len(found.shape) != len(spec.shape) or any(
        side not in (-1, given) for side, given in zip(spec.shape[1:], found.shape[1:], strict=True)
    ):
        rest = ", ".join("any" if side == -1 else str(side) for side in spec.shape[1:])
        raise ModelFailed(
            f"{spec.name}: expected outputs of shape [{', '.join(filter(None, (str(len(values)), rest)))}], got"
            f" {list(values.shape)}"
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        (row, *_), *_ = np.argwhere(~np.isfinite(found))
        raise ModelFailed(f"{spec.name}: expected finite numbers, got NaN or infinity for image {row}")
    return found.astype(np.float32) if spec.is_float else found


def _from_npz(file: Path) -> tuple[list[str], dict[str, NDArray[Any]]]:
    form = "np.savez(file, files=np.array(names), scores=scores)"
    try:
        with file.open("rb") as opened:  # NumPy would leave a damaged file open
            stored = np.load(opened, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ModelFailed(f"expected arrays in {file.name} as {form} writes them, got a single array")
            with stored:
                assert stored.zip is not None  # until it is closed
                size = sum(member.file_size for member in stored.zip.infolist())
                if size > MAX_BYTES:
                    raise ModelFailed(f"expected at most {MAX_BYTES} bytes of outputs in {file.name}, got {size}")
                arrays = {name: np.asarray(stored[name]) for name in stored.files}
        names = [_text(name) for name in arrays.get(FILES, np.array([])).reshape(-1).tolist()]
    except DAMAGED as error:
        raise ModelFailed(f"expected arrays in {file.name} as {form} writes them: {error}") from None
    files = arrays.pop(FILES, None)
    if files is None or files.ndim != 1 or files.dtype.kind not in "US":
        got = f"none, but {', '.join(arrays) or 'no others'}" if files is None else f"{files.dtype} {list(files.shape)}"
        raise ModelFailed(f"expected {FILES} in {file.name}, the images' names as text [n], got {got}; write {form}")
    if not arrays:
        raise ModelFailed(f"expected the outputs in {file.name} beside {FILES}, got none; write {form}")
    for name, values in arrays.items():
        if not values.ndim or len(values) != len(names) or values.dtype.kind not in "fiub":
            raise ModelFailed(
                f"{name}: expected numbers for each of {len(names)} files in {file.name}, got {values.dtype}"
                f" {list(values.shape)}"
            )
    return names, arrays


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _is_file(path: Path) -> bool:
    """Returns whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _from_csv(file: Path) -> tuple[list[str], dict[str, NDArray[Any]]]:
    try:
        rows = [row for row in csv.reader(file.read_text("utf-8-sig").splitlines()) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ModelFailed(f"expected text in {file.name}, separated by commas: {error}") from None
    form = "file,cat,dog and, for each image, photos/1.jpg,0.25,0.75"
    if not rows or rows[0][0].strip().lower() not in ("file", "files"):
        raise ModelFailed(f"expected headings in {file.name} that begin with file, as {form}")
    names, width = [], len(rows[0])
    values = np.empty((len(rows) - 1, width - 1), np.float64)
    for number, row in enumerate(rows[1:]):
        try:
            values[number] = _numbers(row, width)
        except ValueError as error:
            raise ModelFailed(f"{file.name}, image {number + 1}: {error}; write {form}") from None
        names.append(row[0])
    return names, {ONLY: values}


def _numbers(row: Sequence[str], width: int) -> list[float]:
    if len(row) != width or width < 2:
        raise ValueError(f"expected a file and {max(width - 1, 1)} numbers, got {len(row)} fields")
    return [float(text) for text in row[1:]]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
