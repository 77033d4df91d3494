"""The kinds of source that models come from: what they are called, and which settings they take.

A new kind is a row here and a loader in `model.catalog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of source."""

    prefix: str = ""
    """What its names begin with; empty where they are paths."""
    takes: frozenset[str] = frozenset()
    """Which of `PARTICULAR`, the settings that only some kinds take, it takes."""
    needs_tensorflow: bool = True
    is_downloaded: bool = False
    """Whether a model's weights are downloaded, unless they are to be random."""
    is_fixed: bool = True
    """Whether its name and what lies there tell what the model is, so that a compile cache can know it again."""


_ADAPTED: Final = frozenset({"classes", "task", "preprocess"})

NOOP: Final = Source("builtin:noop", needs_tensorflow=False)
BUILT_IN: Final = Source("builtin:", frozenset({"precision"}))
APPLICATIONS: Final = Source("keras.applications:", _ADAPTED | {"weights", "precision"}, is_downloaded=True)
KERAS_CV: Final = Source("keras_cv:", _ADAPTED | {"weights", "precision"}, is_downloaded=True)
KERAS_FILE: Final = Source(
    takes=_ADAPTED | {"bounding_box_format", "output_names", "custom_objects", "safe_mode", "precision"}
)
SAVED_MODEL: Final = Source(takes=_ADAPTED | {"bounding_box_format", "output_names", "signature"})

PARTICULAR: Final = APPLICATIONS.takes | BUILT_IN.takes | KERAS_FILE.takes | SAVED_MODEL.takes
"""The settings that only some kinds of source take; for the others a value is an error."""

KAGGLE: Final = Source("kagglehub:", PARTICULAR, is_fixed=False)
"""Takes any of them here: the files that it stands for, a KERAS_FILE or a SAVED_MODEL, take what they take."""

NAMED_WEIGHTS: Final = ("imagenet", "random")
"""Weights that are no file."""
KERAS_SUFFIX: Final = ".keras"
BUILTIN_SOURCES: Final = ("builtin:digits", "builtin:shapes-detector", "builtin:shapes-segmenter", NOOP.prefix)
NAMES: Final = f"{APPLICATIONS.prefix}<Name>, {KERAS_CV.prefix}<Name>, {KAGGLE.prefix}<handle>, " + ", ".join(
    BUILTIN_SOURCES
)
"""Forms of sources that are not paths, for messages."""


def kind_of(source: str) -> Source | None:
    """Returns the kind of a source that has a name, None for a path."""
    if source in BUILTIN_SOURCES:
        return NOOP if source == NOOP.prefix else BUILT_IN
    for kind in (APPLICATIONS, KERAS_CV, KAGGLE):
        if source.startswith(kind.prefix):
            return kind
    return None


def looks_like_path(source: str) -> bool:
    """Returns whether a source that has no kind's name is meant as a path."""
    return ":" not in source or source.startswith(("/", "./", "../"))


def is_keras_file(path: Path) -> bool:
    """Returns whether a file is Keras's own, by its name."""
    return path.suffix == KERAS_SUFFIX
