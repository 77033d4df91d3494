"""Examples: a folder of images with the outputs that a notebook gave, for the setting `examples` of a model."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

PREDICTIONS: Final = "predictions.npz"
FILES: Final = "files"
"""The array of the images' paths within the folder."""
_SUFFIXES: Final = ((b"\xff\xd8\xff", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"))


def save(
    folder: str | PathLike[str],
    images: Sequence[str | PathLike[str] | bytes],
    outputs: ArrayLike | Mapping[str, ArrayLike],
) -> Path:
    """Writes encoded images and a notebook's outputs for them into `folder`, and returns the file of the outputs.

    `images` are paths, or the bytes of JPEG, PNG or WebP files; those in `folder` already stay where they are.
    `outputs` are the rows of a model's only output, `[n, ...]`, or of each output by its name. Raises ValueError for
    outputs that are not rows of numbers for each image, TypeError for images of another type, and OSError.
    """
    if isinstance(images, (str, PathLike, bytes)) or not isinstance(images, Sequence):
        raise TypeError(f"images: expected a list of paths or encoded bytes, got {type(images).__name__}")
    arrays = _arrays(outputs, len(images))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(folder, images)
    for image, name in zip(images, names, strict=True):
        target = folder / name
        if isinstance(image, bytes):
            target.write_bytes(image)
        elif not (target.exists() and target.samefile(image)):
            shutil.copyfile(image, target)
    np.savez(folder / PREDICTIONS, **{FILES: np.array(names), **arrays})  # type: ignore[arg-type] # no allow_pickle
    return folder / PREDICTIONS


def _arrays(outputs: ArrayLike | Mapping[str, ArrayLike], images: int) -> dict[str, NDArray[Any]]:
    if not images:
        raise ValueError("images: expected at least one, got an empty list")
    named = outputs if isinstance(outputs, Mapping) else {"output": outputs}
    arrays = {name: np.asarray(values) for name, values in named.items()}
    if not arrays or FILES in arrays:
        raise ValueError(f"outputs: expected at least one, none of them called {FILES}, got {', '.join(arrays)}")
    for name, values in arrays.items():
        if not values.ndim or len(values) != images or values.dtype.kind not in "fiub":
            raise ValueError(
                f"outputs: expected numbers {name} with a row for each of {images} images, got {values.dtype}"
                f" {list(values.shape)}"
            )
    return arrays


def _names(folder: Path, images: Sequence[str | PathLike[str] | bytes]) -> list[str]:
    """Returns the path of each image within the folder: its own, its name, or a number where names repeat."""
    inside = folder.resolve()
    names = []
    for number, image in enumerate(images):
        if isinstance(image, bytes):
            suffix = next((suffix for start, suffix in _SUFFIXES if image.startswith(start)), "")
            names.append(f"{number:05}{suffix}")
        elif not isinstance(image, (str, PathLike)):
            raise TypeError(f"images: expected paths or encoded bytes, got {type(image).__name__}")
        else:
            path = Path(image).resolve()
            names.append(str(path.relative_to(inside)) if path.is_relative_to(inside) else path.name)
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return [f"{number:05}-{Path(name).name}" if name in repeated else name for number, name in enumerate(names)]
