"""The file of an encoded image: opened with its header read, and bounded before any pixel is allocated."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, NamedTuple

from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from xlaserve.config import ResizeLibrary
from xlaserve.errors import ImageTooLarge, InvalidImage, RequestError
from xlaserve.images.file_kinds import kind_of
from xlaserve.images.frame import Frame, Region
from xlaserve.images.jpeg import JpegFile
from xlaserve.images.orientation import SIDEWAYS, orientation

_STEP: Final = 1 << 20
_MAX_SIDE: Final = 65_535  # JPEG's own bound; one pixel wide and 64 million high would take gigabytes to resize
# A few bytes of these cost many times more than a few bytes of pixels:
_MAX_JPEG_SCANS: Final = 500  # each passes over the whole image; encoders write about ten
_MAX_PNG_PROFILES: Final = 4  # each unpacks a thousandfold; the standard allows one
# Taken at the peak of decoding, for each pixel, at most:
_PIXEL_BYTES: Final = 8  # four as Pillow keeps them, and four while they are converted or turned
_ARRAY_PIXEL_BYTES: Final = 14  # and six while they become an array before they are resized
_COEFFICIENT_BYTES: Final = 8  # of a JPEG of several scans, reduced or not: two for each of four components
_WEBP_PIXEL_BYTES: Final = 20  # several canvases
_FAST_SCALE: Final = 2
"""The least ratio of a reduced image's sides to those that it is then resized to."""

Place = Callable[[int, int], Frame]
"""Maps the height and width of an upright image to its frame; may refuse it with a RequestError."""

Hold = Callable[[int], AbstractContextManager[object]]
"""Waits until a number of bytes may be taken, and holds them until the end."""


class Opened(NamedTuple):
    """An image whose header is read."""

    image: ImageFile
    width: int
    """Pixels, as the header states them."""
    height: int
    box: Region | None
    """The part of the decoded pixels that is the image; None where that is the whole."""


@contextmanager
def opened(
    data: bytes, max_pixels: int, hold: Hold, shrink_to: Place | None, library: ResizeLibrary
) -> Iterator[Opened]:
    """Yields the image with its header read; anything that Pillow raises becomes InvalidImage.

    Raises ImageTooLarge for more than `max_pixels`, and holds the bytes that decoding takes. With `shrink_to`, a JPEG
    will be decoded to fewer pixels, where those suffice for the size that `shrink_to` gives; `library` resizes it then.

    Opens Pillow's plugins directly: `Image.open` compares images with a bound that is global to the process, and warns.
    """
    if not data:
        raise InvalidImage("image: expected JPEG, PNG or WebP, got no bytes")
    file: type[ImageFile]
    if data.startswith(b"\xff\xd8\xff"):
        name, file = "JPEG", JpegFile
        if _count(data, b"\xff\xda") > _MAX_JPEG_SCANS:
            raise InvalidImage(f"image: expected a JPEG of at most {_MAX_JPEG_SCANS} scans, got more")
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        name, file = "PNG", PngImageFile
        if _count(data, b"iCCP") > _MAX_PNG_PROFILES:
            raise InvalidImage("image: expected a PNG of at most one colour profile, got more")
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        name, file = "WebP", WebPImageFile
    else:
        raise InvalidImage(f"image: expected JPEG, PNG or WebP, got {_described(data)}")
    try:
        with ExitStack() as held:
            if file is WebPImageFile:  # opening it already allocates the canvas
                held.enter_context(hold(_check_size(*_webp_size(data), max_pixels) * _WEBP_PIXEL_BYTES))
            with file(_Reader(data)) as image:
                width, height = image.size
                pixels = _check_size(width, height, max_pixels)
                box = _shrink(image, shrink_to) if shrink_to is not None else None
                if file is not WebPImageFile:
                    held.enter_context(hold(_decoding_bytes(image, pixels, library)))
                yield Opened(image, width, height, box)
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        wrong = "cut off" if _is_cut_off(data) else "damaged or of a rare kind"
        raise InvalidImage(f"image: expected a whole {name} image, got {len(data)} bytes that are {wrong}") from error


def placed(width: int, height: int, turn: int, place: Place) -> Frame:
    """Returns the frame of an image with these sides before it is turned."""
    return place(*((width, height) if turn in SIDEWAYS else (height, width)))


class _Reader(io.BytesIO):
    """Limits the reads: a file of millions of tiny segments would hold the interpreter's lock for seconds."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left = 4096 + len(data) // 64

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise InvalidImage("image: expected an image, got one made of too many tiny segments")
        return super().read(size)


def _described(data: bytes) -> str:
    """Returns a description of a file that is no JPEG, PNG or WebP: its kind, or else its first bytes."""
    if kind := kind_of(data):
        return f"{kind} ({len(data)} bytes)"
    start = data[:8].decode("ascii", "replace")
    start = "".join(letter if letter.isascii() and letter.isprintable() else "." for letter in start)
    return f"{len(data)} bytes that start with '{start}'"


def _is_cut_off(data: bytes) -> bool:
    """Whether a JPEG, PNG or WebP file lacks its end."""
    if data.startswith(b"RIFF"):
        return len(data) < 12 or len(data) < 8 + int.from_bytes(data[4:8], "little")
    return not _count(data, b"\xff\xd9" if data.startswith(b"\xff\xd8") else b"IEND")


def _count(data: bytes, mark: bytes) -> int:
    """Returns how often `mark` is in `data`; in steps, since each holds the interpreter's lock."""
    return sum(data.count(mark, start, start + _STEP + len(mark) - 1) for start in range(0, len(data), _STEP))


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _check_size(width: int, height: int, max_pixels: int) -> int:
    """Returns the number of pixels."""
    if height * width > max_pixels:
        raise ImageTooLarge(
            f"image: expected at most {max_pixels} pixels (max_image_pixels), got {height * width} ({width} x {height})"
        )
    if max(height, width) > _MAX_SIDE:
        raise ImageTooLarge(f"image: expected sides of at most {_MAX_SIDE} pixels, got {width} x {height}")
    return height * width


def _shrink(image: ImageFile, place: Place) -> Region | None:
    """Has a JPEG decoded to fewer pixels, and returns the part of them that it covers. None for other files."""
    if not isinstance(image, JpegFile):
        return None
    turn = orientation(image.info)
    frame = placed(*image.size, turn, place)
    left, top, right, bottom = frame.part
    width = math.ceil(frame.fitted_width * frame.width / (right - left))
    height = math.ceil(frame.fitted_height * frame.height / (bottom - top))
    if turn in SIDEWAYS:
        height, width = width, height
    return image.shrink_on_load(_FAST_SCALE * width, _FAST_SCALE * height)


def _decoding_bytes(image: ImageFile, pixels: int, library: ResizeLibrary) -> int:
    """Returns the bytes that it takes to decode a JPEG, perhaps to fewer pixels than it has, or a PNG.

    `library` resizes it then: Pillow's own images, or arrays.
    """
    size_bytes = math.prod(image.size) * (_PIXEL_BYTES if library is ResizeLibrary.PILLOW else _ARRAY_PIXEL_BYTES)
    if isinstance(image, JpegFile) and image.has_several_scans:
        size_bytes += pixels * _COEFFICIENT_BYTES
    return size_bytes
