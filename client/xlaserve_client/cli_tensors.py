"""Output tensors on the command line: printed, and written to files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_IMAGE_CHANNELS: Final = (1, 3, 4)
"""Grey, RGB and RGBA."""
_SHOWN: Final = 4
"""Values of a tensor that are printed."""


def lines(outputs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Returns a line for each tensor: its name, type and shape, and its values or their range."""
    return [f"  {name}  {values.dtype} {list(values.shape)}  {_summary(values)}" for name, values in outputs.items()]


def write(file: Path, outputs: Mapping[str, NDArray[Any]]) -> None:
    """Writes the outputs to a `.npz` file; an only one that is an image to a `.png` file beside it."""
    (first, *more) = outputs.values()
    if not more and first.dtype == np.uint8 and first.ndim == 3 and first.shape[2] in _IMAGE_CHANNELS:
        from PIL import Image  # noqa: PLC0415 - the client alone does without Pillow

        Image.fromarray(first[:, :, 0] if first.shape[2] == 1 else first).save(file.with_suffix(".png"))
    else:
        write_arrays(file, outputs)


def write_arrays(file: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes a `.npz` file, as NumPy's `savez` does for any names but `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _summary(values: NDArray[Any]) -> str:
    """Returns the values of a tensor where they are few, else the smallest and the largest."""
    if values.size <= _SHOWN:
        return " ".join(map(_shown, values.ravel()))
    return f"{_shown(values.min())} to {_shown(values.max())}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)
