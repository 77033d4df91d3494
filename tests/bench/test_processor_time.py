from __future__ import annotations

import time

import numpy as np
import pytest
from bench.processor_time import LANES, images_per_processor_s

from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs

IMAGES = np.zeros((4, 1, 1, 3), np.uint8)
BATCH_S = 0.02


def test_images_are_counted_by_processor_time_and_not_by_the_clock() -> None:
    def executable(images: Images) -> Outputs:
        time.sleep(BATCH_S)
        until = time.thread_time() + BATCH_S
        while time.thread_time() < until:
            pass
        return ()

    rate = images_per_processor_s(executable, IMAGES, 0.4)
    assert rate == pytest.approx(len(IMAGES) / BATCH_S, rel=0.2)


def test_every_lane_runs_a_batch_at_the_least() -> None:
    ran = []

    def executable(images: Images) -> Outputs:
        ran.append(len(images))
        return ()

    images_per_processor_s(executable, IMAGES, 0.0)
    assert ran == [len(IMAGES)] * LANES
