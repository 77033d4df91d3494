"""The content of a model file, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Shape = tuple[int | None, ...] | None
"""Sides of a tensor; None for a side that is open, or for all where not even their number is known."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model."""

    name: str
    shape: Shape
    dtype: str = "float32"
    """Empty where the file does not say it."""
    activation: str = ""
    """The function that an output has gone through last: `softmax`, `linear`. Empty where the file does not say it."""

    @property
    def text(self) -> str:
        """Type and shape: `float32 [n, 28, 28, 1]`."""
        if self.shape is None:
            return f"{self.dtype} of unknown shape".strip()
        first, *rest = self.shape or (1,)
        sides = ["n" if first is None else str(first), *("any" if side is None else str(side) for side in rest)]
        return f"{self.dtype} [{', '.join(sides if self.shape else ())}]".strip()


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of a model file."""

    path: Path
    """The path that was asked for."""
    format: str
    written_by: str = ""
    """Name and version of the program that wrote it; empty where the file does not say it."""
    saved: str = ""
    """Date and time of writing, as the file has it."""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    layers: tuple[str, ...] = ()
    """Layers and operations that matter for serving."""
    scaling: tuple[str, ...] = ()
    """The layers among these that scale pixels."""
    custom: tuple[str, ...] = ()
    """Classes that Keras does not know."""
    has_code: bool = False
    """Whether it holds Python code."""
    family: str = ""
    """The name of a network with a usual preprocessing that it is or contains: `mobilenetv2_1.00_224`."""
    parameters: int | None = None
    size_bytes: int = 0
    settings: tuple[tuple[str, str | list[str]], ...] = ()
    """Settings without which it is not served, by name."""
    notes: tuple[str, ...] = ()
    """Other facts, in words."""
    refusal: str = ""
    """The reason why it can't be served, and the next step; empty where the inputs and outputs decide."""
