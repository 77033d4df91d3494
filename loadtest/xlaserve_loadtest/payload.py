"""What is sent: requests made and serialised before the run, so that sending one costs next to nothing."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from xlaserve_proto import open_inference_pb2 as oip

Kind = Literal["pixels", "png"]
KINDS: Final[tuple[Kind, ...]] = ("pixels", "png")

DISTINCT_IMAGES: Final = 16
"""Enough that no cache on the way sees one image only, few enough to stay in memory as requests."""


@dataclass(frozen=True, slots=True)
class Request:
    """A serialised ModelInferRequest."""

    data: bytes
    images: int
    mode: str


def synthetic_images(count: int, *, height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Returns seeded RGB images, `[count, height, width, 3]`: soft shapes and some noise, so that they compress much as
    photographs do."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 6, 6, 3), np.uint8)
    enlarged = (Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC) for image in coarse)
    soft = np.stack([np.asarray(image) for image in enlarged])
    noise = generator.normal(0, 4, soft.shape)
    return np.clip(soft + noise, 0, 255).astype(np.uint8)


def make_requests(
    images: NDArray[np.uint8], *, model: str, modes: Sequence[str], kind: Kind, images_per_request: int
) -> dict[str, tuple[Request, ...]]:
    """Returns what each mode sends in turn: the same requests but for the mode.

    A request holds `images_per_request` neighbours out of `images`, `[n, height, width, 3]`; there is one that begins
    at each image.
    """
    encoded = [_png(image) for image in images] if kind == "png" else []
    requests: dict[str, tuple[Request, ...]] = {}
    messages = []
    for start in range(len(images)):
        chosen = np.arange(start, start + images_per_request) % len(images)
        message = oip.ModelInferRequest(model_name=model)
        if kind == "png":
            message.inputs.add(name="image", datatype="BYTES", shape=[images_per_request])
            elements = [encoded[index] for index in chosen]
            message.raw_input_contents.append(b"".join(struct.pack("<I", len(data)) + data for data in elements))
        else:
            message.inputs.add(name="pixels", datatype="UINT8", shape=[images_per_request, *images.shape[1:]])
            message.raw_input_contents.append(images[chosen].tobytes())
        messages.append(message)
    for mode in modes:
        for message in messages:
            message.parameters["mode"].string_param = mode
        requests[mode] = tuple(Request(message.SerializeToString(), images_per_request, mode) for message in messages)
    return requests


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()
