"""The files that a list of Keras's weights in shards (`.weights.json`) names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

SUFFIX: Final = ".weights.json"


def files(weights: Path) -> list[Path]:
    """Returns the paths of the shards that a file of `save_weights(..., max_shard_size=...)` lists, sorted.

    There may be nothing at them. None for other files, and where it can't be read.
    """
    if not weights.name.endswith(SUFFIX) or not weights.is_file():
        return []
    try:
        listed = json.loads(weights.read_bytes())["weight_map"].values()
        names = {name for each in listed for name in ([each] if isinstance(each, str) else each)}
        return sorted(weights.with_name(name) for name in names)  # Keras takes no other names either
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []
