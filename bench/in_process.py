"""The ceiling: the same compiled functions, called without a server, at their best bucket on every lane."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from xlaserve.config import Bucket, Mode, ModelSettings, Settings
from xlaserve.engine.compiler import Warmed, noise, warm_up
from xlaserve.engine.device import configure
from xlaserve.engine.ledger import Ledger
from xlaserve.model import catalog
from xlaserve.telemetry.logs import quiet_tensorflow


def main() -> None:
    """Warms the first model of the configuration up, says its lanes, then runs it as each line of stdin says."""
    settings = Settings.model_validate(json.loads(sys.argv[1]))
    quiet_tensorflow()
    device = configure(settings, uses_tensorflow=True)
    warmed = warm(settings.models[0], device.lanes)
    print(device.lanes, flush=True)
    for line in sys.stdin:
        mode, seconds = line.split()
        print(images_per_s(warmed, Mode(mode), device.lanes, float(seconds)), flush=True)


def warm(settings: ModelSettings, lanes: int) -> dict[tuple[Mode, Bucket], Warmed]:
    """Loads a model, and compiles and times it as the server does."""
    model = catalog.load(settings)
    return warm_up(
        model=settings.name,
        version=settings.version,
        program=model.program,
        modes=settings.modes,
        buckets=model.buckets,
        lanes=lanes,
        ledger=Ledger(),
        stop=threading.Event(),
    )


def images_per_s(warmed: dict[tuple[Mode, Bucket], Warmed], mode: Mode, lanes: int, seconds: float) -> float:
    """Returns images/s with every lane running the bucket that warm-up found best."""
    bucket = max(
        (bucket for offered, bucket in warmed if offered is mode),
        key=lambda bucket: bucket.batch / warmed[mode, bucket].cost.loaded_s,
    )
    images = noise(bucket)
    executable = warmed[mode, bucket].executable
    until = time.perf_counter() + seconds

    def run() -> int:
        batches = 0
        while time.perf_counter() < until:
            executable(images)
            batches += 1
        return batches

    began = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        batches = sum(run.result() for run in [pool.submit(run) for _ in range(lanes)])
    return batches * bucket.batch / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
