from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.errors import OutOfDeviceMemory
from xlaserve.programs.tf.function import Function

IMAGES: Final = np.zeros((2, 4, 5, 3), np.uint8)


def test_only_xlas_memory_errors_are_taken_for_a_lack_of_memory() -> None:
    def failing(pixels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        raise tf.errors.InternalError(None, None, message)

    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."
    with pytest.raises(OutOfDeviceMemory):
        Function(failing)(IMAGES)
    message = "Autotuning failed"
    with pytest.raises(tf.errors.InternalError):
        Function(failing)(IMAGES)
