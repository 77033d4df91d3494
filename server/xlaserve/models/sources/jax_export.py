"""Reads exports of `jax.export` into models that run without JAX.

Such a file holds a StableHLO module of one function, the platforms that it was made for, and the function's inputs
and outputs. A function may have been exported with its weights as arguments, `forward(params, images)`: the file lacks
their values, which come in a `.npz` file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from jax import export, tree_util
from numpy.typing import NDArray

from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.models.networks.any_batch import ONLY_OUTPUT
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.sources import stablehlo_weights

MOST_SHOWN: Final = 4
WRITE: Final = 'pathlib.Path("model.jax").write_bytes(export.export(jax.jit(forward))(images).serialize())'
"""The line of Python that writes an export."""
SAVE: Final = 'np.savez("weights.npz", *jax.tree.leaves(params))'
"""The line of Python that writes the weights of an export."""


@dataclass(frozen=True)
class ExportedModel:
    """A function of images, exported from JAX."""

    module: bytes
    """Serialized StableHLO."""
    version: int
    """Version of its calling convention, which TensorFlow's XlaCallModule shares."""
    platforms: tuple[str, ...]
    """Platforms that it was exported for, as JAX names them: cpu, cuda, rocm, tpu."""
    disabled_checks: tuple[str, ...]
    image: TensorShape
    arguments: tuple[NDArray[Any] | None, ...]
    """The module's arguments: weights, and None where the image goes."""
    outputs: Mapping[str, TensorShape]


def read(file: Path, weights: Path | None) -> ExportedModel:
    """Reads what `Exported.serialize()` wrote and, for a function that takes them, its weights from a `.npz` file.

    Raises ModelFailed, or OSError.
    """
    contents = file.read_bytes()
    try:
        exported = export.deserialize(bytearray(contents))
    except Exception as error:  # of any kind: it is not made for what is no export
        raise ModelFailed(
            f"source: expected what jax.export's serialize() wrote, got {file.name} of {len(contents)} bytes, which is"
            f" no export, comes from a newer JAX or has been cut off; {WRITE}"
        ) from error
    return exported_model(exported, file.name, () if weights is None else _arrays(weights))


def exported_model(exported: Any, name: str, weights: Sequence[NDArray[Any]]) -> ExportedModel:
    """Returns the model of a `jax.export.Exported` whose last input is the image, and `weights` those before.

    Raises ModelFailed where it is another kind of function; `name` is what messages call it.
    """
    if exported.nr_devices != 1:
        raise ModelFailed(
            f"source: expected an export for one device, got {name} for {exported.nr_devices}; export it on one:"
            f" {WRITE}"
        )
    if exported.ordered_effects or exported.unordered_effects:
        raise ModelFailed(
            f"source: expected a function without side effects, got {name} with some; export it without, such as"
            f" jax.debug.print: {WRITE}"
        )
    _check_inputs(exported, name, weights)
    try:
        separated = stablehlo_weights.separate(exported.mlir_module_serialized)
    except Exception as error:  # MLIR's own, of no common type
        raise ModelFailed(
            f"source: expected StableHLO {stablehlo_weights.NEWEST} or older, as TensorFlow reads it, got {name}, which"
            f" can't be written so: {cause(error)}; export it with an older JAX, or without the operation that is"
            f" named: {WRITE}"
        ) from error
    inputs = (*weights, None)
    image = _tensor_shape(exported.in_avals[-1])
    return ExportedModel(
        module=separated.module,
        version=exported.calling_convention_version,
        platforms=tuple(exported.platforms),
        disabled_checks=tuple(map(str, exported.disabled_safety_checks)),
        image=image,
        arguments=(*(inputs[index] for index in exported.module_kept_var_idx), *separated.weights),
        outputs=dict(zip(_output_names(exported), map(_tensor_shape, exported.out_avals), strict=True)),
    )


def _check_inputs(exported: Any, name: str, weights: Sequence[NDArray[Any]]) -> None:
    shapes = list(map(_tensor_shape, exported.in_avals))
    if len(shapes) - 1 not in exported.module_kept_var_idx:
        raise ModelFailed(
            f"source: expected a function of images, got {name}, which does not use its last input; make the image the"
            f" last one: {WRITE}"
        )
    wanted, names = shapes[:-1], _input_names(exported)[:-1]
    if wanted and not weights:
        shown = ", ".join(names[:MOST_SHOWN]) + (f" and {len(names) - MOST_SHOWN} more" * (len(names) > MOST_SHOWN))
        raise ModelFailed(
            f"weights: expected a .npz file of {name}'s inputs before the image, as it takes {shown}, got nothing;"
            f" write it: {SAVE}"
        )
    if len(wanted) != len(weights):
        raise ModelFailed(
            f"weights: expected {name}'s inputs before the image, {len(wanted)}, got {len(weights)}; write them: {SAVE}"
        )
    for input_name, shape, array in zip(names, wanted, weights, strict=True):
        if shape != (got := TensorShape(array.shape, array.dtype.name)):
            raise ModelFailed(f"weights: expected {shape} for {name}'s {input_name}, got {got}; write them: {SAVE}")


def _arrays(file: Path) -> list[NDArray[Any]]:
    """Returns the arrays of a `.npz` file in the order in which they were saved."""
    if not zipfile.is_zipfile(file):
        raise ModelFailed(
            f"weights: expected a .npz file, got {file.name}{'' if file.exists() else ', which does not exist'}; write"
            f" it: {SAVE}"
        )
    try:
        with np.load(file) as arrays:
            return [_with_known_type(arrays[name]) for name in arrays.files]
    except ValueError as error:  # Python objects, which need not be data
        raise ModelFailed(
            f"weights: expected a .npz file of arrays, got {file.name}: {error}; write it: {SAVE}"
        ) from error


def _with_known_type(array: NDArray[Any]) -> NDArray[Any]:
    # NumPy saves a type that is not its own as two bytes without meaning.
    return array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array


def _paths(tree: Any) -> list[Any]:
    leaves, _ = tree_util.tree_flatten_with_path(tree_util.tree_unflatten(tree, range(tree.num_leaves)))
    return [path for path, _ in leaves]


def _input_names(exported: Any) -> list[str]:
    """Returns JAX's names of the inputs: `args[0]['bias']`."""
    paths = _paths(exported.in_tree)
    return [f"{('args', 'kwargs')[positional.idx]}{tree_util.keystr(path)}" for positional, *path in paths]


def _output_names(exported: Any) -> list[str]:
    """Returns the names of outputs: a mapping's keys, else numbers; those of mappings within mappings joined."""
    names = [tree_util.keystr(path, simple=True, separator="_") for path in _paths(exported.out_tree)]
    return [name if name and not name[0].isdecimal() else f"{ONLY_OUTPUT}_{name}".rstrip("_") for name in names]


def _tensor_shape(abstract: Any) -> TensorShape:
    sides = tuple(side if isinstance(side, int) else None for side in abstract.shape)
    return TensorShape(sides, abstract.dtype.name)
