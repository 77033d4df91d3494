"""Examples: images with the outputs that a notebook gave, which the model is to give as well before it is ready."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from xlaserve.config.base import Frozen


class ExampleSettings(Frozen):
    """A folder of images with the expected outputs, and how far the model's answers may be from these."""

    folder: Path
    """The folder: images, and either `predictions.npz` (`files`, and an array for each output by its name) or
    `predictions.csv` (`file`, and a column for each number of the only output)."""
    max_difference: float | None = Field(None, ge=0)
    """The largest difference of an output from the expected one, as a share of the largest expected number of that
    output, with which the model becomes ready. By default 0.01, and for modes with a narrower precision 0.1, with int8
    0.3."""
    min_agreement: float = Field(0.95, ge=0, le=1)
    """The least share of answers that are the expected ones, with which the model becomes ready: images with the same
    likeliest class, pixels with the same class, or objects found by both."""
