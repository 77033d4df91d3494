"""Packages that the server needs for some files."""

from __future__ import annotations

import importlib.util
from typing import Final

REQUIREMENTS: Final = {"openvino": "openvino>=2026.4,<2026.5", "tf_keras": "tf_keras>=2.21,<2.22"}
"""The requirement of each package for pip, to be installed without its own requirements."""


def read_by(package: str) -> str:
    """Returns the note on a file that a package reads, and how to install that where it is missing."""
    is_there = importlib.util.find_spec(package) is not None
    return f"read by {package}" + (f": pip install --no-deps '{REQUIREMENTS[package]}'" if not is_there else "")
