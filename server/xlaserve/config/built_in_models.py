"""The models of a server whose settings name none."""

from __future__ import annotations

from typing import Final

from xlaserve.config.bucket_settings import BucketSettings
from xlaserve.config.model_settings import ModelSettings
from xlaserve.config.modes import Mode

BUILTIN_MODELS: Final = (
    ModelSettings(
        name="digits",
        source="builtin:digits",
        modes=(Mode.XLA, Mode.GRAPH, Mode.EAGER),
        buckets=tuple(map(BucketSettings, (1, 2, 4, 8, 16, 32))),
    ),
)
