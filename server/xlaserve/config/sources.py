"""The kinds of source that models come from: what they are called, and which settings they take."""

from __future__ import annotations

import re
from difflib import get_close_matches
from enum import Enum, unique
from pathlib import Path
from typing import Final, NamedTuple


class Traits(NamedTuple):
    """Properties of a kind of source that are known before anything is loaded."""

    takes: frozenset[str] | None = frozenset()
    """The settings of `PARTICULAR` that this kind takes; None where the kind of the fetched file decides."""
    prefix: str = ""
    """The prefix of its names; empty where they are paths."""
    names: tuple[str, ...] = ()
    """All names that may follow the prefix, where they are known here."""
    shown: str = "<Name>"
    """The form of a name in messages, where the names are not known here."""
    suffixes: tuple[str, ...] = ()
    """The suffixes of its files' paths, in small letters; "/" for folders."""
    needs_tensorflow: bool = True
    is_downloaded: bool = False
    """Whether a model's weights are downloaded, unless they are to be random."""
    has_presets: bool = False
    """Whether weights may name a preset, which brings an architecture of its own."""
    is_fixed: bool = True
    """Whether its name and what lies there tell what the model is, so that a compile cache can know it again."""


_ADAPTED: Final = frozenset({"classes", "task", "preprocess"})
_BUILT: Final = _ADAPTED | {"weights", "precision"}
_STORED: Final = _ADAPTED | {
    "activation",
    "blank",
    "bounding_box_format",
    "box_decoding",
    "keypoint_format",
    "output_names",
    "outputs",
    "threshold",
    "values",
}


@unique
class Source(Enum):
    """A kind of source. A new one is a row here; mypy then asks for its loader in `models.catalog`."""

    APPLICATIONS = Traits(_BUILT, "keras.applications:", is_downloaded=True)
    KERAS_CV = Traits(_BUILT, "keras_cv:", is_downloaded=True)
    KERAS_HUB = Traits(_BUILT, "keras_hub:", shown="<Class>", is_downloaded=True, has_presets=True)
    KAGGLE = Traits(None, "kagglehub:", shown="<handle>", is_fixed=False)
    BUILT_IN = Traits(frozenset({"precision"}), "builtin:", ("digits", "shapes-detector", "shapes-segmenter"))
    NOOP = Traits(prefix="builtin:", names=("noop",), needs_tensorflow=False)
    KERAS_FILE = Traits(
        _STORED | {"architecture", "custom_objects", "safe_mode", "precision"},
        shown="a .keras or .h5 file",
        suffixes=(".keras", ".h5", ".hdf5"),
    )
    GRAPH_FILE = Traits(_STORED | {"input_tensor"}, shown="a frozen graph (.pb)", suffixes=(".pb",))
    JAX_FILE = Traits(_STORED | {"weights"}, shown="a .jax file", suffixes=(".jax",))
    ONNX_TFLITE_FILE = Traits(_STORED, shown="a .onnx or .tflite file", suffixes=(".onnx", ".tflite"))
    SAVED_MODEL = Traits(_STORED | {"function", "signature"}, shown="the folder of a SavedModel", suffixes=("/",))

    @property
    def forms(self) -> list[str]:
        """How its sources are written, for messages."""
        return [self.value.prefix + name for name in self.value.names or (self.value.shown,)]


PARTICULAR: Final = frozenset[str]().union(*(kind.value.takes or () for kind in Source))
"""The settings that only some kinds of source take; for the others a value is an error."""
NAMED_WEIGHTS: Final = ("imagenet", "random")
"""Weights that are neither a file nor a preset."""
_HANDLE: Final = re.compile(r"[\w-]+_[\w-]+|[a-z]+://.+")
"""How presets are named: `resnet_50_imagenet`, `kaggle://keras/resnetv1/keras/resnet_50_imagenet`, `hf://user/name`."""
_WITHOUT_MEANING: Final = re.compile(r"\d+|(my_?|keras_?|saved_?|frozen_?)?(model|graph|network)s?|weights|best|final")
"""Names of files that say nothing of the model; its folder's name does."""
BUILTIN_SOURCES: Final = tuple(form for kind in Source if kind.value.names for form in kind.forms)
NAMES: Final = ", ".join(form for kind in Source if kind.value.prefix for form in kind.forms)
"""Forms of sources that are not paths, for messages."""
_PATHS = [form for kind in Source if kind.value.suffixes for form in kind.forms]
PATHS: Final = f"{', '.join(_PATHS[:-1])} or {_PATHS[-1]}"
"""Kinds of files and folders that a path may lead to, for messages."""
FILES: Final = frozenset(suffix for kind in Source for suffix in kind.value.suffixes) - {"/"}
"""Suffixes of sources that are files."""


def kind_of_name(source: str) -> Source | None:
    """Returns the kind of a source by its name; None where it has none, as paths do. Does not touch the disk."""
    for kind in Source:
        prefix, names = kind.value.prefix, kind.value.names
        if prefix and (source in kind.forms if names else source.startswith(prefix)):
            return kind
    return None


def near_name(source: str) -> str:
    """Returns the name of a source that is nearest to one of no kind; empty where none is near. Needs no disk."""
    if near := get_close_matches(source.lower(), BUILTIN_SOURCES, 1, 0.8):  # of these, much is the prefix
        return near[0]
    prefix, _, name = source.partition(":")
    named = [kind.value.prefix for kind in Source if kind.value.prefix and not kind.value.names]
    near = get_close_matches(f"{prefix.lower()}:", named, 1)
    return f"{near[0]}{name}" if near and name else ""


def kind_of(source: str) -> Source | None:
    """Returns the kind of a source by its name, or by what lies at its path; None where it is of no kind."""
    if (kind := kind_of_name(source)) or not looks_like_path(source):
        return kind
    path = Path(source)
    suffix = "/" if path.is_dir() else path.suffix.lower() if path.exists() else ""
    return next((kind for kind in Source if suffix in kind.value.suffixes), None)


def is_of_file(source: str) -> bool:
    """Returns whether a source is the path of a user's file or folder that holds a model."""
    kind = kind_of(source)
    return kind is not None and bool(kind.value.suffixes)


def is_file_of_model(path: Path) -> bool:
    """Returns whether a path is named as sources that are files are."""
    return path.suffix.lower() in FILES


def model_name(source: str) -> str:
    """Returns a name for the model of a source: its last part, with what names may not have as dashes."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", source.rstrip("/").rpartition("/")[2].rpartition(":")[2])
    return safe.lstrip("-._")[:128] or "model"


def name_of(source: str) -> str:
    """Returns a name for the model of a source: a path's as `name_at` has it, or the last part of another name."""
    return model_name(source) if kind_of_name(source) else name_at(Path(source))


def name_at(path: Path) -> str:
    """Returns a name for the model at a path: its file's, or its folder's where that says more."""
    stems = [path.name if path.is_dir() else path.stem, *(folder.name for folder in path.absolute().parents)]
    telling = (stem for stem in stems if stem and _WITHOUT_MEANING.fullmatch(stem.lower()) is None)
    return model_name(next(telling, stems[0]))


def is_handle(weights: str) -> bool:
    """Returns whether weights are named, as presets on a hub are, and do not lie at a path."""
    return _HANDLE.fullmatch(weights) is not None


def is_weights_path(weights: str) -> bool:
    """Returns whether weights are meant as a path."""
    return weights not in NAMED_WEIGHTS and not is_handle(weights)


def is_architecture_path(architecture: str) -> bool:
    """Returns whether an architecture is a file, and not a function of a module."""
    return architecture.endswith(".json")


def looks_like_path(source: str) -> bool:
    """Returns whether a source that has no kind's name is meant as a path."""
    return ":" not in source or source.startswith(("/", "./", "../"))
