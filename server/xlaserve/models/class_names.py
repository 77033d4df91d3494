"""The names of classes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from xlaserve.errors import ModelFailed
from xlaserve.models.task_base import WithClasses

IMAGENET_CLASSES: Final = 1000
BACKGROUND: Final = frozenset({"background", "???"})
"""Names of the class that is no object; the second is in the label files of TensorFlow's Object Detection API."""
FETCH_TIMEOUT_S: Final = 10.0

_log = logging.getLogger(__name__)


def of_task(labels: tuple[str, ...] | Path, task: WithClasses) -> tuple[str, ...]:
    """Returns the configured names of a task's classes. Raises ModelFailed where there is not one for each."""
    return named(labels, task.label_count, task.labelled_classes)


def named(labels: tuple[str, ...] | Path, classes: int | None = None, each: str = "class") -> tuple[str, ...]:
    """Returns the configured names. Raises ModelFailed where there is not one for each of `classes`, if given."""
    if isinstance(labels, Path):
        return from_file(labels, classes, each)
    if classes is not None and len(labels) != classes:
        raise ModelFailed(f"labels: expected {classes} names, one for each {each}, got {len(labels)}")
    return labels


def has_background(labels: tuple[str, ...] | Path | None) -> bool:
    """Returns whether the first class of a detector is no object, by its configured name. Raises ModelFailed."""
    first, *_ = (*(named(labels) if labels else ()), "")
    return first.strip("_").lower() in BACKGROUND


def from_file(file: Path, classes: int | None = None, each: str = "class") -> tuple[str, ...]:
    """Reads one name a line, UTF-8, each after its number or none, as Teachable Machine writes them: `0 rose`.

    Raises ModelFailed where there is not one for each of `classes`, if given.
    """
    try:
        names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ModelFailed(f"labels: {file.name} can't be read: {reason}") from error
    if classes is not None and len(names) != classes:
        raise ModelFailed(f"labels: expected {classes} lines, one for each {each}, got {len(names)} in {file.name}")
    if all(name.startswith(f"{number} ") for number, name in enumerate(names)):
        return tuple(name.partition(" ")[2].strip() for name in names)
    return names


def imagenet(timeout_s: float = FETCH_TIMEOUT_S) -> tuple[str, ...] | None:
    """Returns ImageNet's 1,000 names from Keras's class index, which Keras downloads once and keeps.

    Returns None, and logs why, where it can't be had within `timeout_s`.
    """
    names: list[str] = []
    reasons: list[str] = ["no answer"]

    def fetch() -> None:
        try:
            names.extend(_fetch_imagenet())
        except Exception as error:
            reasons.append(str(error))

    # Keras sets no timeout, and a connection that nobody answers would hold the model up; a daemon holds up nothing.
    fetcher = threading.Thread(target=fetch, name="imagenet-labels", daemon=True)
    fetcher.start()
    fetcher.join(timeout_s)
    if len(names) == IMAGENET_CLASSES:
        return tuple(names)
    _log.warning("ImageNet's class names could not be fetched, classes go by their index: %s", reasons[-1])
    return None


def _fetch_imagenet() -> list[str]:
    import numpy as np  # noqa: PLC0415

    from xlaserve.models.networks.keras_runtime import keras  # noqa: PLC0415 - builtin:noop does without Keras

    falling = np.arange(IMAGENET_CLASSES, 0, -1, dtype=np.float32)[np.newaxis]
    (classes,) = keras.applications.imagenet_utils.decode_predictions(falling, top=IMAGENET_CLASSES)
    return [name for _, name, _ in classes]
