"""OpenVINO in float32, as the peers run it; imported in their own environments."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import openvino as ov

SHAPE: Final = (224, 224, 3)


def compile_saved(saved: str, batch: int, **properties: object) -> Any:
    """Returns the SavedModel `saved`, compiled for batches of `batch`, or of any size where that is -1."""
    converted = ov.convert_model(saved, input=[(batch, *SHAPE)])
    return ov.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **properties})


def run(compiled: Any, pixels: Any) -> Any:
    """Returns the scores `[n, 1000]` of `pixels` `[n, 224, 224, 3]`."""
    return np.asarray(compiled(pixels)[0])
