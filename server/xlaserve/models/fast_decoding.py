"""The difference between a model's answers to JPEGs that are decoded fast and to the same JPEGs decoded exactly."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from xlaserve.config import Decoding, Fit, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Executable, Outputs, run_batch
from xlaserve.engine.warmup.auto_buckets import Programs
from xlaserve.engine.warmup.difference import Difference, compare
from xlaserve.images.decoder import ImageLimits, decode
from xlaserve.images.image_file import Place
from xlaserve.models.catalog import Model
from xlaserve.models.encoded_images import conversion

_SCENES: Final = 2
_SCALES: Final = (4, 4, 6, 8)
"""Sides of a scene's images as multiples of the model's sides: from four times on, the decoder reduces them."""
_MAX_PIXELS: Final = 1 << 23
"""Pixels from which on only the smallest scale is made, as larger images take seconds."""
_QUALITY: Final = 90
_CONTRAST: Final = 0.6
_FINER: Final = 0.75
"""Contrast of details over that of details of twice the size."""


def measure(model: Model, programs: Programs, mode: Mode, limits: ImageLimits) -> Difference | None:
    """Returns the difference in the answers to a few JPEGs of several sizes, in the model's smallest bucket.

    None where no image within `limits` is large enough to be reduced, or where the model takes one size only or no
    encoded images. Blocks.
    """
    if model.fit is Fit.REJECT or model.image.color is None:
        return None
    bucket = min((bucket for of, bucket in programs if of is mode), key=lambda bucket: (math.prod(bucket[1:]), bucket))
    where = partial(model.place, (bucket.height, bucket.width))
    encoded = list(_photographs(bucket.height, bucket.width, limits))
    if not encoded:
        return None
    executable = programs[mode, bucket].executable
    exact, fast = (
        _answers(
            executable,
            bucket.batch,
            np.stack([_decoded(image, model, where, limits, way) for image in encoded]),
        )
        for way in (Decoding.EXACT, Decoding.FAST)
    )
    return compare(exact, fast, model.task)


def _decoded(encoded: bytes, model: Model, where: Place, limits: ImageLimits, way: Decoding) -> Images:
    options = conversion(model)._replace(decoding=way)
    return decode(encoded, where, limits, **options._asdict()).pixels


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Returns an image with what matters in photographs: smooth areas, edges, texture and noise at every scale.

    The same one for the same arguments; encoders take its mode, YCbCr, as it is.
    """
    random = np.random.default_rng(seed)
    luminance, *colours = (_clouds(height, width, random) for _ in range(3))
    draw = ImageDraw.Draw(luminance)
    for _ in range(16):
        left, top = random.integers(0, (width, height))
        across, down = random.integers(1, (2 + width // 4, 2 + height // 4))
        draw.ellipse((left, top, left + across, top + down), fill=int(random.integers(256)))
    # Colours of photographs are pale.
    return Image.merge("YCbCr", (luminance, *(Image.eval(colour, lambda level: 96 + level // 4) for colour in colours)))


def encode(image: Image.Image) -> bytes:
    """Returns `image` as a JPEG of quality 90, its colours at half the resolution."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _photographs(height: int, width: int, limits: ImageLimits) -> Iterator[bytes]:
    """Yields JPEGs for a model's input of `height` x `width`, none larger than `limits`."""
    # A little more, so that few sides can be halved without a rest.
    sizes = [(scale * height + 3, scale * width + 5) for scale in _SCALES]
    most = min(limits.max_image_pixels, max(_MAX_PIXELS, math.prod(sizes[0])))
    sizes = [size for size in sizes if math.prod(size) <= most]
    if not sizes:
        return
    for seed in range(_SCENES):
        random = np.random.default_rng(seed)
        scene = photograph(*sizes[-1], seed)
        for rows, columns in sizes:
            left, top = random.integers(0, (scene.width - columns + 1, scene.height - rows + 1)).tolist()
            encoded = encode(scene.crop((left, top, left + columns, top + rows)))
            if len(encoded) <= limits.max_image_bytes:
                yield encoded


def _clouds(height: int, width: int, random: np.random.Generator) -> Image.Image:
    """Returns noise at every scale, from the whole image to a pixel, in grey."""
    image = Image.new("L", (1, 1), 128)
    contrast = _CONTRAST
    for halvings in reversed(range(max(height, width).bit_length())):
        rows, columns = max(1, height >> halvings), max(1, width >> halvings)
        noise = Image.fromarray(random.integers(0, 256, (rows, columns), dtype=np.uint8))
        image = Image.blend(image.resize((columns, rows), Image.Resampling.BICUBIC), noise, contrast)
        contrast *= _FINER
    return image


def _answers(executable: Executable, batch: int, images: Images) -> Outputs:
    """Returns the answers to images, in batches of one size."""
    rows = np.arange(math.ceil(len(images) / batch) * batch) % len(images)
    got = [run_batch(executable, images[part]) for part in rows.reshape(-1, batch)]
    return tuple(np.concatenate(outputs)[: len(images)] for outputs in zip(*got, strict=True))
