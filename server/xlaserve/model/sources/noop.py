"""`builtin:noop`: a model that computes next to nothing, to measure everything around a model. No TensorFlow."""

from __future__ import annotations

from typing import Final

import numpy as np

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import Compilation, Images, Outputs

SIDE: Final = 224
CLASSES: Final = 1000


class NoopProgram:
    """A `Program` whose row i is the first 1,000 bytes of image i as float32, so that rows can be told apart."""

    platform = "numpy"

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Returns an executable that is the same in every mode and takes no time to make."""
        shape = (*bucket, 3)

        def executable(images: Images) -> Outputs:
            if images.shape != shape or images.dtype != np.uint8:
                raise ValueError(f"pixels: expected uint8 {shape}, got {images.dtype} {images.shape}")
            return (images.reshape(bucket.batch, -1)[:, :CLASSES].astype(np.float32),)

        return Compilation(executable, trace_s=0.0, compile_s=0.0)
