"""Payloads: requests that are built and serialised before the run, so that sending one is cheap."""

from __future__ import annotations

import io
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Files of a folder that are sent at most; of more, a sample. All are held in memory, as pixels and as files."""
_MAX_REQUEST_BYTES: Final = 2**31 - 1
"""The largest message that protobuf serialises."""

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes, by their channels."""
STAMP_BYTES: Final = 8
"""Bytes of the stamp, a number that makes each request distinct. It replaces the last bytes of an image's pixels, or
follows an image file, where decoders of JPEG, PNG and WebP do not read it."""


class PayloadError(Exception):
    """The payload can't be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A serialised ModelInferRequest."""

    data: bytes
    images: int
    mode: str
    model: int = 0
    """Index of the model in `Arm.served`."""
    stamp_at: int | None = None
    """Offset in `data` of the STAMP_BYTES at the end of the last image that may be replaced; None where none may."""

    def stamped(self, number: int) -> Request:
        """Returns a copy of the request with `number` as its stamp."""
        assert self.stamp_at is not None
        data, end = memoryview(self.data), self.stamp_at + STAMP_BYTES
        stamp = number.to_bytes(STAMP_BYTES, "little")
        whole = b"".join((data[: self.stamp_at], stamp, data[end:]))
        return Request(whole, self.images, self.mode, self.model, self.stamp_at)


class Body(NamedTuple):
    """A serialised ModelInferRequest without its mode."""

    data: bytes
    kind: Kind
    has_stamp: bool = False
    """Whether the last STAMP_BYTES may be replaced by a stamp."""


class Maker(Protocol):
    """Makes the requests for one model."""

    @property
    def has_stamp(self) -> bool:
        """Whether the last STAMP_BYTES of a request may be replaced by a stamp."""

    def variety(self, kind: Kind) -> int:
        """Returns the number of distinct requests of a kind. Raises PayloadError."""

    def item_bytes(self, kind: Kind) -> int:
        """Returns the size in bytes of the largest image or other item."""

    def data(self, kind: Kind, first: int) -> bytes:
        """Returns a serialised ModelInferRequest with `kind.images` images or other items, from the index `first` on.

        Raises PayloadError.
        """


class Layout(NamedTuple):
    """The pixels that a model takes."""

    channels: int = 3
    axes: str = "NHWC"
    """The axes of an input: batch, height, width and channels."""

    @classmethod
    def of(cls, shape: Sequence[int]) -> Layout | None:
        """Returns the layout of an input of `shape`, None where it holds no grey, RGB or RGBA images."""
        match [*shape]:
            case [_, _, _]:
                return cls(1, "NHW")
            case [_, _, _, channels] if channels in _MODES:
                return cls(channels)
            case [_, channels, _, _] if channels in _MODES:
                return cls(channels, "NCHW")
        return None

    def arranged(self, images: Pixels) -> Pixels:
        """Returns images `[n, height, width, channels]` with these axes."""
        match self.axes:
            case "NHW":
                return images[..., 0]
            case "NCHW":
                return images.transpose(0, 3, 1, 2)
        return images


RGB: Final = Layout()


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as encoded bytes, and as pixels `[height, width, channels]`."""

    encoded: bytes
    pixels: Pixels


def synthetic(count: int, *, size: Size, seed: int, channels: int = 3) -> list[Picture]:
    """Returns `count` seeded images as PNG files and pixels, with soft shapes and some noise, so that they compress
    about as well as photographs."""
    height, width = size
    generator = np.random.default_rng(seed)
    pictures = []
    grid = (count, 6, 6) if channels == 1 else (count, 6, 6, channels)
    for coarse in generator.integers(0, 256, grid, np.uint8):
        soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        pixels = np.clip(soft + generator.normal(0, 4, soft.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
        pictures.append(Picture(buffer.getvalue(), pixels.reshape(height, width, channels)))
    return pictures


def from_folder(folder: Path, *, size: Size | None, seed: int = 0, channels: int = 3) -> list[Picture]:
    """Reads the JPEG, PNG and WebP files of a folder, MAX_FILES at most; pixels are fitted to `size`.

    Raises PayloadError.
    """
    paths = sampled(sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES), seed)
    if not paths:
        raise PayloadError(f"--images: {folder} holds no file that ends in {', '.join(SUFFIXES)}")
    return [_picture(path, size, channels) for path in paths]


@contextmanager
def reading_image(path: Path) -> Iterator[None]:
    """Turns errors of reading an image file into PayloadError, which names the file."""
    try:
        yield
    except UnidentifiedImageError:  # its own message names an object in memory
        got = "another file or one that is damaged" if path.stat().st_size else "an empty file"
        raise PayloadError(f"{path}: cannot identify the image: expected JPEG, PNG or WebP, got {got}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise PayloadError(f"{path}: {error}") from None


def _picture(path: Path, size: Size | None, channels: int) -> Picture:
    with reading_image(path):
        encoded = path.read_bytes()
        image = Image.open(io.BytesIO(encoded)).convert(_MODES[channels])
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return Picture(encoded, np.asarray(image).reshape(image.height, image.width, channels))


def _file_bytes(path: Path, form: Form, channels: int) -> int:
    """Returns the size in bytes of an image file in `form`, without decoding it. Raises PayloadError."""
    with reading_image(path):
        if form == "encoded":
            return path.stat().st_size
        with Image.open(path) as image:
            return channels * image.width * image.height


def sampled(paths: Sequence[Path], seed: int) -> list[Path]:
    """Returns the paths in their order; of more than MAX_FILES, a sample drawn with `seed`."""
    if len(paths) <= MAX_FILES:
        return list(paths)
    chosen = np.random.default_rng(seed).choice(len(paths), MAX_FILES, replace=False)
    return [paths[place] for place in sorted(chosen.tolist())]


class ImageMaker:
    """Makes requests with images of a folder, or with synthetic images where `folder` is None.

    Pixels have the size of the request's kind, or else `size`; where both are None, the size of the image file.
    """

    def __init__(
        self,
        model: str,
        form: Form,
        *,
        folder: Path | None,
        size: Size | None,
        seed: int,
        has_stamp: bool = False,
        layout: Layout = RGB,
    ) -> None:
        self.has_stamp = has_stamp
        self._layout = layout
        self._model = model
        self._form = form
        self._folder = folder
        self._size = size
        self._seed = seed
        self._groups: dict[Size | None, list[Picture]] = {}

    def variety(self, kind: Kind) -> int:
        """Returns the number of images."""
        if kind.file:
            return 1
        is_synthetic = self._folder is None and (kind.size or self._size)
        return DISTINCT_REQUESTS if is_synthetic else len(self._group(kind))

    def item_bytes(self, kind: Kind) -> int:
        """Returns the size in bytes of the largest image. Raises PayloadError."""
        size = kind.size or self._size
        if kind.file and (size is None or self._form == "encoded"):
            return _file_bytes(Path(kind.file), self._form, self._layout.channels)
        if size and self._form == "pixels":
            return self._layout.channels * math.prod(size)
        group = self._group(kind)
        return max(picture.pixels.nbytes if self._form == "pixels" else len(picture.encoded) for picture in group)

    def data(self, kind: Kind, first: int) -> bytes:
        """Returns a request with consecutive images from the index `first` on, or with copies of the kind's file."""
        size, channels = kind.size or self._size, self._layout.channels
        group = [_picture(Path(kind.file), size, channels)] if kind.file else self._group(kind)
        chosen = [group[(first + offset) % len(group)] for offset in range(kind.images)]
        after = bytes(STAMP_BYTES) if self.has_stamp else b""
        return _serialised(self._model, chosen, self._form, after, self._layout)

    def _group(self, kind: Kind) -> list[Picture]:
        size, channels = kind.size or self._size, self._layout.channels
        if size not in self._groups:
            if self._folder is not None and (size or self._form == "encoded"):
                self._groups[size] = from_folder(self._folder, size=size, seed=self._seed, channels=channels)
            elif size:
                self._groups[size] = synthetic(DISTINCT_REQUESTS, size=size, seed=self._seed, channels=channels)
            else:
                raise PayloadError(f"{self._model} takes images of several sizes: choose one with --size HEIGHTxWIDTH")
        return self._groups[size]


