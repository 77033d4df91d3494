"""What `decode: fast` gains: images/s of photograph-like JPEGs decoded alone, and served end to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Final

from bench import processes
from bench.figures import Figure, ratio
from bench.generator import closed_loop, image_request
from bench.trials import interleaved
from xlaserve.config import Decoding, Fit, Settings
from xlaserve.images.decoder import ImageLimits, decode
from xlaserve.images.frame import place
from xlaserve.models.fast_decoding import encode, photograph

SIDE: Final = 224
SIZES: Final = ((375, 500), (960, 1280), (3000, 4000))
"""Heights and widths: what data sets have, what is sent on, what cameras take."""
AT_ONCE: Final = 16
MODELS: Final[Mapping[str, Mapping[str, object]]] = {
    "noop": {"source": "builtin:noop", "buckets": (1, 2, 4, 8)},
    "MobileNetV2": processes.application("MobileNetV2", buckets=(1, 2, 4)),
}
"""Models that take next to nothing, so that decoding is the limit, and what a small network does."""
Arms = Mapping[str, Callable[[], float]]
LIMITS: Final = ImageLimits.of(Settings())


def decoding(blocks: int, block_s: float) -> list[Figure]:
    """Images/s of `decode: fast` over those of `decode: exact`, on one thread and served."""
    images = {f"{width}x{height}": encode(photograph(height, width)) for height, width in SIZES}
    figures = []
    for size, encoded in images.items():
        arms: Arms = {way: partial(_decoded_per_s, encoded, way, block_s) for way in Decoding}
        figures.append(_compared(f"decoding alone, {size}", arms, blocks))
    for name, settings in MODELS.items():
        config = {"models": [{**settings, "name": way, "decode": way} for way in Decoding]}
        with processes.xlaserve(config) as server:
            for size, encoded in images.items():
                arms = {way: partial(_served_per_s, server, image_request(way, encoded), block_s) for way in Decoding}
                figures.append(_compared(f"served by {name}, {size}", arms, blocks))
    return figures


def _compared(what: str, arms: Arms, blocks: int) -> Figure:
    rates = interleaved(arms, blocks)
    said = ", ".join(f"{median(rates[way]):.1f} images/s {way}" for way in arms)
    print(f"  {what}: {said}", flush=True)
    return ratio(f"{what}, fast / exact", rates[Decoding.FAST], rates[Decoding.EXACT], None)


def _decoded_per_s(encoded: bytes, way: Decoding, seconds: float) -> float:
    where = partial(place, input_height=SIDE, input_width=SIDE, fit=Fit.RESIZE)
    began, count = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began) < seconds:
        decode(encoded, where, LIMITS, decoding=way)
        count += 1
    return count / took_s


def _served_per_s(server: processes.Server, payload: bytes, seconds: float) -> float:
    return closed_loop(server.address, payload, AT_ONCE, seconds=seconds).per_s
