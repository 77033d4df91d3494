"""What is sent: requests that are built and serialised before the run, so that sending one costs little."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from xlaserve_proto import open_inference_pb2 as oip

Kind = Literal["pixels", "encoded"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Pixels = NDArray[np.uint8]
Size = tuple[int, int]
"""Height and width."""

DISTINCT_REQUESTS: Final = 16
"""Enough that no cache sees only one image, few enough to stay in memory."""
MIXED_REQUESTS: Final = 40
"""For a mix of sizes or counts: a share of 0.025 is one request."""
SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp")
MAX_FILES: Final = 256
"""More files of a folder are sampled: all are held in memory, as pixels and as files."""
_MAX_REQUEST_BYTES: Final = 2**31 - 1
"""The most that protobuf serialises."""


class PayloadError(Exception):
    """There is nothing to send; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A serialised ModelInferRequest."""

    data: bytes
    images: int
    mode: str


@dataclass(frozen=True, slots=True)
class Mix:
    """Images per request: counts and their shares, which add up to 1."""

    shares: Mapping[int, float]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Reads `8` or `1:0.7,8:0.3`. Raises ValueError."""
        shares: dict[int, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d*\.?\d+)\s*)?", part)
            if not match or not int(match[1]) or int(match[1]) in shares:
                raise ValueError(f"expected images per request such as 8 or 1:0.7,8:0.3, got {text!r}")
            shares[int(match[1])] = float(match[2] or 1)
        total = sum(shares.values())
        if not total or 0 in shares.values():
            raise ValueError(f"expected shares over 0, got {text!r}")
        return cls({count: share / total for count, share in shares.items()})

    def __str__(self) -> str:
        if len(self.shares) == 1:
            return str(next(iter(self.shares)))
        return ",".join(f"{count}:{share:g}" for count, share in self.shares.items())

    def counts(self, requests: int, seed: int) -> list[int]:
        """Returns the images of each of `requests`, as near to the shares as whole numbers get, in a random order."""
        exact = {count: share * requests for count, share in self.shares.items()}
        whole = {count: int(value) for count, value in exact.items()}
        by_rest = sorted(exact, key=lambda count: whole[count] - exact[count])
        for count in by_rest[: requests - sum(whole.values())]:
            whole[count] += 1
        counts = np.repeat(list(whole), list(whole.values()))
        return [int(count) for count in np.random.default_rng(seed).permutation(counts)]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as encoded bytes, and as pixels `[height, width, 3]`."""

    encoded: bytes
    pixels: Pixels


def synthetic(count: int, *, size: Size, seed: int) -> list[Picture]:
    """Returns seeded RGB images as PNG files and pixels: soft shapes and some noise, so that they compress much as
    photographs do."""
    height, width = size
    generator = np.random.default_rng(seed)
    pictures = []
    for coarse in generator.integers(0, 256, (count, 6, 6, 3), np.uint8):
        soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        pixels = np.clip(soft + generator.normal(0, 4, soft.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        pictures.append(Picture(buffer.getvalue(), pixels))
    return pictures


def from_folder(folder: Path, *, size: Size | None, seed: int = 0) -> list[Picture]:
    """Reads the JPEG, PNG and WebP files of a folder, MAX_FILES at most; pixels are fitted to `size`.

    Raises PayloadError.
    """
    pictures = []
    for path in sampled(sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES), seed):
        encoded = path.read_bytes()
        try:
            image = Image.open(io.BytesIO(encoded)).convert("RGB")
        except (OSError, UnidentifiedImageError, ValueError) as error:
            raise PayloadError(f"--images: {path}: {error}") from None
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pictures.append(Picture(encoded, np.asarray(image)))
    if not pictures:
        raise PayloadError(f"--images: {folder} holds no file that ends in {', '.join(SUFFIXES)}")
    return pictures


def sampled(paths: Sequence[Path], seed: int) -> list[Path]:
    """Returns the paths, or MAX_FILES of them drawn with `seed`, in their order."""
    if len(paths) <= MAX_FILES:
        return list(paths)
    chosen = np.random.default_rng(seed).choice(len(paths), MAX_FILES, replace=False)
    return [paths[place] for place in sorted(chosen.tolist())]


def pictures(folder: Path | None, sizes: Sequence[Size], seed: int) -> list[list[Picture]]:
    """Returns the images to send, a group for each size; without sizes a folder's images in their own size."""
    if folder is not None:
        return [from_folder(folder, size=size, seed=seed) for size in sizes or (None,)]
    return [synthetic(DISTINCT_REQUESTS, size=size, seed=seed) for size in sizes]


def make_bodies(
    groups: Sequence[Sequence[Picture]], *, model: str, kind: Kind, mix: Mix, seed: int
) -> list[tuple[bytes, int]]:
    """Returns serialised ModelInferRequests with their number of images, in the order of sending.

    There is a group of pictures for each resolution. A request takes neighbours from one group, and the groups take
    turns. Pixels of a group have one size.
    """
    is_plain = len(groups) == 1 and len(mix.shares) == 1
    number = max(DISTINCT_REQUESTS, len(groups[0])) if is_plain else MIXED_REQUESTS
    bodies: list[tuple[bytes, int]] = []
    counts = mix.counts(number, seed)
    largest = max(picture.pixels.nbytes if kind == "pixels" else len(picture.encoded) for picture in chain(*groups))
    check_memory(largest, counts)
    for index, count in enumerate(counts):
        group = groups[index % len(groups)]
        start = index // len(groups)
        chosen = [group[(start + offset) % len(group)] for offset in range(count)]
        bodies.append((_body(model, chosen, kind), count))
    return bodies


def check_memory(image_bytes: int, counts: Sequence[int]) -> None:
    """Raises PayloadError where requests of so many images are too large to send, or for this machine to hold."""
    if image_bytes * max(counts) > _MAX_REQUEST_BYTES:
        size = image_bytes * max(counts) / 2**30
        raise PayloadError(f"a request would have {size:,.1f} GiB: expected less than 2, which is the most of protobuf")
    needed, free = image_bytes * sum(counts), psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
        raise PayloadError(f"{len(counts)} different requests would take {sizes}: choose fewer or smaller images")


def for_modes(bodies: Sequence[tuple[bytes, int]], modes: Sequence[str]) -> dict[str, tuple[Request, ...]]:
    """Returns the requests of each mode: the same except for the mode. An empty mode is not sent."""
    requests = {}
    for mode in modes:
        parameter = oip.ModelInferRequest()
        if mode:
            parameter.parameters["mode"].string_param = mode
        # Protobuf merges concatenated messages into one.
        suffix = parameter.SerializeToString()
        requests[mode] = tuple(Request(body + suffix, count, mode) for body, count in bodies)
    return requests


def _body(model: str, chosen: Sequence[Picture], kind: Kind) -> bytes:
    message = oip.ModelInferRequest(model_name=model)
    if kind == "encoded":
        message.inputs.add(name="image", datatype="BYTES", shape=[len(chosen)])
        elements = [struct.pack("<I", len(picture.encoded)) + picture.encoded for picture in chosen]
        message.raw_input_contents.append(b"".join(elements))
    else:
        images = np.stack([picture.pixels for picture in chosen])
        message.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
        message.raw_input_contents.append(images.tobytes())
    return message.SerializeToString()