def make_bodies(kinds: Sequence[Kind], makers: Sequence[Maker], copies: int = 1) -> list[Body]:
    """Returns a request for each of `kinds`; `makers` has a maker for each of the arm's models.

    Requests of one kind differ as far as the kind's variety and a limit on all requests together allow. Raises
    PayloadError, also where `copies` of all requests do not fit in memory.
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
    request_bytes = {kind: kind.images * makers[kind.model].item_bytes(kind) for kind in varieties}
    check_memory([request_bytes[kind] for kind, _ in distinct], copies)
    made = {
        (kind, first): Body(makers[kind.model].data(kind, first), kind, makers[kind.model].has_stamp)
        for kind, first in distinct
    }
    return [made[place] for place in places]


def check_memory(request_bytes: Sequence[int], copies: int = 1) -> None:
    """Raises PayloadError where a request of these sizes is too large to send, or `copies` of all do not fit in
    memory."""
    if max(request_bytes) > _MAX_REQUEST_BYTES:
        size = max(request_bytes) / 2**30
        raise PayloadError(f"a request would have {size:,.1f} GiB: expected less than 2, which is the most of protobuf")
    needed, free = sum(request_bytes) * copies, psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free"
        each = f" with {copies} copies of each, for modes and workers" if copies > 1 else ""
        what = f"{len(request_bytes)} different requests{each} would take {sizes}"
        raise PayloadError(f"{what}: choose fewer or smaller ones")


def for_modes(bodies: Sequence[Body], modes: Sequence[str]) -> dict[str, tuple[Request, ...]]:
    """Returns the requests of each mode, which differ only in the mode. An empty mode is not sent."""
    requests = {}
    for mode in modes:
        parameter = oip.ModelInferRequest()
        if mode:
            parameter.parameters["mode"].string_param = mode
        # Protobuf merges concatenated messages into one.
        suffix = parameter.SerializeToString()
        # A body that occurs several times is one object in memory.
        made = {
            id(body): Request(
                body.data + suffix,
                body.kind.images,
                mode,
                body.kind.model,
                len(body.data) - STAMP_BYTES if body.has_stamp else None,
            )
            for body in {id(body): body for body in bodies}.values()
        }
        requests[mode] = tuple(made[id(body)] for body in bodies)
    return requests


def _serialised(model: str, chosen: Sequence[Picture], form: Form, after: bytes, layout: Layout) -> bytes:
    """Returns a request that ends with its last image; in an encoded image, `after` follows the file."""
    message = oip.ModelInferRequest(model_name=model)
    if form == "encoded":
        message.inputs.add(name="image", datatype="BYTES", shape=[len(chosen)])
        files = [*(picture.encoded for picture in chosen[:-1]), chosen[-1].encoded + after]
        elements = [struct.pack("<I", len(file)) + file for file in files]
        message.raw_input_contents.append(b"".join(elements))
    else:
        if sum(picture.pixels.nbytes for picture in chosen) < len(after):
            raise PayloadError(f"--distinct: expected images of {len(after)} bytes or more")
        images = layout.arranged(np.stack([picture.pixels for picture in chosen]))
        message.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
        message.raw_input_contents.append(images.tobytes())
    return message.SerializeToString()
