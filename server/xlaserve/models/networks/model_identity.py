"""The identity of a model in the compile cache: its settings, and the contents of its files."""

from __future__ import annotations

from typing import Any, Final

from xlaserve.config import ModelSettings, model_files
from xlaserve.models import catalog
from xlaserve.programs.cache.environment import digest

_IRRELEVANT: Final = {
    "name",
    "version",
    "versions",
    "version_labels",
    "routing",
    "fit",
    "shorter_side",
    "border",
    "resize",
    "decode",
    "equalize",
    "modes",
    "default_mode",
    "buckets",
    "auto_buckets",
    "unmatched",
    "max_background_resolutions",
    "max_queue_delay_ms",
    "max_queue_images",
    "verification",
    "examples",
    "batch_dependence",
}
"""Settings that do not change the computation. Every other setting makes another model."""


def identity(settings: ModelSettings) -> dict[str, Any] | None:
    """Returns the facts that identify a model: its settings, and digests of the files that they name.

    None where its settings do not identify it. Raises OSError where a file can't be read.
    """
    if not catalog.can_be_kept(settings):
        return None
    facts = settings.model_dump(mode="json", exclude=_IRRELEVANT)
    # The description of a network says what is lowered for XLA, where a mode is XLA's.
    facts["has_jit"] = any(mode.traits.is_jit for mode in settings.compiled_modes)
    # Batches of a model whose images may depend on each other are not divided.
    facts["is_whole"] = settings.batch_dependence == "allow"
    # Of labels too: where the outputs don't show how many classes there are, labels do.
    for path in model_files.named_paths(settings):
        facts[str(path)] = digest(path, model_files.files_at(path))
    return facts
