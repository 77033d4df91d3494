"""Flags that TensorFlow and XLA read from the environment, once, when TensorFlow is imported or first used."""

from __future__ import annotations

import os
from typing import Final

TF_XLA: Final = "TF_XLA_FLAGS"
XLA: Final = "XLA_FLAGS"


def add(variable: str, flag: str, unless: str | None = None) -> None:
    """Adds `flag` to those in the environment's `variable`, unless these have `unless` in them."""
    inherited = os.environ.get(variable, "")
    if unless is None or unless not in inherited:
        os.environ[variable] = f"{inherited} {flag}".strip()
