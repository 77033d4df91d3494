"""Compares decoding by xlaserve.images.decoder (Pillow) with OpenCV: images/s, and how long the interpreter is held.

OpenCV is no dependency of ours, so it takes an environment of its own:

    python -m venv /tmp/decode
    /tmp/decode/bin/pip install --constraint constraints.txt . opencv-python-headless
    /tmp/decode/bin/python scripts/bench_decode.py
"""

from __future__ import annotations

import io
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cv2
import numpy as np
from PIL import Image

from xlaserve.config import Fit
from xlaserve.images.decoder import ImageLimits, decode
from xlaserve.images.frame import place

CASES = ((8, 8, 8), (8, 8, 224), (224, 224, 224), (480, 640, 224), (1080, 1920, 224))  # height, width, the model's side
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("JPEG", {"quality": 90}),
    ("PNG", {"compress_level": 6}),
    ("WEBP", {"quality": 85}),
)
LIMITS = ImageLimits(max_image_bytes=1 << 30, max_image_pixels=1 << 30)
BLOCKS = 6
BLOCK_S = 0.15


def with_pillow(data: bytes, side: int) -> Any:
    """Decodes as the server does."""
    return decode(data, partial(place, input_height=side, input_width=side, fit=Fit.RESIZE), LIMITS).pixels


def with_opencv(data: bytes, side: int) -> Any:
    """Decodes to the same size, with OpenCV's nearest to antialiased bilinear: area where it shrinks."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    if image.shape[:2] != (side, side):
        how = cv2.INTER_AREA if min(image.shape[:2]) > side else cv2.INTER_LINEAR
        image = cv2.resize(image, (side, side), interpolation=how)
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def picture(height: int, width: int) -> Image.Image:
    """Something between a photograph and noise."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return Image.fromarray((smooth + rng.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8))


def rate(run: Callable[[], object]) -> float:
    """Returns calls per second over one block."""
    calls, started = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started) < BLOCK_S:
        run()
        calls += 1
    return calls / took_s


def longest_hold_ms(run: Callable[[], object]) -> float:
    """Returns the longest time for which another thread did not get to run; about 1 ms is the clock's own."""
    worker = threading.Thread(target=run)
    longest_s, last = 0.0, time.perf_counter()
    worker.start()
    while worker.is_alive():
        time.sleep(0.0002)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    return longest_s * 1e3


def main() -> None:
    """Prints for each case the ratio of images/s, Pillow's time for one, and the longest hold in the best of runs."""
    cv2.setNumThreads(1)  # both decode one image per thread of a pool
    print(f"{'format':<7} {'image to model':<23}OpenCV / Pillow         decode ms   held ms, Pillow   held ms, OpenCV")
    for format, options in FORMATS:
        for height, width, side in CASES:
            file = io.BytesIO()
            picture(height, width).save(file, format, **options)
            pillow, opencv = (partial(run, file.getvalue(), side) for run in (with_pillow, with_opencv))
            ratios, decode_ms = [], []
            for block in range(BLOCKS):
                order = (pillow, opencv) if block % 2 else (opencv, pillow)
                rates = {run: rate(run) for run in order}
                ratios.append(rates[opencv] / rates[pillow])
                decode_ms.append(1e3 / rates[pillow])
            holds = [min(longest_hold_ms(run) for _ in range(8)) for run in (pillow, opencv)]
            print(
                f"{format:<7} {f'{height}x{width} to {side}x{side}':<23}"
                f"{f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})':<24}"
                f"{min(decode_ms):<12.2f}{holds[0]:<18.1f}{holds[1]:.1f}"
            )


if __name__ == "__main__":
    main()
