"""Makes of what `torch.export.save` wrote the files of a JAX export and of its weights, as `jax_export` reads them.

torchax has JAX do PyTorch's operations. It is a program of its own: PyTorch and TensorFlow crash in one process.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import torch
import torchax.export
from jax import export
from jax import numpy as jnp

from xlaserve.engine.causes import cause

PLATFORMS: Final = ("cpu", "cuda")
OF_XLA: Final = (2, 3, 1, 0)
"""The axes of a kernel, output and input channels first, with them last."""
OF_TORCH: Final = (3, 2, 0, 1)
"""The way back."""


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
    values = _in_order(values, program.graph_signature)

    def forward(kept: Any, image: Any) -> Any:
        values = [jnp.permute_dims(value, OF_TORCH) if value.ndim == 4 else value for value in kept]
        return program.call_spec.out_spec.unflatten(function(values, (image,)))

    # Kernels are kept as XLA's convolutions on a CPU want them; else each run begins with transposing them.
    values = [jnp.permute_dims(value, OF_XLA) if value.ndim == 4 else value for value in values]
    exported.write_bytes(export.export(jax.jit(forward), platforms=PLATFORMS)(values, *inputs).serialize())
    np.savez(weights, *map(np.asarray, values))


def _in_order(values: list[Any], signature: Any) -> list[Any]:
    """Returns a program's weights in the order in which it takes them.

    torchax has the constants that PyTorch has lifted out of the code last, and programs take them before buffers.
    """
    names = [*signature.parameters, *signature.buffers, *signature.lifted_tensor_constants]
    by_name = dict(zip(names, values, strict=True))
    return [by_name[spec.target] for spec in signature.input_specs if spec.target is not None]


def main() -> None:
    """Converts the file that the command names; where that fails, stderr ends with the cause, in one line."""
    try:
        convert(*map(Path, sys.argv[1:]))
    except Exception as error:  # of any kind: PyTorch's and JAX's own
        traceback.print_exc()
        sys.exit(f"\n{type(error).__name__}: {cause(error)}")


if __name__ == "__main__":
    main()
