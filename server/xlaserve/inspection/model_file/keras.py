"""Descriptions of files of Keras, whole models and weights alone, and of Keras's models within SavedModels."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import h5py

from xlaserve.inspection.model_file import keras_layers, keras_shapes, packages, zip_member
from xlaserve.inspection.model_file.description import Description, Tensor
from xlaserve.models.sources import keras_config, keras_content
from xlaserve.models.sources.keras_config import Json

NOT_WEIGHTS: Final = re.compile(r"optimizer.*|metrics|_?compile_metrics|seed_generator.*|.*_seed_generator")
"""Groups of HDF5 that hold the state of training."""
FAMILIES: Final = re.compile(r"(mobilenet|resnet|vgg|xception|inception|nasnet|densenet|efficientnet|convnext)", re.I)
"""Beginnings of the names that Keras Applications gives its networks."""


@dataclass(frozen=True)
class Network:
    """A Keras model, as its configuration describes it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: tuple[str, ...]
    scaling: tuple[str, ...]
    custom: tuple[str, ...]
    has_code: bool
    family: str


def network(model: Json) -> Network:
    """Returns a model's description from its configuration."""
    model = keras_layers.plain(model)
    graph = keras_shapes.graph(model)
    found = [*keras_layers.layers(model)]
    return Network(
        inputs=tuple(Tensor(name, shape, dtype) for name, (shape, dtype) in graph.inputs.items()),
        outputs=tuple(Tensor(name, value.shape, "float32", value.activation) for name, value in graph.outputs.items()),
        layers=once(keras_layers.title(one) for one in found if keras_layers.is_noted(one)),
        scaling=once(keras_layers.title(one) for one in found if one["class_name"] in keras_layers.SCALING),
        custom=once(one["class_name"].rpartition(">")[2] for one in [model, *found] if keras_layers.is_custom(one)),
        has_code=bool(keras_config.code(model)),
        family=_family([model, *found]),
    )


def describe(path: Path, file: Path) -> Description:
    """Describes a `.keras` or `.h5` file. Raises ModelFailed."""
    content = keras_content.read(file)
    parameters, saved = _stored(file, is_zip=content.is_zip)
    version = f"Keras {content.version}" if content.version else ""
    kind = "zip archive" if content.is_zip else "HDF5"
    if content.config is None:
        return Description(
            path=path,
            format=f"weights of a Keras model, without the model ({kind})",
            written_by=version,
            parameters=parameters,
            size_bytes=file.stat().st_size,
            refusal=str(keras_content.without_model(content)),
        )
    found = network(content.config)
    needs_keras2 = content.is_zip and content.is_of_keras_2
    return Description(
        path=path,
        format=f"Keras model ({kind})",
        written_by=version,
        saved=saved,
        parameters=parameters,
        size_bytes=file.stat().st_size,
        notes=(packages.read_by("tf_keras"),) if needs_keras2 else (),
        **vars(found),
    )


def once(names: Iterable[str]) -> tuple[str, ...]:
    """Returns each of some names once, in their order."""
    return tuple(dict.fromkeys(names))


def _family(found: list[Json]) -> str:
    """Returns the name of the first model that is of a known family."""
    if any(keras_layers.name(one) == keras_config.TEACHABLE_LAYER for one in found):
        return "Teachable Machine"
    models = (keras_layers.name(one) for one in found if one["class_name"] in keras_layers.MODELS)
    return next((name for name in models if FAMILIES.match(name)), "")


def _stored(file: Path, *, is_zip: bool) -> tuple[int | None, str]:
    """Returns the number of parameters in a file, and when it was written, where it says it."""
    if not is_zip:
        return _parameters(file), ""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        metadata = json.loads(archive.read(keras_content.METADATA)) if keras_content.METADATA in names else {}
        if keras_content.WEIGHTS not in names:
            return None, str(metadata.get("date_saved", ""))
        with zip_member.opened(archive, keras_content.WEIGHTS) as weights:
            return _parameters(weights), str(metadata.get("date_saved", "")).replace("@", " ")


def _parameters(file: Path | IO[bytes]) -> int | None:
    """Returns how many numbers an HDF5 file holds that are not the state of training; None where it is damaged."""
    try:
        with h5py.File(file) as opened:
            return _numbers(opened)
    except (OSError, RuntimeError):
        return None


def _numbers(group: Any) -> int:
    own = (one for name, one in group.items() if NOT_WEIGHTS.fullmatch(name) is None)
    return sum(int(one.size) if isinstance(one, h5py.Dataset) else _numbers(one) for one in own)
