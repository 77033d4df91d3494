"""Makes of what `torch.export.save` wrote the files of a JAX export and of its weights, as `jax_export` reads them.

torchax has JAX do PyTorch's operations. It is a program of its own: PyTorch and TensorFlow crash in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import torch
import torchax.export
from jax import export

PLATFORMS: Final = ("cpu", "cuda")


def convert(file: Path, exported: Path, weights: Path) -> None:
    """Reads the program in `file` and writes its function, and its weights, the function's inputs before the image.

    Reading may run code: only for files that are trusted. Raises ValueError where it has several inputs, and what
    torchax raises for an operation that it doesn't know.
    """
    # A program that was loaded lacks its tensors' descriptions until it is traced again, which this does.
    program = torch.export.load(file).run_decompositions()
    inputs = torchax.export.extract_avals(program)
    if len(inputs) != 1:
        raise ValueError(f"expected a program of one input, the image, got one of {len(inputs)}")
    values, function = torchax.export.exported_program_to_jax(program)

    def forward(values: Any, image: Any) -> Any:
        return program.call_spec.out_spec.unflatten(function(values, (image,)))

    exported.write_bytes(export.export(jax.jit(forward), platforms=PLATFORMS)(values, *inputs).serialize())
    np.savez(weights, *map(np.asarray, jax.tree.leaves(values)))


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
