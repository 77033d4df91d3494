"""The files that a model is made of: those that its settings or its source name, and all in folders that these name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from xlaserve.config import keras_shards, onnx_weights
from xlaserve.config.model_settings import ModelSettings
from xlaserve.config.stamp import Stamp

File = tuple[str, Stamp]
"""A path, and the state of the file there."""


def named_paths(settings: ModelSettings) -> list[Path]:
    """Returns the paths of what a model computes with: those that settings name, and those that these list.

    There may be nothing at them: sources and weights also have names.
    """
    labels = settings.labels if isinstance(settings.labels, Path) else None
    anchors = settings.box_decoding.anchors if settings.box_decoding else None
    named = (settings.source, settings.weights, settings.architecture, labels, settings.calibration, anchors)
    paths = [Path(path) for path in named if path]
    shards = keras_shards.files(Path(settings.weights)) if settings.weights else []
    return [*paths, *shards, *onnx_weights.files(Path(settings.source))]


def files_at(path: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yields the file at `path`, or all files in the folder there, through links too.

    A folder that is one of those `above` it is left out, as links may lead in circles, and so is one that can't be
    listed. Raises OSError where a folder on the way can't be entered.
    """
    if path.is_file():
        yield path
    elif path.is_dir() and (folder := path.resolve()) not in above:
        entries: list[Path] = []
        with suppress(OSError):
            entries = sorted(path.iterdir())
        for entry in entries:
            yield from files_at(entry, above | {folder})


def state(settings: ModelSettings) -> frozenset[File]:
    """Returns the files of a model and of its examples: a file that was changed or replaced is another one."""
    found, examples = set(), [settings.examples.folder] if settings.examples else []
    for path in [*named_paths(settings), *examples]:
        # Files may be removed meanwhile.
        with suppress(OSError):
            for file in files_at(path):
                found.add((str(file), Stamp.of(file)))
    return frozenset(found)
