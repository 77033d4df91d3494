"""Descriptions of exports of JAX and PyTorch, short as only these can read them, and of files of Python objects."""

from __future__ import annotations

import shlex
from pathlib import Path

from xlaserve.inspection.model_file.description import Description


def jax(path: Path, file: Path) -> Description:
    """Describes what `jax.export` wrote."""
    return Description(
        path=path,
        format="export of JAX",
        size_bytes=file.stat().st_size,
        notes=("inputs and outputs are shown by `xlaserve check`, which needs xlaserve[jax]",),
    )


def torch(path: Path, file: Path) -> Description:
    """Describes what `torch.export.save` wrote."""
    return Description(
        path=path,
        format="export of PyTorch",
        size_bytes=file.stat().st_size,
        refusal=f"source: {file.name} is served as the SavedModel that is made of it: xlaserve import {_typed(path)}",
    )


def pickled(path: Path, file: Path) -> Description:
    """Describes a file of pickled Python objects, such as those of `torch.save`."""
    return Description(
        path=path,
        format="pickled Python objects, such as PyTorch's weights",
        size_bytes=file.stat().st_size,
        refusal=(
            f"source: {file.name} holds Python objects; where the model is, export it as a function of images:"
            f' torch.export.save(torch.export.export(model.eval(), (images,)), "{file.stem}.pt2"); then'
            f" xlaserve import {_typed(path.with_suffix('.pt2'))}"
        ),
    )


def _typed(path: Path) -> str:
    return shlex.quote(str(path))
