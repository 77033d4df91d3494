"""Which sources `--all` means."""

from __future__ import annotations

from xlaserve.model import catalog


def all_sources() -> tuple[str, ...]:
    """Returns every source of the catalog that computes something."""
    return tuple(name for name in catalog.names() if name != catalog.NOOP)


def takes_weights(source: str) -> bool:
    """Says whether a source has no weights of its own, and would fetch some."""
    return source.startswith((catalog.APPLICATIONS, catalog.KERAS_CV))
