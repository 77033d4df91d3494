"""Reads what `torch.export.save` wrote: torchax has JAX do PyTorch's operations. What it returns needs neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import torch
import torchax.export

from xlaserve.errors import ModelFailed
from xlaserve.model.sources import jax_export
from xlaserve.model.sources.jax_export import ExportedModel

PLATFORMS: Final = ("cpu", "cuda")


def read(file: Path, weights: None = None) -> ExportedModel:
    """Reads a `.pt2` file, of a program of one input, with its weights. It may run code: only for files that you trust.

    Raises ModelFailed, or what torchax raises for an operation that it doesn't know.
    """
    try:
        program = torch.export.load(file)
    except OSError:
        raise
    except Exception as error:
        raise ModelFailed(f"source: expected what torch.export.save() wrote, got {file.name}") from error
    inputs = torchax.export.extract_avals(program)
    if len(inputs) != 1:
        raise ModelFailed(f"source: expected a program of one input, the image, got {file.name} of {len(inputs)}")
    values, function = torchax.export.exported_program_to_jax(program)

    def forward(values: Any, image: Any) -> Any:
        return program.call_spec.out_spec.unflatten(function(values, (image,)))

    exported = jax.export.export(jax.jit(forward), platforms=PLATFORMS)(values, *inputs)
    return jax_export.exported_model(exported, file.name, [np.asarray(value) for value in jax.tree.leaves(values)])
