"""Which sources `--all` means."""

from __future__ import annotations

from typing import Final

APPLICATIONS: Final = "keras.applications:"


def all_sources() -> tuple[str, ...]:
    """Returns every source of the catalog."""
    from xlaserve.model import keras_models  # noqa: PLC0415 - TensorFlow takes seconds to import

    return ("builtin:digits", *(f"{APPLICATIONS}{name}" for name in keras_models.applications()))


def takes_weights(source: str) -> bool:
    """Says whether a source has no weights of its own, and would fetch some."""
    return source.startswith(APPLICATIONS)
