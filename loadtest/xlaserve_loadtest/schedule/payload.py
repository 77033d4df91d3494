"""What is sent: requests that are built and serialised before the run, so that sending one costs little."""

from __future__ import annotations

import io
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, get_args

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from xlaserve_loadtest.schedule.mix import DISTINCT_REQUESTS, MIXED_REQUESTS, Kind, Size
from xlaserve_proto import open_inference_pb2 as oip

Form = Literal["pixels", "encoded"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)
Pixels = NDArray[np.uint8]

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
    model: int = 0
    """Index of its model in those of the arm."""


class Body(NamedTuple):
    """A serialised ModelInferRequest without its mode."""

    data: bytes
    kind: Kind


class Maker(Protocol):
    """Makes the requests to one model."""

    def variety(self, kind: Kind) -> int:
        """Returns how many requests of a kind differ. Raises PayloadError."""

    def item_bytes(self, kind: Kind) -> int:
        """Returns the bytes of the largest image or other item."""

    def data(self, kind: Kind, first: int) -> bytes:
        """Returns a serialised ModelInferRequest, with images or other items from the index `first` on.

        Raises PayloadError.
        """


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


class ImageMaker:
    """Makes requests to a model of images, of a folder or synthetic ones.

    Pixels are of a request's size, or else `size`; None leaves a folder's images as they are.
    """

    def __init__(self, model: str, form: Form, *, folder: Path | None, size: Size | None, seed: int) -> None:
        self._model = model
        self._form = form
        self._folder = folder
        self._size = size
        self._seed = seed
        self._groups: dict[Size | None, list[Picture]] = {}

    def variety(self, kind: Kind) -> int:
        """Returns the number of images."""
        return len(self._group(kind))

    def item_bytes(self, kind: Kind) -> int:
        """Returns the bytes of the largest image."""
        group = self._group(kind)
        return max(picture.pixels.nbytes if self._form == "pixels" else len(picture.encoded) for picture in group)

    def data(self, kind: Kind, first: int) -> bytes:
        """Returns a request with neighbours from the image `first` on."""
        group = self._group(kind)
        chosen = [group[(first + offset) % len(group)] for offset in range(kind.images)]
        return _serialised(self._model, chosen, self._form)

    def _group(self, kind: Kind) -> list[Picture]:
        size = kind.size or self._size
        if size not in self._groups:
            if self._folder is not None and (size or self._form == "encoded"):
                self._groups[size] = from_folder(self._folder, size=size, seed=self._seed)
            elif size:
                self._groups[size] = synthetic(DISTINCT_REQUESTS, size=size, seed=self._seed)
            else:
                raise PayloadError(f"{self._model} takes images of several sizes: choose one with --size HEIGHTxWIDTH")
        return self._groups[size]


def make_bodies(kinds: Sequence[Kind], makers: Sequence[Maker]) -> list[Body]:
    """Returns a request of each of `kinds`; `makers` are those of the arm's models.

    Requests of one kind take turns in its variety, as far as memory allows. Raises PayloadError.
    """
    number = len(set(kinds))
    varieties = {kind: makers[kind.model].variety(kind) for kind in set(kinds)}
    most = max(MIXED_REQUESTS, *varieties.values()) // number
    seen: Counter[Kind] = Counter()
    places = []
    for kind in kinds:
        places.append((kind, seen[kind] % max(1, min(varieties[kind], most))))
        seen[kind] += 1
    distinct = dict.fromkeys(places)
    check_memory(max(makers[kind.model].item_bytes(kind) for kind in varieties), [kind.images for kind, _ in distinct])
    made = {(kind, first): Body(makers[kind.model].data(kind, first), kind) for kind, first in distinct}
    return [made[place] for place in places]


def check_memory(image_bytes: int, counts: Sequence[int]) -> None:
    """Raises PayloadError where requests of so many images are too large to send, or for this machine to hold."""
    if image_bytes * max(counts) > _MAX_REQUEST_BYTES:
        size = image_bytes * max(counts) / 2**30
        raise PayloadError(f"a request would have {size:,.1f} GiB: expected less than 2, which is the most of protobuf")
    needed, free = image_bytes * sum(counts), psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
        raise PayloadError(f"{len(counts)} different requests would take {sizes}: choose fewer or smaller images")


def for_modes(bodies: Sequence[Body], modes: Sequence[str]) -> dict[str, tuple[Request, ...]]:
    """Returns the requests of each mode: the same except for the mode. An empty mode is not sent."""
    requests = {}
    for mode in modes:
        parameter = oip.ModelInferRequest()
        if mode:
            parameter.parameters["mode"].string_param = mode
        # Protobuf merges concatenated messages into one.
        suffix = parameter.SerializeToString()
        # What is sent several times is held once.
        made = {
            id(body): Request(body.data + suffix, body.kind.images, mode, body.kind.model)
            for body in {id(body): body for body in bodies}.values()
        }
        requests[mode] = tuple(made[id(body)] for body in bodies)
    return requests


def _serialised(model: str, chosen: Sequence[Picture], form: Form) -> bytes:
    message = oip.ModelInferRequest(model_name=model)
    if form == "encoded":
        message.inputs.add(name="image", datatype="BYTES", shape=[len(chosen)])
        elements = [struct.pack("<I", len(picture.encoded)) + picture.encoded for picture in chosen]
        message.raw_input_contents.append(b"".join(elements))
    else:
        images = np.stack([picture.pixels for picture in chosen])
        message.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
        message.raw_input_contents.append(images.tobytes())
    return message.SerializeToString()
