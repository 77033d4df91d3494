"""The ceiling: the same compiled functions, called without a server, at their best bucket on every lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from bench.trials import TRIAL_S, fastest
from xlaserve.config import Bucket, Mode, Settings
from xlaserve.engine.program import Executable
from xlaserve.engine.warmup.compiler import noise
from xlaserve.programs.tf.device import configure
from xlaserve.telemetry.logs import quiet_tensorflow
from xlaserve_loadtest.targets.in_process import warm


def begin(config: Mapping[str, object]) -> tuple[int, Callable[[str, float], float]]:
    """Warms the first model of `config` up; returns its lanes, and what runs the best bucket of a mode on all of them
    for some seconds and returns images/s.
    """
    settings = Settings.model_validate(config)
    quiet_tensorflow()
    device = configure(settings, uses_tensorflow=True)
    _, warmed = warm(settings.models[0], device.lanes)
    programs = {at: one.executable for at, one in warmed.items()}
    bests = {mode: best({at[1]: programs[at] for at in programs if at[0] is mode}, device.lanes) for mode, _ in warmed}
    return device.lanes, lambda mode, seconds: images_per_s(*bests[Mode(mode)], device.lanes, seconds)


def best(programs: Mapping[Bucket, Executable], lanes: int) -> tuple[Bucket, Executable]:
    """Returns the bucket with the most images/s, and its program."""
    bucket = fastest(list(programs), lambda bucket: images_per_s(bucket, programs[bucket], lanes, TRIAL_S))
    return bucket, programs[bucket]


def images_per_s(bucket: Bucket, executable: Executable, lanes: int, seconds: float) -> float:
    """Returns images/s with every lane running one bucket."""
    (images,) = noise(bucket)
    until = time.perf_counter() + seconds

    def run() -> float:
        batches, began = 0, time.perf_counter()
        while time.perf_counter() < until:
            executable(images)
            batches += 1
        # Over the lane's own time: another one may end a batch earlier.
        return batches * bucket.batch / (time.perf_counter() - began)

    with ThreadPoolExecutor(lanes) as pool:
        return sum(run.result() for run in [pool.submit(run) for _ in range(lanes)])
