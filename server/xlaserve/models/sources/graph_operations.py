"""Operations of frozen graphs, by their names in TensorFlow; nothing here imports it."""

from __future__ import annotations

from typing import Final

PLACEHOLDERS: Final = frozenset({"Placeholder", "PlaceholderV2"})
WITHOUT_USE: Final = frozenset(
    {"Assert", "Const", "Exit", "NoOp", "Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
)
"""Operations that are no outputs, though nothing reads them; `Exit` gives what a loop has counted."""
ITERATOR: Final = "IteratorGetNext"
"""The operation that gives a batch of the data that a graph was frozen with, as those of Estimators are."""
DECODERS: Final = frozenset({"DecodeJpeg", "DecodePng", "DecodeImage"})
"""Operations that decode images."""
